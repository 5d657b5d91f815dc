"""DTensors: tensor parallel, FSDP2, HSDP and their products. Loaded only where torch's DTensor already is."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, placement_types

from xla_ckpt.arrays.base import ArrayAdapter
from xla_ckpt.dtypes import DType
from xla_ckpt.engine.target import Target, changed
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.sharding.cuts import Cut, IndexRange, held, interleaved, mesh_order, pieces_of, uneven
from xla_ckpt.sharding.local_array import LocalArray
from xla_ckpt.snapshot.shards import HostShard, MemoryShard


class DTensors:
    """DTensors over any device mesh, with any mix of Shard (strided ones included) and Replicate."""

    kind = "torch"

    def __init__(self, plain: Callable[[torch.Tensor], ArrayAdapter]) -> None:
        self._plain = plain
        """The adapter of a local tensor."""

    def accepts(self, value: Any) -> bool:
        return isinstance(value, DTensor)

    def identity(self, value: Any) -> Hashable | None:
        inner = self._plain(value._local_tensor).identity(value._local_tensor)
        return None if inner is None else ("dtensor", inner, tuple(value.shape))

    def dtype(self, value: Any, path: str = "") -> DType:
        return self._plain(value._local_tensor).dtype(value._local_tensor, path)

    def shape(self, value: Any) -> tuple[int, ...]:
        return tuple(value.shape)

    def place(self, value: Any, path: str = "") -> LocalArray | None:
        mesh, shape = value.device_mesh, tuple(value.shape)
        _check_order(value, path)
        coordinate = mesh.get_coordinate()
        ranks = tuple(mesh.mesh.flatten().tolist())
        replica, replicas, copied = 0, 1, []
        cuts: list[list[tuple[int, Cut]]] = [[] for _ in shape]  # for each tensor dim the mesh dims that cut it
        for d, placement in enumerate(value.placements):
            parts, index = mesh.size(d), 0 if coordinate is None else coordinate[d]
            factor = _factor(placement)
            if isinstance(placement, Replicate):
                replica, replicas = replica * parts + index, replicas * parts
                copied.append(d)
            elif factor is not None:
                cuts[placement.dim % len(shape)].append((d, Cut(parts, index, factor)))
            else:
                raise _refusal(placement, path)
        if coordinate is None:  # this rank is not in the mesh
            return LocalArray(shape=shape, pieces=())
        pieces, local_shape = pieces_of(
            [_held(n, [cut for _, cut in by_dim], path) for n, by_dim in zip(shape, cuts, strict=True)]
        )
        if local_shape != tuple(value._local_tensor.shape):
            raise UnsupportedStateError(
                "the local part of a DTensor does not have the shape that its placements give",
                leaf=path,
                expected=local_shape,
                found=f"{tuple(value._local_tensor.shape)} with {value.placements}",
            )
        names = mesh.mesh_dim_names or tuple(f"mesh{d}" for d in range(mesh.ndim))
        spec = tuple(_spec([(names[d], cut) for d, cut in by_dim]) for by_dim in cuts)
        return LocalArray(
            shape=shape,
            pieces=pieces,
            replica=replica,
            replicas=replicas,
            group=("dtensor", ranks, tuple(copied)),
            spec=spec,
        )

    def host(self, values: Sequence[tuple[Any, LocalArray]]) -> list[Sequence[HostShard]]:
        shards: list[Sequence[HostShard]] = []
        for value, local in values:
            shards += self._plain(value._local_tensor).host([(value._local_tensor, local)])
        return shards

    def shards(self, values: Sequence[tuple[Any, LocalArray]]) -> list[Sequence[MemoryShard]]:
        pieces: list[Sequence[MemoryShard]] = []
        for value, local in values:
            pieces += self._plain(value._local_tensor).shards([(value._local_tensor, local)])
        return pieces

    def into(self, value: Any, local: LocalArray, *, owned: bool) -> Target:
        inner = self._plain(value._local_tensor).into(value._local_tensor, local, owned=owned)

        def install() -> Any:
            inner.install()
            return value

        return changed(inner, install)

    def like(self, value: Any, local: LocalArray, dtype: DType | None = None) -> Target:
        inner = self._plain(value._local_tensor).like(value._local_tensor, local, dtype)
        mesh, placements, shape, stride = value.device_mesh, value.placements, value.shape, value.stride()
        return changed(
            inner,
            lambda: DTensor.from_local(inner.install(), mesh, placements, run_check=False, shape=shape, stride=stride),
        )


def _refusal(placement: Any, path: str) -> UnsupportedStateError:
    """The error for a placement that is neither Shard nor Replicate."""
    why = "has no values of its own yet" if placement.is_partial() else "is cut in a way not known here"
    return UnsupportedStateError(
        f"a DTensor with the placement {placement} {why}",
        leaf=path,
        hint="Redistribute it to Shard or Replicate before it is saved or loaded.",
    )


def _factor(placement: Any) -> int | None:
    """The factor of a placement that shards (see `Cut`), 1 for a plain one; None for a placement of another kind.

    The type is compared, because a class derived from `Shard` may cut in another way. A strided shard is derived from
    it up to torch 2.9, and no longer in torch 2.10.
    """
    if type(placement) is Shard:
        return 1
    if type(placement).__name__ == "_StridedShard":
        return int(placement.split_factor)
    return None


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


def _held(size: int, cuts: Sequence[Cut], path: str) -> list[IndexRange]:
    """What this rank holds of a tensor dim.

    Raises:
        UnsupportedStateError: This version of torch does not agree with itself about that.
    """
    for n, cut in uneven(size, cuts):
        if not _torch_agrees(n, cut):
            # Up to torch 2.9 `full_tensor` and `distribute_tensor` give the rows of such a tensor different places.
            raise UnsupportedStateError(
                "this version of torch has two meanings for an interleaved strided shard of uneven blocks",
                leaf=path,
                expected=f"a tensor dim that {cut.factor * cut.parts} blocks divide",
                found=f"{n} elements, torch {torch.__version__}",
                hint="Pad the tensor, redistribute it to Shard or Replicate, or use torch 2.13 or newer.",
            )
    return held(size, cuts)


def _torch_agrees(size: int, cut: Cut) -> bool:
    """Whether torch deals out this many rows as `interleaved` does."""
    strided: Any = getattr(placement_types, "_StridedShard")  # noqa: B009
    dealt, _ = strided(0, split_factor=cut.factor)._split_tensor(torch.arange(size), cut.parts, with_padding=False)
    for k, part in enumerate(dealt):
        ours: list[int] = []
        for low, high in interleaved(size, replace(cut, index=k)):
            ours.extend(range(low, high))
        if part.tolist() != ours:
            return False
    return True


def _spec(named: Sequence[tuple[str, Cut]]) -> tuple[object, ...] | None:
    """What cuts a tensor dim, outermost first, as `Sharding.spec` has it."""
    if not named:
        return None
    nested = mesh_order([cut for _, cut in named])
    if nested is None and len(named) == 1:
        return named[0][0], named[0][1].factor
    return tuple(named[i][0] for i in nested or range(len(named)))
