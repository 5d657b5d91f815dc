"""DTensors: tensor parallel, FSDP2, HSDP and their products. Loaded only where torch's DTensor already is."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, placement_types

from xla_ckpt.arrays.base import ArrayAdapter
from xla_ckpt.arrays.chunks import copy_chunk_names, hooked_place, is_hooked
from xla_ckpt.dtypes import DType
from xla_ckpt.engine.target import Target, changed
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.sharding.cuts import Cut, interleaved
from xla_ckpt.sharding.local_array import LocalArray
from xla_ckpt.sharding.mesh_cuts import MeshCut, MeshCutting, cutting_of
from xla_ckpt.snapshot.shards import HostShard, MemoryShard


class DTensors:
    """DTensors over any device mesh, with any mix of Shard (strided ones included) and Replicate.

    Hooks of the local tensor that name its chunk count more than the placements, as in torch.distributed.checkpoint.
    """

    kind = "torch"

    def __init__(self, plain: Callable[[torch.Tensor], ArrayAdapter]) -> None:
        self._plain = plain
        """The adapter of a local tensor."""

    def accepts(self, value: Any) -> bool:
        return isinstance(value, DTensor)

    def identity(self, value: Any) -> Hashable | None:
        inner = self._plain(value._local_tensor).identity(value._local_tensor)
        place = hooked_place(value, "") if is_hooked(value) else None
        return None if inner is None else ("dtensor", inner, tuple(value.shape), place)

    def dtype(self, value: Any, path: str = "") -> DType:
        return self._plain(value._local_tensor).dtype(value._local_tensor, path)

    def look(self, value: Any) -> Hashable | None:
        return None

    def shape(self, value: Any) -> tuple[int, ...]:
        return tuple(value.shape)

    def place(self, value: Any, path: str = "") -> LocalArray | None:
        mesh, shape = value.device_mesh, tuple(value.shape)
        _check_order(value, path)
        coordinate = mesh.get_coordinate()
        ranks = tuple(mesh.mesh.flatten().tolist())
        replica, replicas, copied = 0, 1, []
        placements = [_placement(placement, path) for placement in value.placements]
        if coordinate is None:  # this rank is not in the mesh
            return LocalArray(shape=shape, pieces=())
        if is_hooked(value):
            return hooked_place(value, path)
        for d, placement in enumerate(placements):
            if placement.dim is None:
                replica, replicas = replica * mesh.size(d) + coordinate[d], replicas * mesh.size(d)
                copied.append(d)
        cutting = cutting_of(
            shape, [mesh.size(d) for d in range(mesh.ndim)], coordinate, placements, mesh.mesh_dim_names
        )
        _check_even(cutting, path)
        if cutting.local != tuple(value._local_tensor.shape):
            raise UnsupportedStateError(
                "the local part of a DTensor does not have the shape that its placements give",
                leaf=path,
                expected=cutting.local,
                found=f"{tuple(value._local_tensor.shape)} with {value.placements}",
                hint="Redistribute it, or set __create_chunk_list__ on its local tensor, as Megatron-FSDP does.",
            )
        return LocalArray(
            shape=shape,
            pieces=cutting.pieces,
            replica=replica,
            replicas=replicas,
            group=("dtensor", ranks, tuple(copied)),
            spec=cutting.spec,
        )

    def host(self, values: Sequence[tuple[Any, LocalArray]]) -> list[Sequence[HostShard]]:
        return [self._plain(v._local_tensor).host([(v._local_tensor, local)])[0] for v, local in values]

    def shards(self, values: Sequence[tuple[Any, LocalArray]]) -> list[Sequence[MemoryShard]]:
        return [self._plain(v._local_tensor).shards([(v._local_tensor, local)])[0] for v, local in values]

    def into(self, value: Any, local: LocalArray, *, owned: bool) -> Target:
        inner = self._plain(value._local_tensor).into(value._local_tensor, local, owned=owned)

        def install() -> Any:
            inner.install()
            return value

        return changed(inner, install)

    def like(self, value: Any, local: LocalArray, dtype: DType | None = None) -> Target:
        inner = self._plain(value._local_tensor).like(value._local_tensor, local, dtype)
        mesh, placements, shape, stride = value.device_mesh, value.placements, value.shape, value.stride()

        def install() -> Any:
            tensor = DTensor.from_local(inner.install(), mesh, placements, run_check=False, shape=shape, stride=stride)
            return copy_chunk_names(value, tensor)

        return changed(inner, install)


def _placement(placement: Any, path: str) -> MeshCut:
    """What a mesh dim does.

    The type is compared, because a class derived from `Shard` may cut in another way. A strided shard is derived from
    it up to torch 2.9, and no longer in torch 2.10.
    """
    if isinstance(placement, Replicate):
        return MeshCut(None)
    if type(placement) is Shard:
        return MeshCut(placement.dim)
    if type(placement).__name__ == "_StridedShard":
        return MeshCut(placement.dim, int(placement.split_factor))
    why = "has no values of its own yet" if placement.is_partial() else "is cut in a way not known here"
    raise UnsupportedStateError(
        f"a DTensor with the placement {placement} {why}",
        leaf=path,
        hint="Redistribute it to Shard or Replicate before it is saved or loaded.",
    )


def _check_order(value: Any, path: str) -> None:
    """Refuse a DTensor that was cut in another order than that of its mesh dims.

    The spec of newer versions of torch may name such an order, which the placements do not tell. It is None where
    strided shards tell it.
    """
    entries = getattr(value._spec, "shard_order", None) or ()
    if any(list(entry.mesh_dims) != sorted(entry.mesh_dims) for entry in entries):
        raise UnsupportedStateError(
            "a DTensor that is cut in another order than that of its mesh dims cannot be stored",
            leaf=path,
            expected="the default shard order",
            found=f"{value.placements}, shard order {entries}",
            hint="Redistribute it to the default order before it is saved or loaded.",
        )


def _check_even(cutting: MeshCutting, path: str) -> None:
    """Refuse a DTensor that this version of torch cuts in two ways."""
    for n, cut in cutting.uneven:
        if not _torch_agrees(n, cut):
            # Up to torch 2.9 `full_tensor` and `distribute_tensor` give the rows of such a tensor different places.
            raise UnsupportedStateError(
                "this version of torch has two meanings for an interleaved strided shard of uneven blocks",
                leaf=path,
                expected=f"a tensor dim that {cut.factor * cut.parts} blocks divide",
                found=f"{n} elements, torch {torch.__version__}",
                hint="Pad the tensor, redistribute it to Shard or Replicate, or use torch 2.13 or newer.",
            )


def _torch_agrees(size: int, cut: Cut) -> bool:
    """Whether torch deals out this many rows as `interleaved` does."""
    strided: Any = getattr(placement_types, "_StridedShard")  # noqa: B009
    rows = torch.arange(size, device="cpu")
    dealt, _ = strided(0, split_factor=cut.factor)._split_tensor(rows, cut.parts, with_padding=False)
    for k, part in enumerate(dealt):
        ours: list[int] = []
        for low, high in interleaved(size, replace(cut, index=k)):
            ours.extend(range(low, high))
        if part.tolist() != ours:
            return False
    return True
