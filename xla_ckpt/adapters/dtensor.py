"""DTensors: tensor parallel, FSDP2, HSDP and their products. Loaded only where torch's DTensor already is."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from xla_ckpt.adapters.base import ArrayAdapter, Target
from xla_ckpt.dtypes import DType
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.layout.box import Box
from xla_ckpt.layout.local import Local, at, chunk
from xla_ckpt.snapshot.take import HostShard


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

    def place(self, value: Any, path: str = "") -> Local | None:
        mesh, shape = value.device_mesh, tuple(value.shape)
        coordinate = mesh.get_coordinate()
        ranks = tuple(mesh.mesh.flatten().tolist())
        replica, replicas, copied = 0, 1, []
        for d, placement in enumerate(value.placements):
            if isinstance(placement, Replicate):
                replicas *= mesh.size(d)
                replica = replica * mesh.size(d) + (0 if coordinate is None else coordinate[d])
                copied.append(d)
            elif not isinstance(placement, Shard):
                raise UnsupportedStateError(
                    f"a DTensor with the placement {placement} has no values of its own yet", leaf=path,
                    hint="Redistribute it to Shard or Replicate before it is saved.",
                )  # fmt: skip
        if coordinate is None:
            return Local(shape, ())
        bounds = [(0, n) for n in shape]
        for d in _order(value.placements):
            dim = value.placements[d].dim % len(shape)
            low, high = bounds[dim]
            bounds[dim] = chunk(low, high, mesh.size(d), coordinate[d])
        box = Box(tuple(b[0] for b in bounds), tuple(b[1] for b in bounds))
        if box.shape != tuple(value._local_tensor.shape):
            raise UnsupportedStateError(
                "the local part of a DTensor does not have the shape that its placements give", leaf=path,
                expected=box.shape, found=f"{tuple(value._local_tensor.shape)} with {value.placements}",
            )  # fmt: skip
        names = mesh.mesh_dim_names or tuple(f"mesh{d}" for d in range(mesh.ndim))
        split: list[list[str]] = [[] for _ in shape]
        for d in _order(value.placements):
            split[value.placements[d].dim % len(shape)].append(names[d])
        spec = tuple(tuple(s) if s else None for s in split)
        return replace(at(shape, box, replica, replicas, ("dtensor", ranks, tuple(copied))), spec=spec)

    def host(self, values: Sequence[tuple[Any, Local]]) -> list[list[HostShard]]:
        found: list[list[HostShard]] = []
        for value, local in values:
            found += self._plain(value._local_tensor).host([(value._local_tensor, local)])
        return found

    def into(self, value: Any, local: Local, *, owned: bool) -> Target:
        inner = self._plain(value._local_tensor).into(value._local_tensor, local, owned=owned)

        def install() -> Any:
            inner.install()
            return value

        return replace(inner, install=install)

    def like(self, value: Any, local: Local, dtype: DType | None = None) -> Target:
        inner = self._plain(value._local_tensor).like(value._local_tensor, local, dtype)
        mesh, placements, shape, stride = value.device_mesh, value.placements, value.shape, value.stride()
        return replace(
            inner,
            install=lambda: DTensor.from_local(
                inner.install(), mesh, placements, run_check=False, shape=shape, stride=stride
            ),
        )


def _order(placements: Sequence[Any]) -> list[int]:
    """The mesh dims that shard, in the order in which they cut.

    A strided shard says that it cuts what later mesh dims have already cut: FSDP over tensor parallelism.
    """
    dims = [d for d, p in enumerate(placements) if isinstance(p, Shard)]
    return sorted(dims, key=lambda d: (_is_strided(placements[d]), d))


def _is_strided(placement: Any) -> bool:
    return type(placement).__name__ == "_StridedShard"
