"""Many boxes as columns of numbers: where they start and stop along each tensor dim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xla_ckpt.sharding.box import Box

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Corners:
    """Many boxes: a row for each, a column for each tensor dim. Boxes of fewer dims have zeros in the last columns."""

    start: Ints
    """First element of each box, shape (boxes, dims)."""

    stop: Ints
    """One past its last element, shape (boxes, dims)."""

    @classmethod
    def of(cls, boxes: Sequence[Box]) -> Corners:
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

    def rows(self, which: Ints, dims: int | None = None) -> Corners:
        """Some of the boxes; with `dims`, as boxes of so many dims."""
        return Corners(self.start[which, :dims], self.stop[which, :dims])

    def box(self, row: int) -> Box:
        """One of them."""
        return Box(tuple(self.start[row].tolist()), tuple(self.stop[row].tolist()))

    def first_of_equals(self) -> Ints:
        """For each box, the first row that has the same one."""
        both = np.concatenate([self.start, self.stop], axis=1)
        _, first, which = np.unique(both, axis=0, return_index=True, return_inverse=True)
        return np.asarray(first[which.reshape(-1)], np.int64)

    @staticmethod
    def joined(many: Sequence[Corners]) -> Corners:
        """All of them, one after the other."""
        dims = max(corners.dims for corners in many)
        wide = [
            corners if corners.dims == dims else Corners(_widened(corners.start, dims), _widened(corners.stop, dims))
            for corners in many
        ]
        return Corners(np.concatenate([c.start for c in wide]), np.concatenate([c.stop for c in wide]))


def _widened(values: Ints, dims: int) -> Ints:
    return np.pad(values, ((0, 0), (0, dims - values.shape[1])))
