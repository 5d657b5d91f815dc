"""The arrays of a checkpoint: array metadata, shards, and tables of both as numpy columns.

`ArrayMetadata` is what arrays of one dtype, shape and shard grid have in common; it is created and checked once. What
remains of an array is its name and the file and offset of each shard, and these are columns: at thousands of ranks a
Python object for each of millions of shards would take minutes. A `Shard` or an `ArrayRecord` is created when it is
asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.lightweight import slots_dataclass
from xla_ckpt.core.sharding.box import (
    BoolArray,
    Box,
    BoxArray,
    Grid,
    IntArray,
    create_grid,
    find_overlap,
    fit_grids,
    is_tiling,
)
from xla_ckpt.errors import FormatError


@slots_dataclass()
class Shard:
    """A stored region of an array: its box, and the place of its bytes.

    A manifest is made from thousands of them for each rank, so it is not `kw_only`: keywords would take half as long
    again.
    """

    box: Box
    file: int
    """Index into the manifest's files."""

    offset: int
    """Of its first byte in the file (of its frame's, where it has one); the elements follow in C order."""

    parent_box: Box | None = None
    """In other layouts than the native one: the larger box whose elements lie there, of which this is a part."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardTable:
    """Many shards: a row for each."""

    box: BoxArray
    file: IntArray
    offset: IntArray
    has_parent: BoolArray | None = None
    """Which of them have a frame; None if none has."""

    parent: BoxArray | None = None
    """The frames; in rows without one, anything."""

    @classmethod
    def from_shards(cls, shards: Sequence[Shard]) -> ShardTable:
        """The columns of some shards."""
        framed = np.array([shard.parent_box is not None for shard in shards], np.bool_)
        return cls(
            box=BoxArray.from_boxes([shard.box for shard in shards]),
            file=np.array([shard.file for shard in shards], np.int64),
            offset=np.array([shard.offset for shard in shards], np.int64),
            has_parent=framed if framed.any() else None,
            parent=BoxArray.from_boxes([shard.parent_box or shard.box for shard in shards]) if framed.any() else None,
        )

    def __len__(self) -> int:
        return len(self.file)

    def select(self, rows: IntArray, dims: int | None = None) -> ShardTable:
        """Some of the shards; with `dims`, as those of an array of so many dims."""
        framed = None if self.has_parent is None else self.has_parent[rows]
        has_frames = framed is not None and bool(framed.any())
        return ShardTable(
            box=self.box.select(rows, dims),
            file=self.file[rows],
            offset=self.offset[rows],
            has_parent=framed if has_frames else None,
            parent=self.parent.select(rows, dims) if has_frames and self.parent is not None else None,
        )

    def get_parent_boxes(self) -> list[Box | None] | None:
        """The frame of each of them; None if none has one."""
        if self.has_parent is None or self.parent is None:
            return None
        return [self.parent.get_box(row) if framed else None for row, framed in enumerate(self.has_parent.tolist())]

    @staticmethod
    def concatenate(tables: Sequence[ShardTable], first_files: Sequence[int]) -> ShardTable:
        """All of them, one after the other; `first_files` is the number of the first file of each."""
        framed = any(columns.has_parent is not None for columns in tables)
        return ShardTable(
            box=BoxArray.concatenate([columns.box for columns in tables]),
            file=np.concatenate([c.file + first for c, first in zip(tables, first_files, strict=True)]),
            offset=np.concatenate([columns.offset for columns in tables]),
            has_parent=np.concatenate(
                [np.zeros(len(c), np.bool_) if c.has_parent is None else c.has_parent for c in tables]
            )
            if framed
            else None,
            parent=BoxArray.concatenate([c.parent or c.box for c in tables]) if framed else None,
        )


MAX_ELEMENTS = 1 << 56
"""The sizes of an array's dims, those of 0 left out, multiply to less: frameworks count bytes in 63 bits."""

