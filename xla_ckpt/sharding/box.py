"""Boxes: rectangular regions of a tensor's index space.

A box is half-open and speaks *global* coordinates: a shard's box says where its elements live in the whole tensor,
whatever buffer holds them. Resharding is box intersection and nothing else.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import sub
from typing import Self

MAX_DIMS = 64
"""An array of more tensor dims is refused."""


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The elements `start[d] <= i[d] < stop[d]` of a tensor; empty where a start meets its stop.

    >>> left, mid = Box((0, 0), (4, 2)), Box((2, 1), (6, 5))
    >>> left.intersect(mid)
    Box(start=(2, 1), stop=(4, 2))
    >>> left.intersect(Box((4, 0), (8, 2))) is None  # they touch, they do not overlap
    True
    """

    start: tuple[int, ...]
    """First index held, per tensor dim (elements)."""

    stop: tuple[int, ...]
    """One past the last index held, per tensor dim (elements)."""

    size: int = field(init=False, repr=False, compare=False)
    """Number of elements (1 for the box of a scalar). Plans ask for it some thirty times an array."""

    def __post_init__(self) -> None:
        for dim, (low, high) in enumerate(zip(self.start, self.stop, strict=True)):
            if not 0 <= low <= high:
                raise ValueError(f"tensor dim {dim} of a box runs from {low} to {high}")
        object.__setattr__(self, "size", prod(map(sub, self.stop, self.start)))

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Box:
        """The box of a whole tensor.

        >>> Box.whole((2, 3))
        Box(start=(0, 0), stop=(2, 3))
        """
        return _whole(tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements per tensor dim."""
        # Planning a load asks for it some ninety times an array: `map` is three times as fast as a generator here.
        return tuple(map(sub, self.stop, self.start))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into an array.

        >>> Box((0, 1), (2, 3)).slices
        (slice(0, 2, None), slice(1, 3, None))
        """
        return tuple(map(slice, self.start, self.stop))

    def intersect(self, other: Box) -> Box | None:
        """The common region, in global coordinates; None if no element is shared."""
        if self == other:
            return self if self.size else None
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        stop = tuple(min(a, b) for a, b in zip(self.stop, other.stop, strict=True))
        if any(low >= high for low, high in zip(start, stop, strict=True)):
            return None
        return Box(start, stop)

    def relative_to(self, origin: Box) -> Box:
        """The same region in the coordinates of a buffer that holds `origin`.

        >>> Box((2, 1), (4, 2)).relative_to(Box((2, 0), (6, 5)))
        Box(start=(0, 1), stop=(2, 2))
        """
        return Box(
            tuple(a - o for a, o in zip(self.start, origin.start, strict=True)),
            tuple(b - o for b, o in zip(self.stop, origin.start, strict=True)),
        )

    def moved(self, offset: Sequence[int]) -> Self:
        """The same region `offset` elements further along every tensor dim."""
        return type(self)(
            tuple(a + o for a, o in zip(self.start, offset, strict=True)),
            tuple(b + o for b, o in zip(self.stop, offset, strict=True)),
        )

    def contains(self, other: Box) -> bool:
        """Whether every element of `other` is in this box (an empty box is in all)."""
        if other is self:
            return True
        return other.size == 0 or (
            all(a <= b for a, b in zip(self.start, other.start, strict=True))
            and all(a >= b for a, b in zip(self.stop, other.stop, strict=True))
        )

    def along(self, dim: int, low: int, high: int) -> Box:
        """The slice `low <= i < high` (global indices) of this box along one tensor dim.

        >>> Box((0, 0), (4, 2)).along(0, 1, 3)
        Box(start=(1, 0), stop=(3, 2))
        """
        return Box((*self.start[:dim], low, *self.start[dim + 1 :]), (*self.stop[:dim], high, *self.stop[dim + 1 :]))

    def __str__(self) -> str:
        """As in Python's slicing: ``[2:4, 1:2]``."""
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


@functools.lru_cache(maxsize=4096)
def _whole(shape: tuple[int, ...]) -> Box:
    """One box for all tensors of a shape: a model has few shapes, and many tensors of each."""
    return Box((0,) * len(shape), shape)


@dataclass(frozen=True, slots=True)
class Frame(Box):
    """A box whose start may lie before the first element of the array.

    The rows of one tensor that is stored may be those of several arrays: the second half of a stored tensor is a whole
    array, and the box that all of the tensor would be in that array begins before it.

    >>> str(Frame((-2, 0), (2, 3)))
    '[-2:2, 0:3]'
    """

    def __post_init__(self) -> None:
        for dim, (low, high) in enumerate(zip(self.start, self.stop, strict=True)):
            if low > high:
                raise ValueError(f"tensor dim {dim} of a frame runs from {low} to {high}")
        object.__setattr__(self, "size", prod(map(sub, self.stop, self.start)))


def overlapping_pair(boxes: Iterable[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, or None if the boxes are disjoint.

    A sweep along the first tensor dim: quadratic only in how many boxes are open at once.
    """
    alive: list[Box] = []
    for box in sorted(b for b in boxes if b.size):
        if not box.start:
            if alive:
                return alive[0], box
        else:
            alive = [other for other in alive if other.stop[0] > box.start[0]]
        for other in alive:
            if other.intersect(box) is not None:
                return other, box
        alive.append(box)
    return None


MAX_CORNERS = 1 << 6
"""Most corners of a box that `tiles` looks at: nobody splits an array along more dims than that."""


def tiles(boxes: Sequence[Box], whole: Box) -> bool | None:
    """Whether the boxes hold every element of `whole` exactly once, in time linear in their number; None if unknown.

    Each corner of a box counts +1 or -1, by turns. Inside of a tiling they cancel, and those of `whole` are left; and
    since the corners say what the sum of the boxes' indicator functions is, they are left of a tiling only.

    >>> tiles([Box((0, 0), (2, 3)), Box((2, 0), (4, 1)), Box((2, 1), (4, 3))], Box((0, 0), (4, 3)))
    True
    """
    nonempty = [b for b in boxes if b.size]
    spans = list(zip(whole.start, whole.stop, strict=True))
    # Along a dim that no box splits there is nothing to find out.
    dims = [d for d, span in enumerate(spans) if any((b.start[d], b.stop[d]) != span for b in nonempty)]
    if 1 << len(dims) > MAX_CORNERS:
        return None
    count: Counter[tuple[int, ...]] = Counter()
    for sign, some in ((1, nonempty), (-1, [whole] if whole.size else [])):
        for box in some:
            corners: list[tuple[int, tuple[int, ...]]] = [(sign, ())]
            for d in dims:
                corners = [
                    corner for s, at in corners for corner in ((s, (*at, box.start[d])), (-s, (*at, box.stop[d])))
                ]
            for s, at in corners:
                count[at] += s
    return bool(nonempty) == bool(whole.size) and not any(count.values())
