"""Adapter for DTensors: tensor parallel, FSDP2, HSDP. Only loaded if the program has imported DTensor."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, placement_types

from xla_ckpt.arrays.base import ArrayAdapter
from xla_ckpt.arrays.declared_chunks import copy_declared_chunks, has_chunk_hooks, locate_hooked
from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.sharding.dtensor import (
    DimShard,
    DTensorLayout,
    MeshDimPlacement,
    compute_dtensor_layout,
    compute_interleaved_intervals,
)
from xla_ckpt.core.sharding.local_array import LocalArray
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.loading.target import Target, with_installer
from xla_ckpt.snapshot.shards import HostShard, LocalShard


class DTensorAdapter:
    """An adapter for DTensors on any device mesh, with any mix of Shard (including strided) and Replicate.

    Hooks of the local tensor that declare its chunk take precedence over the placements, as in
    torch.distributed.checkpoint.
    """

    kind = "torch"

    def __init__(self, find_plain_adapter: Callable[[torch.Tensor], ArrayAdapter]) -> None:
        self._find_plain_adapter = find_plain_adapter
        """Finds the adapter of a local tensor."""

    def can_handle(self, value: Any) -> bool:
        return isinstance(value, DTensor)

    def get_identity(self, value: Any) -> Hashable | None:
        inner = self._find_plain_adapter(value._local_tensor).get_identity(value._local_tensor)
        place = locate_hooked(value, "") if has_chunk_hooks(value) else None
        return None if inner is None else ("dtensor", inner, tuple(value.shape), place)

    def get_dtype(self, value: Any, path: str = "") -> DType:
        return self._find_plain_adapter(value._local_tensor).get_dtype(value._local_tensor, path)

    def get_form_key(self, value: Any) -> Hashable | None:
        return None

    def get_shape(self, value: Any) -> tuple[int, ...]:
        return tuple(value.shape)

    def locate(self, value: Any, path: str = "") -> LocalArray | None:
        mesh, shape = value.device_mesh, tuple(value.shape)
        _check_order(value, path)
        coordinate = mesh.get_coordinate()
        ranks = tuple(mesh.mesh.flatten().tolist())
        replica, replicas, copied = 0, 1, []
        placements = [_convert_placement(placement, path) for placement in value.placements]
        if coordinate is None:  # this rank is not in the mesh
            return LocalArray(shape=shape, pieces=())
        if has_chunk_hooks(value):
            return locate_hooked(value, path)
        for d, placement in enumerate(placements):
            if placement.dim is None:
                replica, replicas = replica * mesh.size(d) + coordinate[d], replicas * mesh.size(d)
                copied.append(d)
        cutting = compute_dtensor_layout(
            shape, [mesh.size(d) for d in range(mesh.ndim)], coordinate, placements, mesh.mesh_dim_names
        )
        _check_even(cutting, path)
        if cutting.local_shape != tuple(value._local_tensor.shape):
            raise UnsupportedStateError(
                "the local part of a DTensor does not have the shape that its placements give",
                leaf=path,
                expected=cutting.local_shape,
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

    def get_host_shards(self, values: Sequence[tuple[Any, LocalArray]]) -> list[Sequence[HostShard]]:
        return [
            self._find_plain_adapter(v._local_tensor).get_host_shards([(v._local_tensor, local)])[0]
            for v, local in values
        ]

    def get_shards(self, values: Sequence[tuple[Any, LocalArray]]) -> list[Sequence[LocalShard]]:
        return [
            self._find_plain_adapter(v._local_tensor).get_shards([(v._local_tensor, local)])[0] for v, local in values
        ]

    def create_in_place_target(self, value: Any, local: LocalArray, *, owned: bool) -> Target:
        inner = self._find_plain_adapter(value._local_tensor).create_in_place_target(
            value._local_tensor, local, owned=owned
        )

        def install() -> Any:
            inner.install()
            return value

        return with_installer(inner, install)

    def create_target_like(self, value: Any, local: LocalArray, dtype: DType | None = None) -> Target:
        inner = self._find_plain_adapter(value._local_tensor).create_target_like(value._local_tensor, local, dtype)
        mesh, placements, shape, stride = value.device_mesh, value.placements, value.shape, value.stride()

        def install() -> Any:
            tensor = DTensor.from_local(inner.install(), mesh, placements, run_check=False, shape=shape, stride=stride)
            return copy_declared_chunks(value, tensor)

        return with_installer(inner, install)


def _convert_placement(placement: Any, path: str) -> MeshDimPlacement:
    """Convert the placement of a mesh dim.

    The exact type is compared, because a class derived from `Shard` may split differently. A strided shard is derived
    from it up to torch 2.9, and no longer in torch 2.10.

    Raises:
        UnsupportedStateError: If the placement is of an unsupported type.
    """
    if isinstance(placement, Replicate):
        return MeshDimPlacement(None)
    if type(placement) is Shard:
        return MeshDimPlacement(placement.dim)
    if type(placement).__name__ == "_StridedShard":
        return MeshDimPlacement(placement.dim, int(placement.split_factor))
    why = "has no values of its own yet" if placement.is_partial() else "is cut in a way not known here"
    raise UnsupportedStateError(
        f"a DTensor with the placement {placement} {why}",
        leaf=path,
        hint="Redistribute it to Shard or Replicate before it is saved or loaded.",
    )


def _check_order(value: Any, path: str) -> None:
    """Check that a DTensor is sharded in the order of its mesh dims.

    The spec of newer versions of torch may contain another order, which the placements do not show. It is None if
    strided shards represent the order.

    Raises:
        UnsupportedStateError: If the order differs.
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


def _check_even(cutting: DTensorLayout, path: str) -> None:
    """Reject an uneven DTensor that this version of torch splits in two ways.

    Raises:
        UnsupportedStateError: If the two ways differ.
    """
    for n, cut in cutting.uneven_shards:
        if not _is_split_like_torch(n, cut):
            # Up to torch 2.9 `full_tensor` and `distribute_tensor` assign the rows of such a tensor to different
            # positions.
            raise UnsupportedStateError(
                "this version of torch has two meanings for an interleaved strided shard of uneven blocks",
                leaf=path,
                expected=f"a tensor dim that {cut.split_factor * cut.shard_count} blocks divide",
                found=f"{n} elements, torch {torch.__version__}",
                hint="Pad the tensor, redistribute it to Shard or Replicate, or use torch 2.13 or newer.",
            )


def _is_split_like_torch(size: int, cut: DimShard) -> bool:
    """Return True if torch distributes this many rows as `compute_interleaved_intervals` does."""
    strided: Any = getattr(placement_types, "_StridedShard")  # noqa: B009
    rows = torch.arange(size, device="cpu")
    dealt, _ = strided(0, split_factor=cut.split_factor)._split_tensor(rows, cut.shard_count, with_padding=False)
    for k, part in enumerate(dealt):
        ours: list[int] = []
        for low, high in compute_interleaved_intervals(size, replace(cut, index=k)):
            ours.extend(range(low, high))
        if part.tolist() != ours:
            return False
    return True
