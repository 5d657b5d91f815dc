"""Restore targets: the memory that a restore fills, and how the array is installed afterwards.

Array adapters implement `Target`. `cast_target` wraps a target of another floating-point type; values are rounded as
torch rounds them: to the nearest, ties to even.
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
"""A memory, and in it the address of the lowest byte and of the one behind the highest."""


class Target(Protocol):
    """Memory that a restore fills, and what becomes of it.

    A load has thousands of targets and few kinds of them. What is done with all of them is asked of the kind, which may
    know a way that is faster than to ask each one.
    """

    dtype: DType
    local: LocalArray
    """Where the array's elements lie in the global array. Of a region that several devices hold, each is a piece."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape that the target wants."""
        return self.local.shape

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The regions of the global array that this process wants, each of them once."""
        return self.local.boxes

    @property
    def live(self) -> bool:
        """Whether the memory is the caller's own, so that a failed read would leave it half-written."""

    def allocate(self, slabs: SlabAllocator) -> list[memoryview]:
        """The memory of each box, in C order. Called once, when everything has been checked."""

    def install(self) -> Any:
        """Called when the memory is filled: puts it in place, and returns the array."""

    def get_aliased_memory(self) -> Sequence[StridedMemory]:
        """The memory of the program that each box ends up in, however it gets there; none if the array is a new one."""
        return ()

    def with_weak_type(self, weak_type: bool) -> Target:  # only arrays of jax have one
        """The same target for an array with a weak type, or without."""
        return self

    @classmethod
    def allocate_all(cls, targets: Sequence[Any], slabs: SlabAllocator) -> list[list[memoryview]]:
        """`allocate` of some targets of this kind."""
        return [target.allocate(slabs) for target in targets]

    @classmethod
    def install_all(cls, targets: Sequence[Any]) -> list[Any]:
        """`install` of some targets of this kind."""
        return [target.install() for target in targets]

    @classmethod
    def list_spans(cls, targets: Sequence[Any]) -> list[list[MemorySpan]]:
        """Where the memory of `get_aliased_memory` lies, of some targets of this kind."""
        return [[(memory.memory_space, *memory.span) for memory in target.get_aliased_memory()] for target in targets]


@dataclass(slots=True, kw_only=True)
class ComposedTarget(Target):
    """A target of any array, made of functions."""

    dtype: DType
    local: LocalArray
    live: bool
    allocator: Callable[[SlabAllocator], list[memoryview]]
    """Answers `allocate`."""

    installer: Callable[[], Any]
    """Answers `install`."""

    aliases: Callable[[], Sequence[StridedMemory]] = tuple
    """Answers `get_aliased_memory`."""

    def allocate(self, slabs: SlabAllocator) -> list[memoryview]:
        return self.allocator(slabs)

    def install(self) -> Any:
        return self.installer()

    def get_aliased_memory(self) -> Sequence[StridedMemory]:
        return self.aliases()


def with_installer(
    target: Target, installer: Callable[[], Any], aliases: Callable[[], Sequence[StridedMemory]] | None = None
) -> Target:
    """The same target with another `install`, and perhaps another `get_aliased_memory`."""
    return ComposedTarget(
        dtype=target.dtype,
        local=target.local,
        live=target.live,
        allocator=target.allocate,
        installer=installer,
        aliases=aliases or target.get_aliased_memory,
    )


def install_all(targets: Mapping[str, Target]) -> dict[str, Any]:
    """The arrays of filled targets, put in place."""
    return dict(zip(targets, apply_by_kind(targets.values(), lambda kind, some: kind.install_all(some)), strict=True))


PerTarget = TypeVar("PerTarget")


def apply_by_kind(
    targets: Iterable[Target], function: Callable[[type[Target], Sequence[Target]], Sequence[PerTarget]]
) -> list[PerTarget]:
    """What the kind of each target answers for it, in the order of the targets; each kind is asked once."""
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
"""Elements that are rounded in two steps at a time, through memory of their own."""


@dataclass(frozen=True, slots=True)
class Cast:
    """Makes elements of one floating-point type from elements of another."""

    stored: DType
    written: DType

    @property
    def bytes_per_element(self) -> int:
        """Bytes in memory for each element, before and after."""
        return self.stored.itemsize + self.written.itemsize

    def compute_stored_bytes(self, nbytes: int) -> int:
        """Bytes of the elements that make so many bytes."""
        return nbytes // self.written.itemsize * self.stored.itemsize

    def __call__(self, data: memoryview) -> memoryview:
        """The elements of the other type, as bytes."""
        source = np.frombuffer(data, to_numpy_dtype(self.stored))
        array = np.empty(source.size, to_numpy_dtype(self.written))
        # What is too large becomes infinite, as in torch. numpy would warn of it.
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            if self.stored.itemsize > 4 and self.written.itemsize < 4:
                # torch rounds a float64 to float32 first. That differs where the first step makes a tie.
                for at in range(0, source.size, _CHUNK_ELEMENTS):
                    np.copyto(
                        array[at : at + _CHUNK_ELEMENTS], source[at : at + _CHUNK_ELEMENTS].astype(np.float32), "unsafe"
                    )
            else:
                np.copyto(array, source, "unsafe")
        return array.view(np.uint8).data if array.nbytes else memoryview(b"")


def can_cast(stored: DType, wanted: DType) -> bool:
    """Whether values of a type are rounded to another one: floating-point numbers, both of them."""
    return stored.is_floating and wanted.is_floating


def cast_target(target: Target, stored: DType) -> Target:
    """The same target for values of another stored type; they are rounded when they are installed."""
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
