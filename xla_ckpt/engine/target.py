"""Where restored bytes go: memory to fill, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from xla_ckpt.dtypes import DType
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.local_array import LocalArray
from xla_ckpt.sharding.strided import Strided
from xla_ckpt.snapshot.memory import Slabs

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

    def memory(self, slabs: Slabs) -> list[memoryview]:
        """The memory of each box, in C order. Called once, when everything has been checked."""

    def install(self) -> Any:
        """Called when the memory is filled: puts it in place, and returns the array."""

    def over(self) -> Sequence[Strided]:
        """The memory of the program that each box ends up in, however it gets there; none if the array is a new one."""
        return ()

    def with_weak_type(self, weak_type: bool) -> Target:  # only arrays of jax have one
        """The same target for an array with a weak type, or without."""
        return self

    @classmethod
    def memory_of(cls, targets: Sequence[Any], slabs: Slabs) -> list[list[memoryview]]:
        """`memory` of some targets of this kind."""
        return [target.memory(slabs) for target in targets]

    @classmethod
    def install_all(cls, targets: Sequence[Any]) -> list[Any]:
        """`install` of some targets of this kind."""
        return [target.install() for target in targets]

    @classmethod
    def spans(cls, targets: Sequence[Any]) -> list[list[MemorySpan]]:
        """Where the memory of `over` lies, of some targets of this kind."""
        return [[(memory.space, *memory.span) for memory in target.over()] for target in targets]


@dataclass(slots=True, kw_only=True)
class ComposedTarget(Target):
    """A target of any array, made of functions."""

    dtype: DType
    local: LocalArray
    live: bool
    fill: Callable[[Slabs], list[memoryview]]
    """Answers `memory`."""

    finish: Callable[[], Any]
    """Answers `install`."""

    lies: Callable[[], Sequence[Strided]] = tuple
    """Answers `over`."""

    def memory(self, slabs: Slabs) -> list[memoryview]:
        return self.fill(slabs)

    def install(self) -> Any:
        return self.finish()

    def over(self) -> Sequence[Strided]:
        return self.lies()


def changed(target: Target, finish: Callable[[], Any], lies: Callable[[], Sequence[Strided]] | None = None) -> Target:
    """The same target with another `install`, and perhaps another `over`."""
    return ComposedTarget(
        dtype=target.dtype,
        local=target.local,
        live=target.live,
        fill=target.memory,
        finish=finish,
        lies=lies or target.over,
    )


def install_all(targets: Mapping[str, Target]) -> dict[str, Any]:
    """The arrays of filled targets, put in place."""
    return dict(zip(targets, by_kind(targets.values(), lambda kind, some: kind.install_all(some)), strict=True))


Answer = TypeVar("Answer")


def by_kind(
    targets: Iterable[Target], ask: Callable[[type[Target], Sequence[Target]], Sequence[Answer]]
) -> list[Answer]:
    """What the kind of each target answers for it, in the order of the targets; each kind is asked once."""
    kinds: dict[type[Target], list[int]] = {}
    every = list(targets)
    for i, target in enumerate(every):
        kinds.setdefault(type(target), []).append(i)
    if len(kinds) == 1:
        (kind,) = kinds
        return list(ask(kind, every))
    answers: dict[int, Answer] = {}
    for kind, rows in kinds.items():
        answers.update(zip(rows, ask(kind, [every[i] for i in rows]), strict=True))
    return [answers[i] for i in range(len(every))]
