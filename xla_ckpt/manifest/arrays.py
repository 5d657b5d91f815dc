"""The arrays of a tag as one value: columns of numbers, and what many arrays have in common said once, as a form.

What an `ArrayForm` leaves of an array is its name and the places of its cells, and these are columns. An `ArrayRecord`
is made when somebody asks for a single array.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import numpy as np

from xla_ckpt.dtypes import DType
from xla_ckpt.errors import FormatError
from xla_ckpt.lightweight import lightweight
from xla_ckpt.manifest.forms import ArrayForm, cell_bytes, form_of, frozen
from xla_ckpt.manifest.shards import Shard, ShardColumns
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.corners import Ints
from xla_ckpt.sharding.grid import fit_all, single

Frames = tuple[Box | None, ...] | None
"""The frame of each shard of an array; None where no shard has one."""


@lightweight(kw_only=True)
class ArrayRecord:
    """One array: its form, and the place of every shard."""

    form: ArrayForm
    files: tuple[int, ...]
    """Index into the manifest's files, for each cell."""

    offsets: tuple[int, ...]
    """Of the first byte in the file, for each cell."""

    frames: Frames = None
    """The frame of each shard; None where no shard has one. The native layout has none."""

    def __post_init__(self) -> None:
        if not len(self.files) == len(self.offsets) == self.form.cells:
            raise FormatError("an array has more shards than places", expected=self.form.cells)

    @property
    def dtype(self) -> DType:
        """Its element type."""
        return self.form.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape (elements)."""
        return self.form.shape

    @property
    def spec(self) -> tuple[Any, ...] | None:
        return self.form.spec

    @property
    def stands_for(self) -> DType | None:
        return self.form.stands_for

    @property
    def own(self) -> bool:
        return self.form.own

    @property
    def divergent(self) -> bool:
        return self.form.divergent

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return self.form.nbytes

    def changed(self, **facts: Any) -> ArrayRecord:
        """The record of an array whose form has other facts."""
        return replace(self, form=replace(self.form, **facts))

    def __iter__(self) -> Iterator[Shard]:
        return (self._shard(i, cell) for i, cell in enumerate(self.form.boxes()))

    def touching(self, box: Box) -> Iterator[Shard]:
        """The shards that share an element with `box`."""
        return (self._shard(i, cell) for i, cell in self.form.touching(box))

    def _shard(self, i: int, cell: Box) -> Shard:
        return Shard(cell, self.files[i], self.offsets[i], None if self.frames is None else self.frames[i])


def array_record(
    dtype: DType,
    shape: tuple[int, ...],
    shards: Sequence[Shard] | ShardColumns,
    spec: Any = None,
    weak_type: bool | None = None,
) -> ArrayRecord:
    """The record of an array that is stored in these shards, as one grid if they are one.

    Raises:
        FormatError: The shards do not hold every element exactly once.
    """
    if not isinstance(shards, ShardColumns):
        places = [shard for shard in shards if shard.box.size]
        if len(places) == 1 and places[0].frame is None:  # as of nearly all arrays
            grids = (single(places[0].box),)
            form = form_of(dtype=dtype, shape=shape, grids=grids, spec=frozen(spec), weak_type=weak_type)
            return ArrayRecord(form=form, files=(places[0].file,), offsets=(places[0].offset,))
        try:
            shards = ShardColumns.of(places)
        except OverflowError as error:  # of numpy's: a hostile file may name any number
            raise FormatError("impossible place of a shard", found=str(places)[:200]) from error
        frames: list[Box | None] | None = [shard.frame for shard in places]
    else:
        shards = shards.rows(np.flatnonzero((shards.box.stop > shards.box.start).all(axis=1)), len(shape))
        frames = shards.frames()
    fitted = fit_all(shards.box)
    order = [row for _, rows in fitted for row in rows]
    files, offsets = shards.file.tolist(), shards.offset.tolist()
    of_cells = None if frames is None else tuple([frames[i] for i in order])
    return ArrayRecord(
        form=form_of(
            dtype=dtype,
            shape=shape,
            grids=tuple([grid for grid, _ in fitted]),
            spec=frozen(spec),
            weak_type=weak_type,
        ),
        files=tuple([files[i] for i in order]),
        offsets=tuple([offsets[i] for i in order]),
        frames=of_cells if of_cells is not None and any(frame is not None for frame in of_cells) else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrays(Mapping[str, ArrayRecord]):
    """All arrays of a tag by leaf path: a row for each, and a row for each cell of each."""

    names: Sequence[str]
    """Leaf path of each array."""

    forms: tuple[ArrayForm, ...]
    form: Ints
    """The index of each array's form."""

    file: Ints
    """Index into the manifest's files, for each cell; the cells of an array lie together, in the order of its form."""

    offset: Ints
    """Of its first byte in the file (of its frame's, where it has one), for each cell."""

    frames: Mapping[int, Box] = field(default_factory=dict)
    """Row of a cell -> its frame, of the cells that have one."""

    first: Ints = field(init=False, repr=False)
    """The row of each array's first cell; behind them, the number of cells."""

    row: Mapping[str, int] = field(init=False, repr=False)
    """The row of each leaf path."""

    by_form: tuple[Ints, ...] = field(init=False, repr=False)
    """The rows of all arrays of each form."""

    def __post_init__(self) -> None:
        counts = np.array([form.cells for form in self.forms], np.int64)
        first = np.zeros(len(self.names) + 1, np.int64)
        np.cumsum(counts[self.form], out=first[1:])
        if not len(self.file) == len(self.offset) == first[-1]:
            raise FormatError("the arrays have more shards than places", expected=int(first[-1]), found=len(self.file))
        object.__setattr__(self, "first", first)
        ends = np.cumsum(np.bincount(self.form, minlength=len(self.forms)))
        by_form = np.split(np.argsort(self.form, kind="stable"), ends)[: len(self.forms)]
        object.__setattr__(self, "by_form", tuple(by_form))
        object.__setattr__(self, "row", dict(zip(self.names, range(len(self.names)), strict=True)))
        if len(self.row) < len(self.names):
            raise FormatError("an array is listed twice")

    @classmethod
    def of(cls, records: Mapping[str, ArrayRecord]) -> Arrays:
        """The columns of some records."""
        distinct = {id(record.form): record.form for record in records.values()}  # few, and a form is slow to hash
        numbers = {form: number for number, form in enumerate(dict.fromkeys(distinct.values()))}
        number_of = {known: numbers[form] for known, form in distinct.items()}
        cells = [record.form.cells for record in records.values()]
        return cls(
            names=list(records),
            form=np.array([number_of[id(record.form)] for record in records.values()], np.int64),
            forms=tuple(numbers),
            file=_column([file for record in records.values() for file in record.files]),
            offset=_column([offset for record in records.values() for offset in record.offsets]),
            frames={
                first + i: frame
                for first, record in zip(accumulate(cells, initial=0), records.values(), strict=False)
                if record.frames is not None
                for i, frame in enumerate(record.frames)
                if frame is not None
            },
        )

    @staticmethod
    def joined(many: Sequence[Arrays]) -> Arrays:
        """All arrays of several, one after the other."""
        forms, cells = (list(accumulate(counts, initial=0)) for counts in
                        ([len(arrays.forms) for arrays in many], [len(arrays.file) for arrays in many]))  # fmt: skip
        return Arrays(
            names=[name for arrays in many for name in arrays.names],
            forms=tuple(form for arrays in many for form in arrays.forms),
            form=np.concatenate([arrays.form + before for arrays, before in zip(many, forms, strict=False)]),
            file=np.concatenate([arrays.file for arrays in many]),
            offset=np.concatenate([arrays.offset for arrays in many]),
            frames={before + cell: frame for arrays, before in zip(many, cells, strict=False)
                    for cell, frame in arrays.frames.items()},
        )  # fmt: skip

    def in_order(self, names: Sequence[str]) -> Arrays:
        """The same arrays in the order of these names; forms come in the order of their first arrays."""
        rows = np.array([self.row[name] for name in names], np.int64)
        counts = np.diff(self.first)[rows]
        cells = np.repeat(self.first[rows] - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        numbers, first, form = np.unique(self.form[rows], return_index=True, return_inverse=True)
        order = np.argsort(first)
        number = np.empty(len(order), np.int64)
        number[order] = np.arange(len(order))
        return Arrays(
            names=names,
            forms=tuple(self.forms[i] for i in numbers[order].tolist()),
            form=number[form.reshape(-1)],
            file=self.file[cells],
            offset=self.offset[cells],
            frames={new: self.frames[old] for new, old in enumerate(cells.tolist()) if old in self.frames}
            if self.frames
            else {},
        )

    def with_divergent(self, leaves: Iterable[str]) -> Arrays:
        """The same arrays, some of which are marked as `divergent`. Of leaf paths of other arrays nothing is said."""
        marked = {leaf: self[leaf].changed(divergent=True) for leaf in leaves if leaf in self}
        return Arrays.of({**self, **marked}) if marked else self

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, leaf: object) -> bool:
        return leaf in self.row

    def __getitem__(self, leaf: str) -> ArrayRecord:
        row = self.row[leaf]
        first, last = int(self.first[row]), int(self.first[row + 1])
        return ArrayRecord(
            form=self.forms[self.form[row]],
            files=tuple(self.file[first:last].tolist()),
            offsets=tuple(self.offset[first:last].tolist()),
            frames=self.frames_of(row),
        )

    def frames_of(self, row: int) -> Frames:
        """The frames of the cells of an array, by its row."""
        if not self.frames:
            return None  # as of nearly all tags
        frames = tuple([self.frames.get(cell) for cell in range(int(self.first[row]), int(self.first[row + 1]))])
        return frames if any(frame is not None for frame in frames) else None

    def form_at(self, leaf: str) -> ArrayForm | None:
        """The form of a leaf; None if there is no such leaf."""
        row = self.row.get(leaf)
        return None if row is None else self.forms[self.form[row]]

    def cells_of(self, form: int) -> Ints:
        """The rows of the cells of all arrays of a form, shape (arrays, cells of each)."""
        return np.asarray(self.first[self.by_form[form], None] + np.arange(self.forms[form].cells), np.int64)

    def cell_bytes(self) -> Ints:
        """Bytes of each cell (not of its frame)."""
        sizes = np.zeros(len(self.offset), np.int64)
        for number, form in enumerate(self.forms):
            sizes[self.cells_of(number)] = cell_bytes(form)
        return sizes

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(len(rows) * form.nbytes for rows, form in zip(self.by_form, self.forms, strict=True))

    def check_places(self, sizes: Sequence[int]) -> None:
        """Check that every shard lies inside of its file; `sizes` are those of the files (bytes).

        Raises:
            FormatError: One does not.
        """
        if (stray := np.flatnonzero((self.file < 0) | (self.file >= len(sizes)))).size:
            raise FormatError("a shard lies in no file", leaf=self._leaf(stray[0]), found=int(self.file[stray[0]]))
        size = _column(sizes)[self.file]
        end = self.offset + self.cell_bytes()
        end[list(self.frames)] = self.offset[list(self.frames)]
        if (stray := np.flatnonzero(end > size)).size:
            raise FormatError(
                "a shard reaches past the end of its file",
                leaf=self._leaf(stray[0]),
                found=f"offset {self.offset[stray[0]]}",
            )
        boxes = functools.cache(lambda number: self.forms[number].boxes())
        for cell, frame in self.frames.items():
            row = self._row_of(cell)
            form = self.forms[self.form[row]]
            inside = frame.contains(boxes(int(self.form[row]))[cell - int(self.first[row])])
            if not inside or int(self.offset[cell]) + frame.size * form.dtype.itemsize > sizes[self.file[cell]]:
                raise FormatError(
                    "a shard reaches past the end of its frame or file", leaf=self.names[row], found=str(frame)
                )

    def _row_of(self, cell: int) -> int:
        return int(np.searchsorted(self.first, cell, side="right")) - 1

    def _leaf(self, cell: int) -> str:
        return self.names[self._row_of(cell)]


def _column(values: Sequence[int]) -> Ints:
    try:
        return np.array(values, np.int64)
    except OverflowError as error:  # of numpy's: a hostile file may name any number
        raise FormatError("impossible place of a shard", found=str(max(values, key=abs))[:80]) from error
