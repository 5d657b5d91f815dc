"""Boxes: rectangular regions of an array's index space; many boxes as columns (`BoxArray`) or as a `Grid`.

A box is half-open and uses global coordinates: the box of a shard is its region of the whole array, whatever buffer
contains it. Resharding is intersection of boxes. A tensor that is split over a mesh is nearly always a grid: three
lists of cut positions stand for a thousand boxes, and bisection finds the few that overlap a region.
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
    def from_shape(cls, shape: Iterable[int]) -> Box:
        """The box of a whole tensor.

        >>> Box.from_shape((2, 3))
        Box(start=(0, 0), stop=(2, 3))
        """
        return _create_box(tuple(shape))

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

    def translate(self, offset: Sequence[int]) -> Self:
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

    def slice_dim(self, dim: int, low: int, high: int) -> Box:
        """The slice `low <= i < high` (global indices) of this box along one tensor dim.

        >>> Box((0, 0), (4, 2)).slice_dim(0, 1, 3)
        Box(start=(1, 0), stop=(3, 2))
        """
        return Box((*self.start[:dim], low, *self.start[dim + 1 :]), (*self.stop[:dim], high, *self.stop[dim + 1 :]))

    def __str__(self) -> str:
        """As in Python's slicing: ``[2:4, 1:2]``."""
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


@functools.lru_cache(maxsize=4096)
def _create_box(shape: tuple[int, ...]) -> Box:
    """One box for all tensors of a shape: a model has few shapes, and many tensors of each."""
    return Box((0,) * len(shape), shape)


@dataclass(frozen=True, slots=True)
class ParentBox(Box):
    """A box whose start may lie before the first element of the array.

    The rows of one tensor that is stored may be those of several arrays: the second half of a stored tensor is a whole
    array, and the box that all of the tensor would be in that array begins before it.

    >>> str(ParentBox((-2, 0), (2, 3)))
    '[-2:2, 0:3]'
    """

    def __post_init__(self) -> None:
        for dim, (low, high) in enumerate(zip(self.start, self.stop, strict=True)):
            if low > high:
                raise ValueError(f"tensor dim {dim} of a frame runs from {low} to {high}")
        object.__setattr__(self, "size", prod(map(sub, self.stop, self.start)))


def find_overlap(boxes: Iterable[Box]) -> tuple[Box, Box] | None:
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
"""Most corners of a box that `is_tiling` looks at: nobody splits an array along more dims than that."""


