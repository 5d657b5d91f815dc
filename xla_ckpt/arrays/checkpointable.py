"""Plain tensors with the attributes of torch 2.15's `CheckpointableTensor`, on any version of torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from xla_ckpt.arrays.base import ArrayAdapter
from xla_ckpt.arrays.chunks import checkpointable_place, copy_chunk_names, is_checkpointable
from xla_ckpt.dtypes import DType
from xla_ckpt.engine.target import Target, changed
from xla_ckpt.sharding.local_array import LocalArray
from xla_ckpt.snapshot.shards import HostShard, MemoryShard


class CheckpointableTensors:
    """Tensors whose attributes name the regions of a global array that they hold.

    They hold no replica numbers: what two ranks hold alike, both write, and one copy is kept.
    """

    kind = "torch"

    def __init__(self, plain: Callable[[torch.Tensor], ArrayAdapter]) -> None:
        self._plain = plain
        """The adapter of the tensor without its attributes."""

    def accepts(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and is_checkpointable(value)

    def identity(self, value: Any) -> Hashable | None:
        inner = self._plain(value).identity(value)
        return None if inner is None else ("checkpointable", inner, checkpointable_place(value, ""))

    def dtype(self, value: Any, path: str = "") -> DType:
        return self._plain(value).dtype(value, path)

    def look(self, value: Any) -> Hashable | None:
        return None

    def shape(self, value: Any) -> tuple[int, ...]:
        return checkpointable_place(value, "").shape

    def place(self, value: Any, path: str = "") -> LocalArray | None:
        return checkpointable_place(value, path)

    def host(self, values: Sequence[tuple[Any, LocalArray]]) -> list[Sequence[HostShard]]:
        return [self._plain(value).host([(value, local)])[0] for value, local in values]

    def shards(self, values: Sequence[tuple[Any, LocalArray]]) -> list[Sequence[MemoryShard]]:
        return [self._plain(value).shards([(value, local)])[0] for value, local in values]

    def into(self, value: Any, local: LocalArray, *, owned: bool) -> Target:
        return self._plain(value).into(value, local, owned=owned)

    def like(self, value: Any, local: LocalArray, dtype: DType | None = None) -> Target:
        inner = self._plain(value).like(value, local, dtype)
        return changed(inner, lambda: copy_chunk_names(value, inner.install()))
