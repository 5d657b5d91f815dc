"""Restore targets: the memory that a restore fills, and the installation of the array afterwards.

Array adapters implement `Target`. `cast_target` wraps a target of another floating-point type; values are rounded as
in torch: to the nearest, ties to even.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from xla_ckpt.core.dtypes import DType, to_numpy_dtype
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.local_array import LocalArray
from xla_ckpt.core.sharding.memory_layout import StridedMemory
from xla_ckpt.snapshot.memory import SlabAllocator

MemorySpan = tuple[Hashable, int, int]
"""(memory space, address of the lowest byte, address behind the highest byte)."""


class Target(Protocol):
    """Memory that a restore fills, and the array that it becomes.

    A load has thousands of targets of few classes. Operations on all of them are class methods, which may be faster
    than a loop over the targets.
    """

    dtype: DType
    local: LocalArray
    """Placement of the array's elements in the global array. A region on several devices is one piece per device."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape of the target."""
        return self.local.shape

    @property
    def boxes(self) -> tuple[Box, ...]:
        """Distinct regions of the global array that this process needs."""
        return self.local.boxes

    @property
    def live(self) -> bool:
        """True if the memory belongs to the caller, so that a failed read would leave it partly overwritten."""

    def allocate(self, slabs: SlabAllocator) -> list[memoryview]:
        """Return the memory of each box, in C order. Called once, after all checks."""

    def install(self) -> Any:
        """Put the filled memory in place, and return the array."""

    def get_aliased_memory(self) -> Sequence[StridedMemory]:
        """Return the program's memory into which each box is written, directly or later; empty for a new array."""
        return ()

    def with_weak_type(self, weak_type: bool) -> Target:  # only jax arrays have one
        """Return the target for an array with or without a weak type."""
        return self

    @classmethod
    def allocate_all(cls, targets: Sequence[Any], slabs: SlabAllocator) -> list[list[memoryview]]:
        """Call `allocate` for targets of this class."""
        return [target.allocate(slabs) for target in targets]

    @classmethod
    def install_all(cls, targets: Sequence[Any]) -> list[Any]:
        """Call `install` for targets of this class."""
        return [target.install() for target in targets]

    @classmethod
    def list_spans(cls, targets: Sequence[Any]) -> list[list[MemorySpan]]:
        """Return the spans of `get_aliased_memory` for targets of this class."""
        return [[(memory.memory_space, *memory.span) for memory in target.get_aliased_memory()] for target in targets]


@dataclass(slots=True, kw_only=True)
class ComposedTarget(Target):
    """Target composed of functions."""

    dtype: DType
    local: LocalArray
    live: bool
    allocator: Callable[[SlabAllocator], list[memoryview]]
    """Implementation of `allocate`."""

    installer: Callable[[], Any]
    """Implementation of `install`."""

    aliases: Callable[[], Sequence[StridedMemory]] = tuple
    """Implementation of `get_aliased_memory`."""

    def allocate(self, slabs: SlabAllocator) -> list[memoryview]:
        return self.allocator(slabs)

    def install(self) -> Any:
        return self.installer()

    def get_aliased_memory(self) -> Sequence[StridedMemory]:
        return self.aliases()


def with_installer(
    target: Target, installer: Callable[[], Any], aliases: Callable[[], Sequence[StridedMemory]] | None = None
) -> Target:
    """Return the target with another `install`, and optionally another `get_aliased_memory`."""
    return ComposedTarget(
        dtype=target.dtype,
        local=target.local,
        live=target.live,
        allocator=target.allocate,
        installer=installer,
        aliases=aliases or target.get_aliased_memory,
    )


def install_all(targets: Mapping[str, Target]) -> dict[str, Any]:
    """Install filled targets, and return their arrays."""
    return dict(zip(targets, apply_by_kind(targets.values(), lambda kind, some: kind.install_all(some)), strict=True))


PerTarget = TypeVar("PerTarget")


def apply_by_kind(
    targets: Iterable[Target], function: Callable[[type[Target], Sequence[Target]], Sequence[PerTarget]]
) -> list[PerTarget]:
    """Return the results of `function` in the order of the targets, calling it once per class of targets."""
    kinds: dict[type[Target], list[int]] = {}
    every = list(targets)
    for i, target in enumerate(every):
        kinds.setdefault(type(target), []).append(i)
    if len(kinds) == 1:
        (kind,) = kinds
        return list(function(kind, every))
    answers: dict[int, PerTarget] = {}
    for kind, rows in kinds.items():
        answers.update(zip(rows, function(kind, [every[i] for i in rows]), strict=True))
    return [answers[i] for i in range(len(every))]


_CHUNK_ELEMENTS = 1 << 20
"""Number of elements that are rounded in two steps at a time, through temporary memory."""


@dataclass(frozen=True, slots=True)
class Cast:
    """Conversion of elements from one floating-point type to another."""

    stored: DType
    written: DType

    @property
    def bytes_per_element(self) -> int:
        """Bytes in memory for each element, before and after the conversion."""
        return self.stored.itemsize + self.written.itemsize

    def compute_stored_bytes(self, nbytes: int) -> int:
        """Return the number of stored bytes that are converted to `nbytes` bytes."""
        return nbytes // self.written.itemsize * self.stored.itemsize

    def __call__(self, data: memoryview) -> memoryview:
        """Return the converted elements, as bytes."""
        source = np.frombuffer(data, to_numpy_dtype(self.stored))
        array = np.empty(source.size, to_numpy_dtype(self.written))
        # Values that are too large become infinite, as in torch; numpy would warn about them.
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            if self.stored.itemsize > 4 and self.written.itemsize < 4:
                # torch rounds a float64 to float32 first. The result differs if the first step creates a tie.
                for at in range(0, source.size, _CHUNK_ELEMENTS):
                    np.copyto(
                        array[at : at + _CHUNK_ELEMENTS], source[at : at + _CHUNK_ELEMENTS].astype(np.float32), "unsafe"
                    )
            else:
                np.copyto(array, source, "unsafe")
        return array.view(np.uint8).data if array.nbytes else memoryview(b"")


def can_cast(stored: DType, wanted: DType) -> bool:
    """Return True if values of one type can be rounded to another one: both are floating-point types."""
    return stored.is_floating and wanted.is_floating


def cast_target(target: Target, stored: DType) -> Target:
    """Return the target for values of another stored type, which are rounded when they are installed."""
    rounded = Cast(stored, target.dtype)
    pairs: list[tuple[memoryview, memoryview]] = []

    def memory(slabs: SlabAllocator) -> list[memoryview]:
        for box, place in zip(target.boxes, target.allocate(slabs), strict=True):
            pairs.append((np.empty(box.size * stored.itemsize, np.uint8).data, place))
        return [values for values, _ in pairs]

    def install() -> Any:
        for values, place in pairs:
            if len(place):
                place[:] = rounded(values)
        return target.install()

    return ComposedTarget(
        dtype=stored,
        local=target.local,
        live=False,
        allocator=memory,
        installer=install,
        aliases=target.get_aliased_memory,
    )
