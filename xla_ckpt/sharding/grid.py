"""Grids: many boxes written as the cuts along each tensor dim.

A tensor split over a mesh is almost always a grid. Three lists of cut positions stand for a thousand boxes, and the
few that touch a wanted region are found by bisection.
"""

from __future__ import annotations

import functools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import prod

import numpy as np

from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.corners import Corners, Ints


@dataclass(frozen=True, slots=True)
class Grid:
    """Boxes between neighbouring cuts; cell 0 is at the start of every tensor dim, the last dim runs fastest.

    >>> grid = Grid(((0, 2, 4), (0, 3)))
    >>> [str(grid.cell(i)) for i in range(grid.cells)]
    ['[0:2, 0:3]', '[2:4, 0:3]']
    """

    cuts: tuple[tuple[int, ...], ...]
    """Per tensor dim: ascending cut positions, both ends included (elements)."""

    cells: int = field(init=False, repr=False, compare=False)
    """Number of cells."""

    whole: Box = field(init=False, repr=False, compare=False)
    """The box that the cells make up together."""

    def __post_init__(self) -> None:
        for dim, cuts in enumerate(self.cuts):
            # A box without elements is a grid of one cell. In any other grid the cuts must rise, because cells are
            # found by bisection.
            empty = len(cuts) == 2 and cuts[0] == cuts[1]
            rises = all(a < b for a, b in pairwise(cuts))
            if len(cuts) < 2 or cuts[0] < 0 or not (rises or empty):
                raise ValueError(f"the cuts along tensor dim {dim} do not ascend: {cuts[:8]}")
        object.__setattr__(self, "cells", prod(self.counts))
        object.__setattr__(self, "whole", Box(tuple(c[0] for c in self.cuts), tuple(c[-1] for c in self.cuts)))

    @property
    def counts(self) -> tuple[int, ...]:
        """Cells per tensor dim."""
        return tuple(len(c) - 1 for c in self.cuts)

    def cell(self, index: int) -> Box:
        """The box of one cell."""
        if self.cells == 1 and index == 0:
            return self.whole  # as of nearly all arrays
        # The number of a cell is read like a number whose digits are its places along the dims, the last dim first.
        start, stop = [], []
        for cuts, count in zip(reversed(self.cuts), reversed(self.counts), strict=True):
            index, i = divmod(index, count)
            start.append(cuts[i])
            stop.append(cuts[i + 1])
        return Box(tuple(reversed(start)), tuple(reversed(stop)))

    def touching(self, box: Box) -> Iterator[tuple[int, Box]]:
        """(index, box) of every cell that shares an element with `box`, in order."""
        spans = [
            _cells_between(cuts, low, high) for cuts, low, high in zip(self.cuts, box.start, box.stop, strict=True)
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


def _cells_between(cuts: Sequence[int], low: int, high: int) -> range:
    """The cells along one dim from the one that holds `low` to the one that holds ``high - 1``, as far as they exist.

    >>> _cells_between((0, 2, 4, 6), 1, 4)
    range(0, 2)
    """
    first = bisect_right(cuts, low) - 1  # the last cut that is not behind `low`
    last = bisect_left(cuts, high)  # the first cut that is not before `high`
    return range(max(first, 0), min(last, len(cuts) - 1))


def fit(start: Ints, stop: Ints) -> tuple[Grid, Ints] | None:
    """The grid that some boxes are, and the row of each of its cells; None if they are no grid.

    Args:
        start: First element of each box, which is not empty; shape (boxes, dims).
        stop: One past its last element, shape (boxes, dims).

    >>> fit(np.array([[2], [0]]), np.array([[3], [2]]))
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
def single(box: Box) -> Grid:
    """The grid of one box: one for all arrays of a shape, of which a model has few.

    >>> single(Box((0, 2), (3, 4)))
    Grid(cuts=((0, 3), (2, 4)))
    """
    return Grid(tuple(zip(box.start, box.stop, strict=True)))


def fit_all(boxes: Corners) -> list[tuple[Grid, list[int]]]:
    """Boxes that are not empty, as one grid if they are one, else each as a grid; with the rows of the cells."""
    whole = fit(boxes.start, boxes.stop)
    if whole is not None:
        return [(whole[0], whole[1].tolist())]
    return [(single(boxes.box(row)), [row]) for row in range(len(boxes))]
