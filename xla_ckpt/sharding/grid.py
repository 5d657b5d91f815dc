"""Grids: many boxes written as the cuts along each tensor dim.

A tensor split over a mesh is almost always a grid. Three lists of cut positions stand for a thousand boxes, and the
few that touch a wanted region are found by bisection.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

from xla_ckpt.sharding.box import Box


@dataclass(frozen=True, slots=True)
class Grid:
    """Boxes between neighbouring cuts; cell 0 is at the start of every tensor dim, the last dim runs fastest.

    >>> grid = Grid(((0, 2, 4), (0, 3)))
    >>> [str(grid.cell(i)) for i in range(grid.cells)]
    ['[0:2, 0:3]', '[2:4, 0:3]']
    """

    cuts: tuple[tuple[int, ...], ...]
    """Per tensor dim: ascending cut positions, both ends included (elements)."""

    def __post_init__(self) -> None:
        for dim, cuts in enumerate(self.cuts):
            empty = len(cuts) == 2 and cuts[0] == cuts[1]  # a box without elements is a grid of one cell
            rises = all(a < b for a, b in pairwise(cuts))
            if len(cuts) < 2 or cuts[0] < 0 or not (rises or empty):
                raise ValueError(f"the cuts along tensor dim {dim} do not ascend: {cuts[:8]}")

    @property
    def counts(self) -> tuple[int, ...]:
        """Cells per tensor dim."""
        return tuple(len(c) - 1 for c in self.cuts)

    @property
    def cells(self) -> int:
        """Number of cells."""
        return prod(self.counts)

    @property
    def whole(self) -> Box:
        """The box that the cells make up together."""
        return Box(tuple(c[0] for c in self.cuts), tuple(c[-1] for c in self.cuts))

    def cell(self, index: int) -> Box:
        """The box of one cell."""
        start, stop = [], []
        for cuts, count in zip(reversed(self.cuts), reversed(self.counts), strict=True):
            index, i = divmod(index, count)
            start.append(cuts[i])
            stop.append(cuts[i + 1])
        return Box(tuple(reversed(start)), tuple(reversed(stop)))

    def touching(self, box: Box) -> Iterator[tuple[int, Box]]:
        """(index, box) of every cell that shares an element with `box`, in order."""
        spans = []
        for cuts, low, high in zip(self.cuts, box.start, box.stop, strict=True):
            spans.append(range(max(bisect_right(cuts, low) - 1, 0), min(bisect_left(cuts, high), len(cuts) - 1)))
        for where in product(*spans):
            index = 0
            for i, count in zip(where, self.counts, strict=True):
                index = index * count + i
            start = tuple(c[i] for c, i in zip(self.cuts, where, strict=True))
            stop = tuple(c[i + 1] for c, i in zip(self.cuts, where, strict=True))
            cell = Box(start, stop)
            if cell.intersect(box) is not None:
                yield index, cell


def fit(boxes: Sequence[Box]) -> tuple[Grid, tuple[int, ...]] | None:
    """The grid that these boxes are, and the index into `boxes` of each of its cells; None if they are none.

    >>> fit([Box((2,), (3,)), Box((0,), (2,))])
    (Grid(cuts=((0, 2, 3),)), (1, 0))
    """
    if not boxes:
        return None
    if len(boxes) == 1:
        only = boxes[0]
        return Grid(tuple(zip(only.start, only.stop, strict=True))), (0,)
    if any(b.size == 0 for b in boxes):
        return None
    cuts = tuple(
        tuple(sorted(set(starts) | set(stops)))
        for starts, stops in zip(
            zip(*(b.start for b in boxes), strict=True), zip(*(b.stop for b in boxes), strict=True), strict=True
        )
    )
    grid = Grid(cuts)
    if grid.cells != len(boxes):
        return None
    places = {(box.start, box.stop): i for i, box in enumerate(boxes)}
    starts, stops = product(*(c[:-1] for c in cuts)), product(*(c[1:] for c in cuts))  # in the order of cells
    order = [places.get(corners, -1) for corners in zip(starts, stops, strict=True)]
    return None if -1 in order else (grid, tuple(order))


def fit_all(boxes: Sequence[Box]) -> Iterable[tuple[Grid, tuple[int, ...]]]:
    """The boxes as few grids: one if they are one, else one for each box."""
    whole = fit(boxes)
    if whole is not None:
        return [whole]
    singles = ((fit([box]), i) for i, box in enumerate(boxes))
    return [(one[0], (i,)) for one, i in singles if one is not None]