def is_tiling(boxes: Sequence[Box], whole: Box) -> bool | None:
    """Whether the boxes hold every element of `from_shape` exactly once, in time linear in their number; None if
    unknown.

    Each corner of a box counts +1 or -1, by turns. Inside of a tiling they cancel, and those of `from_shape` are left;
    and since the corners say what the sum of the boxes' indicator functions is, they are left of a tiling only.

    >>> is_tiling([Box((0, 0), (2, 3)), Box((2, 0), (4, 1)), Box((2, 1), (4, 3))], Box((0, 0), (4, 3)))
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


IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class BoxArray:
    """Many boxes: a row for each, a column for each tensor dim. Boxes of fewer dims have zeros in the last columns."""

    start: IntArray
    """First element of each box, shape (boxes, dims)."""

    stop: IntArray
    """One past its last element, shape (boxes, dims)."""

    @classmethod
    def from_boxes(cls, boxes: Sequence[Box]) -> BoxArray:
        """Those of some boxes."""
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
        """Columns."""
        return int(self.start.shape[1])

    def select(self, rows: IntArray, dims: int | None = None) -> BoxArray:
        """Some of the boxes; with `dims`, as boxes of so many dims."""
        return BoxArray(self.start[rows, :dims], self.stop[rows, :dims])

    def get_box(self, row: int) -> Box:
        """One of them."""
        return Box(tuple(self.start[row].tolist()), tuple(self.stop[row].tolist()))

    def find_first_duplicates(self) -> IntArray:
        """For each box, the first row that has the same one."""
        both = np.concatenate([self.start, self.stop], axis=1)
        _, first, which = np.unique(both, axis=0, return_index=True, return_inverse=True)
        return np.asarray(first[which.reshape(-1)], np.int64)

    @staticmethod
    def concatenate(arrays: Sequence[BoxArray]) -> BoxArray:
        """All of them, one after the other."""
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
    """Boxes between neighbouring cuts; cell 0 is at the start of every tensor dim, the last dim runs fastest.

    >>> grid = Grid(((0, 2, 4), (0, 3)))
    >>> [str(grid.get_cell(i)) for i in range(grid.cell_count)]
    ['[0:2, 0:3]', '[2:4, 0:3]']
    """

    cuts: tuple[tuple[int, ...], ...]
    """Per tensor dim: ascending cut positions, both ends included (elements)."""

    cell_count: int = field(init=False, repr=False, compare=False)
    """Number of cells."""

    bounds: Box = field(init=False, repr=False, compare=False)
    """The box that the cells make up together."""

    def __post_init__(self) -> None:
        for dim, cuts in enumerate(self.cuts):
            # A box without elements is a grid of one cell. In any other grid the cuts must rise, because cells are
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
        """The box of one cell."""
        if self.cell_count == 1 and index == 0:
            return self.bounds  # as of nearly all arrays
        # The number of a cell is read like a number whose digits are its places along the dims, the last dim first.
        start, stop = [], []
        for cuts, count in zip(reversed(self.cuts), reversed(self.counts), strict=True):
            index, i = divmod(index, count)
            start.append(cuts[i])
            stop.append(cuts[i + 1])
        return Box(tuple(reversed(start)), tuple(reversed(stop)))

    def find_overlapping(self, box: Box) -> Iterator[tuple[int, Box]]:
        """(index, box) of every cell that shares an element with `box`, in order."""
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
            # The bisection also finds a cell for an empty box, and the cell of an empty grid. They share no element.
            if cell.intersect(box) is not None:
                yield index, cell


def _find_cells_between(cuts: Sequence[int], low: int, high: int) -> range:
    """The cells along one dim from the one that holds `low` to the one that holds ``high - 1``, as far as they exist.

    >>> _find_cells_between((0, 2, 4, 6), 1, 4)
    range(0, 2)
    """
    first = bisect_right(cuts, low) - 1  # the last cut that is not behind `low`
    last = bisect_left(cuts, high)  # the first cut that is not before `high`
    return range(max(first, 0), min(last, len(cuts) - 1))


def fit_grid(start: IntArray, stop: IntArray) -> tuple[Grid, IntArray] | None:
    """The grid that some boxes are, and the row of each of its cells; None if they are no grid.

    Args:
        start: First element of each box, which is not empty; shape (boxes, dims).
        stop: One past its last element, shape (boxes, dims).

    >>> fit_grid(np.array([[2], [0]]), np.array([[3], [2]]))
    (Grid(cuts=((0, 2, 3),)), array([1, 0]))
    """
    boxes, dims = start.shape
    if not boxes:
        return None
    columns = zip(start.T.tolist(), stop.T.tolist(), strict=True)
    cuts = tuple(tuple(sorted({*starts, *stops})) for starts, stops in columns)
    # Boxes that lie criss-cross may have cuts for millions of cells: their number is compared before there is a grid.
    if prod(len(along) - 1 for along in cuts) != boxes:
        return None
    number = np.zeros(boxes, np.int64)
    for dim in range(dims):
        along = np.array(cuts[dim], np.int64)
        place = np.searchsorted(along, start[:, dim])
        if (along[place + 1] != stop[:, dim]).any():
            return None
        number = number * (len(along) - 1) + place
    # As many boxes as cells: each cell is a box, unless two boxes are one cell.
    if np.bincount(number, minlength=boxes).max() > 1:
        return None
    return Grid(cuts), np.argsort(number)


@functools.lru_cache(maxsize=4096)
def create_grid(box: Box) -> Grid:
    """The grid of one box: one for all arrays of a shape, of which a model has few.

    >>> create_grid(Box((0, 2), (3, 4)))
    Grid(cuts=((0, 3), (2, 4)))
    """
    return Grid(tuple(zip(box.start, box.stop, strict=True)))


def fit_grids(boxes: BoxArray) -> list[tuple[Grid, list[int]]]:
    """Boxes that are not empty, as one grid if they are one, else each as a grid; with the rows of the cells."""
    whole = fit_grid(boxes.start, boxes.stop)
    if whole is not None:
        return [(whole[0], whole[1].tolist())]
    return [(create_grid(boxes.get_box(row)), [row]) for row in range(len(boxes))]