MAX_PAIRWISE_BOXES = 1000
"""Of more boxes no two are looked for that overlap: that may take time in proportion to the square of their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayMetadata:
    """What arrays have in common that are of one type and shape, and cut alike.

    Raises (on construction):
        FormatError: The cells do not hold every element exactly once.
    """

    dtype: DType
    shape: tuple[int, ...]
    grids: tuple[Grid, ...]
    """The cells of all of them are the shards, in this order. An array without elements has none."""

    spec: tuple[Any, ...] | None = None
    """How its dims were split, as `Sharding.spec` in `xla_ckpt.core.sharding.sharding` writes it, or None. No byte is
    read by it. It is for people, and for guessing how another job would split the array."""

    original_dtype: DType | None = None
    """In foreign layouts: the type that the array had, if only its values in another type are stored."""

    is_rank_local: bool = False
    """In foreign layouts: whether this is what one rank had of its own. Other ranks find other bytes under the same
    leaf path."""

    is_divergent: bool = False
    """Whether the ranks had different bytes in place of equal replicas. Those of the first replica are stored."""

    weak_type: bool | None = None
    """Whether it was an array of jax's with a weak type; None if it was none of jax's, or older versions stored it."""

    shard_count: int = field(init=False, repr=False, compare=False)
    """Number of shards."""

    single_box: Box | None = field(init=False, repr=False, compare=False)
    """The box of the only shard, which has elements; None if there are more, or none."""

    def __post_init__(self) -> None:
        whole = Box.from_shape(self.shape)
        # Beside a dim without elements another one may have any size, of which no framework can make an array.
        if not whole.size and prod(max(n, 1) for n in self.shape) >= MAX_ELEMENTS:
            raise FormatError("impossible shape", found=str(list(self.shape))[:80])
        boxes = [grid.bounds for grid in self.grids]
        object.__setattr__(self, "shard_count", sum(grid.cell_count for grid in self.grids))
        only = boxes[0] if self.shard_count == 1 and boxes[0].size else None
        object.__setattr__(
            self, "single_box", whole if only == whole else only
        )  # plans ask whether it is that very object
        if len(boxes) == 1 and boxes[0] == whole:
            return
        stray = next((b for b in boxes if not whole.contains(b)), None)
        if stray is not None:
            raise FormatError("a shard lies outside of its array", expected=f"inside of {whole}", found=str(stray))
        tiled = is_tiling(boxes, whole) if len(boxes) > MAX_PAIRWISE_BOXES else None
        if tiled:
            return
        if len(boxes) > MAX_PAIRWISE_BOXES:
            problem = "shards are split along too many dims" if tiled is None else "shards overlap, or are missing"
            raise FormatError(problem, expected=f"parts of {whole}", found=f"{len(boxes)} of them")
        if (pair := find_overlap(boxes)) is not None:
            raise FormatError("two shards hold the same elements", found=f"{pair[0]} and {pair[1]}")
        covered = sum(b.size for b in boxes)
        if covered != whole.size:
            raise FormatError("shards are missing", expected=f"{whole.size} elements", found=f"{covered}")

    @property
    def nbytes(self) -> int:
        """Bytes of a whole array."""
        return Box.from_shape(self.shape).size * self.dtype.itemsize

    def find_overlapping(self, box: Box) -> Iterator[tuple[int, Box]]:
        """(index, box) of each cell that shares an element with `box`."""
        at = 0
        for grid in self.grids:
            for i, cell in grid.find_overlapping(box):
                yield at + i, cell
            at += grid.cell_count

    def list_boxes(self) -> list[Box]:
        """The box of each cell."""
        return [grid.get_cell(i) for grid in self.grids for i in range(grid.cell_count)]


create_metadata = functools.lru_cache(maxsize=4096)(ArrayMetadata)
"""The form of these facts: one object for all arrays of it, which is checked once."""


@functools.lru_cache(maxsize=4096)
def compute_shard_bytes(metadata: ArrayMetadata) -> IntArray:
    """Bytes of each cell of an array of this form."""
    grids = [
        functools.reduce(np.multiply.outer, map(np.diff, grid.cuts), np.ones((), np.int64)) for grid in metadata.grids
    ]
    sizes = np.concatenate([np.zeros(0, np.int64), *(np.reshape(sizes, -1) for sizes in grids)])
    return np.asarray(sizes * metadata.dtype.itemsize, np.int64)


def freeze_spec(spec: Any) -> Any:
    """A spec, or a part of one, that came as lists, as the tuples that forms have."""
    return tuple(map(freeze_spec, spec)) if isinstance(spec, list | tuple) else spec


ParentBoxes = tuple[Box | None, ...] | None
"""The frame of each shard of an array; None where no shard has one."""


@slots_dataclass(kw_only=True)
class ArrayRecord:
    """One array: its form, and the place of every shard."""

    metadata: ArrayMetadata
    files: tuple[int, ...]
    """Index into the manifest's files, for each cell."""

    offsets: tuple[int, ...]
    """Of the first byte in the file, for each cell."""

    parent_boxes: ParentBoxes = None
    """The frame of each shard; None where no shard has one. The native layout has none."""

    def __post_init__(self) -> None:
        if not len(self.files) == len(self.offsets) == self.metadata.shard_count:
            raise FormatError("an array has more shards than places", expected=self.metadata.shard_count)

    @property
    def dtype(self) -> DType:
        """Its element type."""
        return self.metadata.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape (elements)."""
        return self.metadata.shape

    @property
    def spec(self) -> tuple[Any, ...] | None:
        return self.metadata.spec

    @property
    def original_dtype(self) -> DType | None:
        return self.metadata.original_dtype

    @property
    def is_rank_local(self) -> bool:
        return self.metadata.is_rank_local

    @property
    def is_divergent(self) -> bool:
        return self.metadata.is_divergent

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return self.metadata.nbytes

    def replace_metadata(self, **facts: Any) -> ArrayRecord:
        """The record of an array whose form has other facts."""
        return replace(self, metadata=replace(self.metadata, **facts))

    def __iter__(self) -> Iterator[Shard]:
        return (self._create_shard(i, cell) for i, cell in enumerate(self.metadata.list_boxes()))

    def find_overlapping(self, box: Box) -> Iterator[Shard]:
        """The shards that share an element with `box`."""
        return (self._create_shard(i, cell) for i, cell in self.metadata.find_overlapping(box))

    def _create_shard(self, i: int, cell: Box) -> Shard:
        return Shard(cell, self.files[i], self.offsets[i], None if self.parent_boxes is None else self.parent_boxes[i])


def create_array_record(
    dtype: DType,
    shape: tuple[int, ...],
    shards: Sequence[Shard] | ShardTable,
    spec: Any = None,
    weak_type: bool | None = None,
) -> ArrayRecord:
    """The record of an array that is stored in these shards, as one grid if they are one.

    Raises:
        FormatError: The shards do not hold every element exactly once.
    """
    if not isinstance(shards, ShardTable):
        places = [shard for shard in shards if shard.box.size]
        if len(places) == 1 and places[0].parent_box is None:  # as of nearly all arrays
            grids = (create_grid(places[0].box),)
            form = create_metadata(dtype=dtype, shape=shape, grids=grids, spec=freeze_spec(spec), weak_type=weak_type)
            return ArrayRecord(metadata=form, files=(places[0].file,), offsets=(places[0].offset,))
        try:
            shards = ShardTable.from_shards(places)
        except OverflowError as error:  # of numpy's: a hostile file may name any number
            raise FormatError("impossible place of a shard", found=str(places)[:200]) from error
        frames: list[Box | None] | None = [shard.parent_box for shard in places]
    else:
        shards = shards.select(np.flatnonzero((shards.box.stop > shards.box.start).all(axis=1)), len(shape))
        frames = shards.get_parent_boxes()
    fitted = fit_grids(shards.box)
    order = [row for _, rows in fitted for row in rows]
    files, offsets = shards.file.tolist(), shards.offset.tolist()
    of_cells = None if frames is None else tuple([frames[i] for i in order])
    return ArrayRecord(
        metadata=create_metadata(
            dtype=dtype,
            shape=shape,
            grids=tuple([grid for grid, _ in fitted]),
            spec=freeze_spec(spec),
            weak_type=weak_type,
        ),
        files=tuple([files[i] for i in order]),
        offsets=tuple([offsets[i] for i in order]),
        parent_boxes=of_cells if of_cells is not None and any(frame is not None for frame in of_cells) else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrayTable(Mapping[str, ArrayRecord]):
    """All arrays of a tag by leaf path: a row for each, and a row for each cell of each."""

    names: Sequence[str]
    """Leaf path of each array."""

    metadata: tuple[ArrayMetadata, ...]
    metadata_index: IntArray
    """The index of each array's form."""

    file: IntArray
    """Index into the manifest's files, for each cell; the cells of an array lie together, in the order of its form."""

    offset: IntArray
    """Of its first byte in the file (of its frame's, where it has one), for each cell."""

    parent_boxes: Mapping[int, Box] = field(default_factory=dict)
    """Row of a cell -> its frame, of the cells that have one."""

    first_shard: IntArray = field(init=False, repr=False)
    """The row of each array's first cell; behind them, the number of cells."""

    row_by_leaf: Mapping[str, int] = field(init=False, repr=False)
    """The row of each leaf path."""

    rows_by_metadata: tuple[IntArray, ...] = field(init=False, repr=False)
    """The rows of all arrays of each form."""

    def __post_init__(self) -> None:
        counts = np.array([form.shard_count for form in self.metadata], np.int64)
        first = np.zeros(len(self.names) + 1, np.int64)
        np.cumsum(counts[self.metadata_index], out=first[1:])
        if not len(self.file) == len(self.offset) == first[-1]:
            raise FormatError("the arrays have more shards than places", expected=int(first[-1]), found=len(self.file))
        object.__setattr__(self, "first_shard", first)
        ends = np.cumsum(np.bincount(self.metadata_index, minlength=len(self.metadata)))
        by_form = np.split(np.argsort(self.metadata_index, kind="stable"), ends)[: len(self.metadata)]
        object.__setattr__(self, "rows_by_metadata", tuple(by_form))
        object.__setattr__(self, "row_by_leaf", dict(zip(self.names, range(len(self.names)), strict=True)))
        if len(self.row_by_leaf) < len(self.names):
            raise FormatError("an array is listed twice")

    @classmethod
    def from_records(cls, records: Mapping[str, ArrayRecord]) -> ArrayTable:
        """The columns of some records."""
        distinct = {
            id(record.metadata): record.metadata for record in records.values()
        }  # few, and a form is slow to hash
        numbers = {form: number for number, form in enumerate(dict.fromkeys(distinct.values()))}
        number_of = {known: numbers[form] for known, form in distinct.items()}
        cells = [record.metadata.shard_count for record in records.values()]
        return cls(
            names=list(records),
            metadata_index=np.array([number_of[id(record.metadata)] for record in records.values()], np.int64),
            metadata=tuple(numbers),
            file=_to_column([file for record in records.values() for file in record.files]),
            offset=_to_column([offset for record in records.values() for offset in record.offsets]),
            parent_boxes={
                first + i: frame
                for first, record in zip(accumulate(cells, initial=0), records.values(), strict=False)
                if record.parent_boxes is not None
                for i, frame in enumerate(record.parent_boxes)
                if frame is not None
            },
        )

    @staticmethod
    def concatenate(tables: Sequence[ArrayTable]) -> ArrayTable:
        """All arrays of several, one after the other."""
        forms = list(accumulate((len(arrays.metadata) for arrays in tables), initial=0))
        cells = list(accumulate((len(arrays.file) for arrays in tables), initial=0))
        return ArrayTable(
            names=[name for arrays in tables for name in arrays.names],
            metadata=tuple(form for arrays in tables for form in arrays.metadata),
            metadata_index=np.concatenate(
                [arrays.metadata_index + before for arrays, before in zip(tables, forms, strict=False)]
            ),
            file=np.concatenate([arrays.file for arrays in tables]),
            offset=np.concatenate([arrays.offset for arrays in tables]),
            parent_boxes={before + cell: frame for arrays, before in zip(tables, cells, strict=False)
                    for cell, frame in arrays.parent_boxes.items()},
        )  # fmt: skip

    def order_by(self, names: Sequence[str]) -> ArrayTable:
        """The same arrays in the order of these names; forms come in the order of their first arrays."""
        rows = np.array([self.row_by_leaf[name] for name in names], np.int64)
        counts = np.diff(self.first_shard)[rows]
        cells = np.repeat(self.first_shard[rows] - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        numbers, first, form = np.unique(self.metadata_index[rows], return_index=True, return_inverse=True)
        order = np.argsort(first)
        number = np.empty(len(order), np.int64)
        number[order] = np.arange(len(order))
        return ArrayTable(
            names=names,
            metadata=tuple(self.metadata[i] for i in numbers[order].tolist()),
            metadata_index=number[form.reshape(-1)],
            file=self.file[cells],
            offset=self.offset[cells],
            parent_boxes={
                new: self.parent_boxes[old] for new, old in enumerate(cells.tolist()) if old in self.parent_boxes
            }
            if self.parent_boxes
            else {},
        )

    def mark_divergent(self, leaves: Iterable[str]) -> ArrayTable:
        """The same arrays, some of which are marked as `is_divergent`.

        Of leaf paths of other arrays nothing is said.
        """
        marked = {leaf: self[leaf].replace_metadata(is_divergent=True) for leaf in leaves if leaf in self}
        return ArrayTable.from_records({**self, **marked}) if marked else self

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __contains__(self, leaf: object) -> bool:
        return leaf in self.row_by_leaf

    def __getitem__(self, leaf: str) -> ArrayRecord:
        row = self.row_by_leaf[leaf]
        first, last = int(self.first_shard[row]), int(self.first_shard[row + 1])
        return ArrayRecord(
            metadata=self.metadata[self.metadata_index[row]],
            files=tuple(self.file[first:last].tolist()),
            offsets=tuple(self.offset[first:last].tolist()),
            parent_boxes=self.get_parent_boxes(row),
        )

    def get_parent_boxes(self, row: int) -> ParentBoxes:
        """The frames of the cells of an array, by its row."""
        if not self.parent_boxes:
            return None  # as of nearly all tags
        frames = tuple(
            [self.parent_boxes.get(cell) for cell in range(int(self.first_shard[row]), int(self.first_shard[row + 1]))]
        )
        return frames if any(frame is not None for frame in frames) else None

    def get_metadata(self, leaf: str) -> ArrayMetadata | None:
        """The form of a leaf; None if there is no such leaf."""
        row = self.row_by_leaf.get(leaf)
        return None if row is None else self.metadata[self.metadata_index[row]]

    def get_shard_rows(self, number: int) -> IntArray:
        """The rows of the cells of all arrays of a form, shape (arrays, cells of each)."""
        return np.asarray(
            self.first_shard[self.rows_by_metadata[number], None] + np.arange(self.metadata[number].shard_count),
            np.int64,
        )

    def compute_shard_bytes(self) -> IntArray:
        """Bytes of each cell (not of its frame)."""
        sizes = np.zeros(len(self.offset), np.int64)
        for number, form in enumerate(self.metadata):
            sizes[self.get_shard_rows(number)] = compute_shard_bytes(form)
        return sizes

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(len(rows) * form.nbytes for rows, form in zip(self.rows_by_metadata, self.metadata, strict=True))

    def check_locations(self, file_sizes: Sequence[int]) -> None:
        """Check that every shard lies inside of its file; `file_sizes` are those of the files (bytes).

        Raises:
            FormatError: One does not.
        """
        if (stray := np.flatnonzero((self.file < 0) | (self.file >= len(file_sizes)))).size:
            raise FormatError("a shard lies in no file", leaf=self._get_leaf(stray[0]), found=int(self.file[stray[0]]))
        size = _to_column(file_sizes)[self.file]
        end = self.offset + self.compute_shard_bytes()
        end[list(self.parent_boxes)] = self.offset[list(self.parent_boxes)]
        if (stray := np.flatnonzero(end > size)).size:
            raise FormatError(
                "a shard reaches past the end of its file",
                leaf=self._get_leaf(stray[0]),
                found=f"offset {self.offset[stray[0]]}",
            )
        boxes = functools.cache(lambda number: self.metadata[number].list_boxes())
        for cell, frame in self.parent_boxes.items():
            row = self._find_row(cell)
            form = self.metadata[self.metadata_index[row]]
            inside = frame.contains(boxes(int(self.metadata_index[row]))[cell - int(self.first_shard[row])])
            if not inside or int(self.offset[cell]) + frame.size * form.dtype.itemsize > file_sizes[self.file[cell]]:
                raise FormatError(
                    "a shard reaches past the end of its frame or file", leaf=self.names[row], found=str(frame)
                )

    def _find_row(self, cell: int) -> int:
        return int(np.searchsorted(self.first_shard, cell, side="right")) - 1

    def _get_leaf(self, cell: int) -> str:
        return self.names[self._find_row(cell)]


def _to_column(values: Sequence[int]) -> IntArray:
    try:
        return np.array(values, np.int64)
    except OverflowError as error:  # of numpy's: a hostile file may name any number
        raise FormatError("impossible place of a shard", found=str(max(values, key=abs))[:80]) from error
