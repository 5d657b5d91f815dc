"""Adapter for FSDP1's ShardedTensors. Only loaded if the program has imported ShardedTensor."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard

from xla_ckpt.arrays.base import ArrayAdapter
from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.local_array import LocalArray, Piece, create_unsharded
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.loading.target import ComposedTarget, Target
from xla_ckpt.snapshot.shards import HostShard, LocalShard


def _create_box(shard: Any) -> Box:
    start, sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
    return Box(tuple(start), tuple(a + n for a, n in zip(start, sizes, strict=True)))


class ShardedTensorAdapter:
    """An adapter for ShardedTensors. They have no replica numbers: ranks with equal shards all write, and one copy is
    kept.
    """

    kind = "torch"

    def __init__(self, find_plain_adapter: Callable[[torch.Tensor], ArrayAdapter]) -> None:
        self._find_plain_adapter = find_plain_adapter

    def can_handle(self, value: Any) -> bool:
        return isinstance(value, ShardedTensor)

    def get_identity(self, value: Any) -> Hashable | None:
        return "sharded", id(value)

    def get_dtype(self, value: Any, path: str = "") -> DType:
        empty = torch.empty(0, dtype=value.dtype, device="cpu")
        return self._find_plain_adapter(empty).get_dtype(empty, path)

    def get_form_key(self, value: Any) -> Hashable | None:
        return None

    def get_shape(self, value: Any) -> tuple[int, ...]:
        return tuple(value.size())

    def locate(self, value: Any, path: str = "") -> LocalArray | None:
        boxes = [_create_box(s) for s in value.local_shards()]
        pieces = tuple(Piece(Box.from_shape(b.shape), b) for b in boxes if b.size)
        return LocalArray(shape=self.get_shape(value), pieces=pieces)

    def get_host_shards(self, values: Sequence[tuple[Any, LocalArray]]) -> list[list[HostShard]]:
        return [
            [plain.get_host_shards([one])[0][0] for plain, one in self._list_local_tensors(value)]
            for value, _ in values
        ]

    def get_shards(self, values: Sequence[tuple[Any, LocalArray]]) -> list[Sequence[LocalShard]]:
        return [
            [plain.get_shards([one])[0][0] for plain, one in self._list_local_tensors(value)] for value, _ in values
        ]

    def _list_local_tensors(self, value: Any) -> list[tuple[ArrayAdapter, tuple[torch.Tensor, LocalArray]]]:
        """List the adapter of each non-empty local shard, with the shard as a tensor and its region."""
        tensors = [s.tensor for s in value.local_shards() if s.tensor.numel()]
        return [(self._find_plain_adapter(t), (t, create_unsharded(tuple(t.shape)))) for t in tensors]

    def create_in_place_target(self, value: Any, local: LocalArray, *, owned: bool) -> Target:
        parts = [plain.create_in_place_target(*one, owned=False) for plain, one in self._list_local_tensors(value)]

        def install() -> Any:
            for part in parts:
                part.install()
            return value

        return ComposedTarget(
            dtype=self.get_dtype(value),
            local=local,
            live=any(p.live for p in parts),
            allocator=lambda slabs: [memory for part in parts for memory in part.allocate(slabs)],
            installer=install,
        )

    def create_target_like(self, value: Any, local: LocalArray, dtype: DType | None = None) -> Target:
        own = value.local_shards()
        filled = [shard for shard in own if shard.tensor.numel()]
        parts = [plain.create_target_like(*one) for plain, one in self._list_local_tensors(value)]
        if dtype is not None and dtype != self.get_dtype(value):
            raise UnsupportedStateError(
                "a ShardedTensor is not made anew in another element type",
                expected=self.get_dtype(value).name,
                found=dtype.name,
            )

        def install() -> Any:
            tensors = {id(shard): part.install() for shard, part in zip(filled, parts, strict=True)}
            made = [Shard(tensors.get(id(shard), shard.tensor), shard.metadata) for shard in own]
            # No communication: all ranks have the metadata.
            return ShardedTensor._init_from_local_shards_and_global_metadata(
                made, value.metadata(), process_group=value._process_group
            )

        return ComposedTarget(
            dtype=self.get_dtype(value),
            local=local,
            live=False,
            allocator=lambda slabs: [memory for part in parts for memory in part.allocate(slabs)],
            installer=install,
        )
