"""What arrays have in common that are of one type and shape, and cut alike: a form, which is made and checked once.

A model has thousands of arrays and few kinds of them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from xla_ckpt.dtypes import DType
from xla_ckpt.errors import FormatError
from xla_ckpt.sharding.box import Box, overlapping_pair, tiles
from xla_ckpt.sharding.corners import Ints
from xla_ckpt.sharding.grid import Grid

MAX_ELEMENTS = 1 << 56
"""The sizes of an array's dims, those of 0 left out, multiply to less: frameworks count bytes in 63 bits."""

MANY_BOXES = 1000
"""Of more boxes no two are looked for that overlap: that may take time in proportion to the square of their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayForm:
    """What arrays have in common that are of one type and shape, and cut alike.

    Raises (on construction):
        FormatError: The cells do not hold every element exactly once.
    """

    dtype: DType
    shape: tuple[int, ...]
    grids: tuple[Grid, ...]
    """The cells of all of them are the shards, in this order. An array without elements has none."""

    spec: tuple[Any, ...] | None = None
    """How its dims were split, as `Sharding.spec` in `xla_ckpt.sharding.sharding` writes it, or None. No byte is read
    by it. It is for people, and for guessing how another job would split the array."""

    stands_for: DType | None = None
    """In foreign layouts: the type that the array had, if only its values in another type are stored."""

    own: bool = False
    """In foreign layouts: whether this is what one rank had of its own. Other ranks find other bytes under the same
    leaf path."""

    divergent: bool = False
    """Whether the ranks had different bytes in place of equal replicas. Those of the first replica are stored."""

    weak_type: bool | None = None
    """Whether it was an array of jax's with a weak type; None if it was none of jax's, or older versions stored it."""

    cells: int = field(init=False, repr=False, compare=False)
    """Number of shards."""

    only: Box | None = field(init=False, repr=False, compare=False)
    """The box of the only shard, which has elements; None if there are more, or none."""

    def __post_init__(self) -> None:
        whole = Box.whole(self.shape)
        # Beside a dim without elements another one may have any size, of which no framework can make an array.
        if not whole.size and prod(max(n, 1) for n in self.shape) >= MAX_ELEMENTS:
            raise FormatError("impossible shape", found=str(list(self.shape))[:80])
        boxes = [grid.whole for grid in self.grids]
        object.__setattr__(self, "cells", sum(grid.cells for grid in self.grids))
        only = boxes[0] if self.cells == 1 and boxes[0].size else None
        object.__setattr__(self, "only", whole if only == whole else only)  # plans ask whether it is that very object
        if len(boxes) == 1 and boxes[0] == whole:
            return
        stray = next((b for b in boxes if not whole.contains(b)), None)
        if stray is not None:
            raise FormatError("a shard lies outside of its array", expected=f"inside of {whole}", found=str(stray))
        tiled = tiles(boxes, whole) if len(boxes) > MANY_BOXES else None
        if tiled:
            return
        if len(boxes) > MANY_BOXES:
            problem = "shards are split along too many dims" if tiled is None else "shards overlap, or are missing"
            raise FormatError(problem, expected=f"parts of {whole}", found=f"{len(boxes)} of them")
        if (pair := overlapping_pair(boxes)) is not None:
            raise FormatError("two shards hold the same elements", found=f"{pair[0]} and {pair[1]}")
        covered = sum(b.size for b in boxes)
        if covered != whole.size:
            raise FormatError("shards are missing", expected=f"{whole.size} elements", found=f"{covered}")

    @property
    def nbytes(self) -> int:
        """Bytes of a whole array."""
        return Box.whole(self.shape).size * self.dtype.itemsize

    def touching(self, box: Box) -> Iterator[tuple[int, Box]]:
        """(index, box) of each cell that shares an element with `box`."""
        at = 0
        for grid in self.grids:
            for i, cell in grid.touching(box):
                yield at + i, cell
            at += grid.cells

    def boxes(self) -> list[Box]:
        """The box of each cell."""
        return [grid.cell(i) for grid in self.grids for i in range(grid.cells)]


form_of = functools.lru_cache(maxsize=4096)(ArrayForm)
"""The form of these facts: one object for all arrays of it, which is checked once."""


@functools.lru_cache(maxsize=4096)
def cell_bytes(form: ArrayForm) -> Ints:
    """Bytes of each cell of an array of this form."""
    grids = [functools.reduce(np.multiply.outer, map(np.diff, grid.cuts), np.ones((), np.int64)) for grid in form.grids]
    sizes = np.concatenate([np.zeros(0, np.int64), *(np.reshape(sizes, -1) for sizes in grids)])
    return np.asarray(sizes * form.dtype.itemsize, np.int64)


def frozen(spec: Any) -> Any:
    """A spec, or a part of one, that came as lists, as the tuples that forms have."""
    return tuple(map(frozen, spec)) if isinstance(spec, list | tuple) else spec
