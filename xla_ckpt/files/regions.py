"""Regions of arrays as they stand in payload files: a single one, and many as one value of columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xla_ckpt.dtypes import DType
from xla_ckpt.lightweight import Columns, lightweight
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.corners import Ints


@lightweight()
class Region:
    """A region of an array as it stands in a payload file."""

    name: str
    """Its key in the file."""

    dtype: DType
    box: Box
    """Region of the global array."""

    @property
    def nbytes(self) -> int:
        """Bytes of the region."""
        return self.box.size * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Regions(Columns[Region]):
    """Regions, in file order: a row for each. What those of one type and box have in common is said once."""

    names: Sequence[str]
    """Their keys in the file."""

    forms: Sequence[tuple[DType, Box]]
    form: Ints
    """The index of each region's form."""

    @classmethod
    def of(cls, regions: Sequence[Region]) -> Regions:
        """The columns of some regions."""
        if isinstance(regions, Regions):
            return regions
        forms: dict[tuple[DType, Box], int] = {}
        form = [forms.setdefault((region.dtype, region.box), len(forms)) for region in regions]
        return cls([region.name for region in regions], list(forms), np.array(form, np.int64))

    def __len__(self) -> int:
        return len(self.names)

    def row(self, number: int) -> Region:
        return Region(self.names[number], *self.forms[self.form[number]])

    def rows(self, which: Ints) -> Regions:
        """Some of the regions."""
        return Regions([self.names[row] for row in which.tolist()], self.forms, self.form[which])

    @property
    def nbytes(self) -> Ints:
        """Bytes of each region."""
        sizes = np.array([box.size * dtype.itemsize for dtype, box in self.forms], np.int64)
        return np.asarray(sizes[self.form], np.int64)
