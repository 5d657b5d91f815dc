"""Boxes: rectangular regions of an array's index space; many boxes as columns (`BoxArray`) or as a `Grid`.

A box is half-open and uses global coordinates: the box of a shard is its region of the whole array, whichever buffer
contains it. Resharding is intersection of boxes. The shards of a tensor that is split over a mesh nearly always form a
grid: three lists of cut positions represent a thousand boxes, and bisection finds the few that overlap a region.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import prod
from operator import sub
from typing import Self

import numpy as np
import numpy.typing as npt

MAX_DIMS = 64
"""Maximum number of tensor dims. Larger arrays are rejected."""


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The elements `start[d] <= i[d] < stop[d]` of a tensor. Empty if a start equals its stop.

    Raises:
        ValueError: A start is negative or greater than its stop.

    >>> left, mid = Box((0, 0), (4, 2)), Box((2, 1), (6, 5))
    >>> left.intersect(mid)
    Box(start=(2, 1), stop=(4, 2))
    >>> left.intersect(Box((4, 0), (8, 2))) is None  # they touch, they do not overlap
    True
    """

    start: tuple[int, ...]
    """First index, per tensor dim (elements)."""

    stop: tuple[int, ...]
    """One past the last index, per tensor dim (elements)."""

    size: int = field(init=False, repr=False, compare=False)
    """Number of elements (1 for the box of a scalar). Cached, because plans read it about thirty times per array."""

    def __post_init__(self) -> None:
        for dim, (low, high) in enumerate(zip(self.start, self.stop, strict=True)):
            if not 0 <= low <= high:
                raise ValueError(f"tensor dim {dim} of a box runs from {low} to {high}")
        object.__setattr__(self, "size", prod(map(sub, self.stop, self.start)))

    @classmethod
    def from_shape(cls, shape: Iterable[int]) -> Box:
        """Return the box of a whole tensor.

        >>> Box.from_shape((2, 3))
        Box(start=(0, 0), stop=(2, 3))
        """
        return _create_box(tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements per tensor dim."""
        # Load planning reads this about ninety times per array. `map` is three times as fast as a generator here.
        return tuple(map(sub, self.stop, self.start))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into an array.

        >>> Box((0, 1), (2, 3)).slices
        (slice(0, 2, None), slice(1, 3, None))
        """
        return tuple(map(slice, self.start, self.stop))

    def intersect(self, other: Box) -> Box | None:
        """Return the common region, in global coordinates, or None if the boxes share no element."""
        if self == other:
            return self if self.size else None
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        stop = tuple(min(a, b) for a, b in zip(self.stop, other.stop, strict=True))
        if any(low >= high for low, high in zip(start, stop, strict=True)):
            return None
        return Box(start, stop)

    def relative_to(self, origin: Box) -> Box:
        """Return the same region in the coordinates of a buffer that contains `origin`.

        >>> Box((2, 1), (4, 2)).relative_to(Box((2, 0), (6, 5)))
        Box(start=(0, 1), stop=(2, 2))
        """
        return Box(
            tuple(a - o for a, o in zip(self.start, origin.start, strict=True)),
            tuple(b - o for b, o in zip(self.stop, origin.start, strict=True)),
        )

    def translate(self, offset: Sequence[int]) -> Self:
        """Return the region shifted by `offset` elements along every tensor dim."""
        return type(self)(
            tuple(a + o for a, o in zip(self.start, offset, strict=True)),
            tuple(b + o for b, o in zip(self.stop, offset, strict=True)),
        )

    def contains(self, other: Box) -> bool:
        """Return True if every element of `other` is in this box (always True for an empty `other`)."""
        if other is self:
            return True
        return other.size == 0 or (
            all(a <= b for a, b in zip(self.start, other.start, strict=True))
            and all(a >= b for a, b in zip(self.stop, other.stop, strict=True))
        )

    def slice_dim(self, dim: int, low: int, high: int) -> Box:
        """Return the slice `low <= i < high` (global indices) of this box along one tensor dim.

        >>> Box((0, 0), (4, 2)).slice_dim(0, 1, 3)
        Box(start=(1, 0), stop=(3, 2))
        """
        return Box((*self.start[:dim], low, *self.start[dim + 1 :]), (*self.stop[:dim], high, *self.stop[dim + 1 :]))

    def __str__(self) -> str:
        """Format as Python slices: ``[2:4, 1:2]``."""
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


@functools.lru_cache(maxsize=4096)
def _create_box(shape: tuple[int, ...]) -> Box:
    """Return one shared box for all tensors of a shape. A model has few shapes and many tensors of each."""
    return Box((0,) * len(shape), shape)


@dataclass(frozen=True, slots=True)
class ParentBox(Box):
    """A box that may start before the first element of the array.

    The rows of one stored tensor may belong to several arrays. If an array is the second half of a stored tensor, then
    the box of the whole tensor, in the coordinates of that array, starts at a negative index.

    >>> str(ParentBox((-2, 0), (2, 3)))
    '[-2:2, 0:3]'
    """

    def __post_init__(self) -> None:
        for dim, (low, high) in enumerate(zip(self.start, self.stop, strict=True)):
            if low > high:
                raise ValueError(f"tensor dim {dim} of a frame runs from {low} to {high}")
        object.__setattr__(self, "size", prod(map(sub, self.stop, self.start)))


def find_overlap(boxes: Iterable[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that share an element, or None if the boxes are disjoint.

    Sweeps along the first tensor dim: quadratic only in the number of boxes that are open at once.
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
"""Maximum number of corners per box in `is_tiling`. In practice arrays are not split along more dims."""


def is_tiling(boxes: Sequence[Box], whole: Box) -> bool | None:
    """Return True if the boxes contain every element of `whole` exactly once, or None if unknown. Takes linear time.

    Each corner of a box counts +1 or -1, alternately. In a tiling the inner corners cancel, and only the corners of
    `whole` remain. The converse holds because the corners determine the sum of the boxes' indicator functions.

    >>> is_tiling([Box((0, 0), (2, 3)), Box((2, 0), (4, 1)), Box((2, 1), (4, 3))], Box((0, 0), (4, 3)))
    True
    """
    nonempty = [b for b in boxes if b.size]
    spans = list(zip(whole.start, whole.stop, strict=True))
    # Dims that no box splits need no check.
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


IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class BoxArray:
    """Many boxes: a row per box, a column per tensor dim. Boxes with fewer dims have zeros in the last columns."""

    start: IntArray
    """First element of each box, shape (boxes, dims)."""

    stop: IntArray
    """One past the last element of each box, shape (boxes, dims)."""

    @classmethod
    def from_boxes(cls, boxes: Sequence[Box]) -> BoxArray:
        """Create the columns from a sequence of boxes."""
        dims = max((len(box.start) for box in boxes), default=0)
        if any(len(box.start) < dims for box in boxes):
            padding = (0,) * dims
            starts = [(*box.start, *padding)[:dims] for box in boxes]
            stops = [(*box.stop, *padding)[:dims] for box in boxes]
        else:
            starts, stops = [box.start for box in boxes], [box.stop for box in boxes]
        shape = len(boxes), dims
        return cls(np.array(starts, np.int64).reshape(shape), np.array(stops, np.int64).reshape(shape))

    def __len__(self) -> int:
        return len(self.start)

    @property
    def dims(self) -> int:
        """Number of columns."""
        return int(self.start.shape[1])

    def select(self, rows: IntArray, dims: int | None = None) -> BoxArray:
        """Return the boxes in `rows`, truncated to `dims` dims if given."""
        return BoxArray(self.start[rows, :dims], self.stop[rows, :dims])

    def get_box(self, row: int) -> Box:
        """Return the box in one row."""
        return Box(tuple(self.start[row].tolist()), tuple(self.stop[row].tolist()))

    def find_first_duplicates(self) -> IntArray:
        """Return, for each box, the first row that contains an equal box."""
        both = np.concatenate([self.start, self.stop], axis=1)
        _, first, which = np.unique(both, axis=0, return_index=True, return_inverse=True)
        return np.asarray(first[which.reshape(-1)], np.int64)

    @staticmethod
    def concatenate(arrays: Sequence[BoxArray]) -> BoxArray:
        """Concatenate several arrays of boxes."""
        dims = max(corners.dims for corners in arrays)
        wide = [
            corners if corners.dims == dims else BoxArray(_pad_dims(corners.start, dims), _pad_dims(corners.stop, dims))
            for corners in arrays
        ]
        return BoxArray(np.concatenate([c.start for c in wide]), np.concatenate([c.stop for c in wide]))


def _pad_dims(values: IntArray, dims: int) -> IntArray:
    return np.pad(values, ((0, 0), (0, dims - values.shape[1])))


@dataclass(frozen=True, slots=True)
class Grid:
    """A grid of boxes between neighbouring cuts, in C order: cell 0 is at the start of every dim, the last dim varies
    fastest.

    Raises:
        ValueError: The cuts along a dim do not ascend.

    >>> grid = Grid(((0, 2, 4), (0, 3)))
    >>> [str(grid.get_cell(i)) for i in range(grid.cell_count)]
    ['[0:2, 0:3]', '[2:4, 0:3]']
    """

    cuts: tuple[tuple[int, ...], ...]
    """Ascending cut positions per tensor dim, including both ends (elements)."""

    cell_count: int = field(init=False, repr=False, compare=False)
    """Number of cells."""

    bounds: Box = field(init=False, repr=False, compare=False)
    """Bounding box of all cells."""

    def __post_init__(self) -> None:
        for dim, cuts in enumerate(self.cuts):
            # A box without elements is a grid of one cell. In any other grid the cuts must ascend, because cells are
            # found by bisection.
            empty = len(cuts) == 2 and cuts[0] == cuts[1]
            rises = all(a < b for a, b in pairwise(cuts))
            if len(cuts) < 2 or cuts[0] < 0 or not (rises or empty):
                raise ValueError(f"the cuts along tensor dim {dim} do not ascend: {cuts[:8]}")
        object.__setattr__(self, "cell_count", prod(self.counts))
        object.__setattr__(self, "bounds", Box(tuple(c[0] for c in self.cuts), tuple(c[-1] for c in self.cuts)))

    @property
    def counts(self) -> tuple[int, ...]:
        """Cells per tensor dim."""
        return tuple(len(c) - 1 for c in self.cuts)

    def get_cell(self, index: int) -> Box:
        """Return the box of one cell."""
        if self.cell_count == 1 and index == 0:
            return self.bounds  # true for nearly all arrays
        # The index of a cell is a mixed-radix number whose digits are its positions along the dims, the last dim first.
        start, stop = [], []
        for cuts, count in zip(reversed(self.cuts), reversed(self.counts), strict=True):
            index, i = divmod(index, count)
            start.append(cuts[i])
            stop.append(cuts[i + 1])
        return Box(tuple(reversed(start)), tuple(reversed(stop)))

    def find_overlapping(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield (index, box) of every cell that shares an element with `box`, in order."""
        spans = [
            _find_cells_between(cuts, low, high) for cuts, low, high in zip(self.cuts, box.start, box.stop, strict=True)
        ]
        for where in product(*spans):
            index = 0
            for i, count in zip(where, self.counts, strict=True):
                index = index * count + i
            start = tuple(c[i] for c, i in zip(self.cuts, where, strict=True))
            stop = tuple(c[i + 1] for c, i in zip(self.cuts, where, strict=True))
            cell = Box(start, stop)
            # Bisection also finds a cell for an empty box, and the cell of an empty grid, although they share no
            # element.
            if cell.intersect(box) is not None:
                yield index, cell


def _find_cells_between(cuts: Sequence[int], low: int, high: int) -> range:
    """Return the existing cells along one dim, from the one that contains `low` to the one that contains ``high - 1``.

    >>> _find_cells_between((0, 2, 4, 6), 1, 4)
    range(0, 2)
    """
    first = bisect_right(cuts, low) - 1  # the last cut at or before `low`
    last = bisect_left(cuts, high)  # the first cut at or after `high`
    return range(max(first, 0), min(last, len(cuts) - 1))


def fit_grid(start: IntArray, stop: IntArray) -> tuple[Grid, IntArray] | None:
    """Return the grid that the boxes form and the row of each of its cells, or None if they do not form a grid.

    Args:
        start: First element of each box, shape (boxes, dims). Boxes must not be empty.
        stop: One past its last element, shape (boxes, dims).

    >>> fit_grid(np.array([[2], [0]]), np.array([[3], [2]]))
    (Grid(cuts=((0, 2, 3),)), array([1, 0]))
    """
    boxes, dims = start.shape
    if not boxes:
        return None
    columns = zip(start.T.tolist(), stop.T.tolist(), strict=True)
    cuts = tuple(tuple(sorted({*starts, *stops})) for starts, stops in columns)
    # Irregular boxes may have cuts for millions of cells, so the number of cells is compared before a grid is created.
    if prod(len(along) - 1 for along in cuts) != boxes:
        return None
    number = np.zeros(boxes, np.int64)
    for dim in range(dims):
        along = np.array(cuts[dim], np.int64)
        place = np.searchsorted(along, start[:, dim])
        if (along[place + 1] != stop[:, dim]).any():
            return None
        number = number * (len(along) - 1) + place
    # There are as many boxes as cells, so each cell is a box unless two boxes are the same cell.
    if np.bincount(number, minlength=boxes).max() > 1:
        return None
    return Grid(cuts), np.argsort(number)


@functools.lru_cache(maxsize=4096)
def create_grid(box: Box) -> Grid:
    """Return the grid of one box, shared by all arrays of a shape.

    >>> create_grid(Box((0, 2), (3, 4)))
    Grid(cuts=((0, 3), (2, 4)))
    """
    return Grid(tuple(zip(box.start, box.stop, strict=True)))


def fit_grids(boxes: BoxArray) -> list[tuple[Grid, list[int]]]:
    """Return non-empty boxes as one grid if they form one, otherwise as one grid each, with the row of each cell."""
    whole = fit_grid(boxes.start, boxes.stop)
    if whole is not None:
        return [(whole[0], whole[1].tolist())]
    return [(create_grid(boxes.get_box(row)), [row]) for row in range(len(boxes))]
