"""FSDP1's ShardedTensor, as its sharded state dict holds it. Loaded only where torch's ShardedTensor already is."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard

from xla_ckpt.arrays.base import ArrayAdapter
from xla_ckpt.dtypes import DType
from xla_ckpt.engine.target import ComposedTarget, Target
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.local_array import LocalArray, Piece, whole
from xla_ckpt.snapshot.shards import HostShard, MemoryShard


def _box(shard: Any) -> Box:
    start, sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
    return Box(tuple(start), tuple(a + n for a, n in zip(start, sizes, strict=True)))


class ShardedTensors:
    """ShardedTensors. They hold no replica numbers: what two ranks hold alike, both write, and one copy is kept."""

    kind = "torch"

    def __init__(self, plain: Callable[[torch.Tensor], ArrayAdapter]) -> None:
        self._plain = plain

    def accepts(self, value: Any) -> bool:
        return isinstance(value, ShardedTensor)

    def identity(self, value: Any) -> Hashable | None:
        return "sharded", id(value)

    def dtype(self, value: Any, path: str = "") -> DType:
        empty = torch.empty(0, dtype=value.dtype, device="cpu")
        return self._plain(empty).dtype(empty, path)

    def look(self, value: Any) -> Hashable | None:
        return None

    def shape(self, value: Any) -> tuple[int, ...]:
        return tuple(value.size())

    def place(self, value: Any, path: str = "") -> LocalArray | None:
        boxes = [_box(s) for s in value.local_shards()]
        pieces = tuple(Piece(Box.whole(b.shape), b) for b in boxes if b.size)
        return LocalArray(shape=self.shape(value), pieces=pieces)

    def host(self, values: Sequence[tuple[Any, LocalArray]]) -> list[list[HostShard]]:
        return [[plain.host([one])[0][0] for plain, one in self._local(value)] for value, _ in values]

    def shards(self, values: Sequence[tuple[Any, LocalArray]]) -> list[Sequence[MemoryShard]]:
        return [[plain.shards([one])[0][0] for plain, one in self._local(value)] for value, _ in values]

    def _local(self, value: Any) -> list[tuple[ArrayAdapter, tuple[torch.Tensor, LocalArray]]]:
        """What takes care of each local shard that has elements, and the shard as a tensor of its own."""
        tensors = [s.tensor for s in value.local_shards() if s.tensor.numel()]
        return [(self._plain(t), (t, whole(tuple(t.shape)))) for t in tensors]

    def into(self, value: Any, local: LocalArray, *, owned: bool) -> Target:
        parts = [plain.into(*one, owned=False) for plain, one in self._local(value)]

        def install() -> Any:
            for part in parts:
                part.install()
            return value

        return ComposedTarget(
            dtype=self.dtype(value),
            local=local,
            live=any(p.live for p in parts),
            fill=lambda slabs: [memory for part in parts for memory in part.memory(slabs)],
            finish=install,
        )

    def like(self, value: Any, local: LocalArray, dtype: DType | None = None) -> Target:
        own = value.local_shards()
        filled = [shard for shard in own if shard.tensor.numel()]
        parts = [plain.like(*one) for plain, one in self._local(value)]
        if dtype is not None and dtype != self.dtype(value):
            raise UnsupportedStateError(
                "a ShardedTensor is not made anew in another element type",
                expected=self.dtype(value).name,
                found=dtype.name,
            )

        def install() -> Any:
            tensors = {id(shard): part.install() for shard, part in zip(filled, parts, strict=True)}
            made = [Shard(tensors.get(id(shard), shard.tensor), shard.metadata) for shard in own]
            # It meets no other rank: all of them have the metadata.
            return ShardedTensor._init_from_local_shards_and_global_metadata(
                made, value.metadata(), process_group=value._process_group
            )

        return ComposedTarget(
            dtype=self.dtype(value),
            local=local,
            live=False,
            fill=lambda slabs: [memory for part in parts for memory in part.memory(slabs)],
            finish=install,
        )
