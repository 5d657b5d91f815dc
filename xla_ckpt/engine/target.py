"""Where restored bytes go: memory to fill, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xla_ckpt.dtypes import DType
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.strided import Strided
from xla_ckpt.snapshot.memory import Slabs


@dataclass(slots=True, kw_only=True)
class Target:
    """Memory that a restore fills, and what becomes of it."""

    dtype: DType
    shape: tuple[int, ...]
    """Global shape that the target wants."""

    boxes: tuple[Box, ...]
    """The regions of the global array that this process wants."""

    live: bool
    """Whether the memory is the caller's own, so that a failed read would leave it half-written."""

    memory: Callable[[Slabs], list[memoryview]]
    """The memory of each box, in C order. Called once, when everything has been checked."""

    install: Callable[[], Any]
    """Called when the memory is filled: puts it in place, and returns the array."""

    over: Callable[[], Sequence[Strided]] = tuple
    """The memory of the program that each box ends up in, however it gets there; none if the array is a new one."""
