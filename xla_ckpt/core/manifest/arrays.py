"""The arrays of a checkpoint: array metadata, shards, and tables of both as numpy columns.

`ArrayMetadata` contains the properties shared by all arrays of one dtype, shape and shard grid. It is created and
checked once. The remaining data of an array are its name and the file and offset of each shard, stored as columns: with
thousands of ranks there are millions of shards, and a Python object for each would take minutes. `Shard` and
`ArrayRecord` objects are created on access.
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
    """A stored region of an array: its box and the location of its bytes.

    A manifest is built from thousands of shards per rank, so the class is not `kw_only`: keyword arguments take 50%
    longer.
    """

    box: Box
    file: int
    """Index into the manifest's files."""

    offset: int
    """Byte offset in the file of the first element (of `parent_box`, if set). The elements follow in C order."""

    parent_box: Box | None = None
    """Only in foreign layouts: the larger box that is stored at the offset and contains this shard."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardTable:
    """Many shards: a row per shard."""

    box: BoxArray
    file: IntArray
    offset: IntArray
    has_parent: BoolArray | None = None
    """True for shards with a parent box. None if no shard has one."""

    parent: BoxArray | None = None
    """Parent boxes. Rows without one have arbitrary values."""

    @classmethod
    def from_shards(cls, shards: Sequence[Shard]) -> ShardTable:
        """Create the columns from a sequence of shards."""
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
        """Return the shards in `rows`, with boxes truncated to `dims` dims if given."""
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
        """Return the parent box of each shard, or None if no shard has one."""
        if self.has_parent is None or self.parent is None:
            return None
        return [self.parent.get_box(row) if framed else None for row, framed in enumerate(self.has_parent.tolist())]

    @staticmethod
    def concatenate(tables: Sequence[ShardTable], first_files: Sequence[int]) -> ShardTable:
        """Concatenate several tables.

        Args:
            tables: Tables of shards.
            first_files: Offset that is added to the file indices of each table.
        """
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
"""Exclusive limit of the product of an array's dims, ignoring dims of 0: frameworks count bytes in 63 bits."""

MAX_PAIRWISE_BOXES = 1000
"""Maximum number of boxes that are compared pairwise for overlaps, which may take quadratic time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayMetadata:
    """Properties shared by arrays of one dtype, shape and shard grid.

    Raises:
        FormatError: The cells do not contain every element exactly once, or the shape is impossible. Raised on
            construction.
    """

    dtype: DType
    shape: tuple[int, ...]
    grids: tuple[Grid, ...]
    """Grids whose cells are the shards, in this order. Empty for an array without elements."""

    spec: tuple[Any, ...] | None = None
    """Sharding at the time of the save, as `Sharding.spec` in `xla_ckpt.core.sharding.sharding`, or None. Not needed to
    read the bytes: it is for display, and for deriving the sharding of another job."""

    original_dtype: DType | None = None
    """Only in foreign layouts: the original dtype, if the values are stored in another dtype."""

    is_rank_local: bool = False
    """Only in foreign layouts: True if the array is one rank's local value. Other ranks find other bytes under the same
    leaf path."""

    is_divergent: bool = False
    """True if the replicas differed on the ranks. The bytes of the first replica are stored."""

    weak_type: bool | None = None
    """True if it was a weakly typed JAX array. None for other arrays, and for arrays saved by older versions."""

    shard_count: int = field(init=False, repr=False, compare=False)
    """Number of shards."""

    single_box: Box | None = field(init=False, repr=False, compare=False)
    """Box of the only shard, if there is exactly one and it is not empty. Otherwise None."""

    def __post_init__(self) -> None:
        whole = Box.from_shape(self.shape)
        # If one dim has no elements, another may have any size, but frameworks cannot create such an array.
        if not whole.size and prod(max(n, 1) for n in self.shape) >= MAX_ELEMENTS:
            raise FormatError("impossible shape", found=str(list(self.shape))[:80])
        boxes = [grid.bounds for grid in self.grids]
        object.__setattr__(self, "shard_count", sum(grid.cell_count for grid in self.grids))
        only = boxes[0] if self.shard_count == 1 and boxes[0].size else None
        object.__setattr__(self, "single_box", whole if only == whole else only)  # plans compare it by identity
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
        """Number of bytes of a whole array."""
        return Box.from_shape(self.shape).size * self.dtype.itemsize

    def find_overlapping(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield (index, box) of each cell that shares an element with `box`."""
        at = 0
        for grid in self.grids:
            for i, cell in grid.find_overlapping(box):
                yield at + i, cell
            at += grid.cell_count

    def list_boxes(self) -> list[Box]:
        """Return the box of each cell."""
        return [grid.get_cell(i) for grid in self.grids for i in range(grid.cell_count)]


create_metadata = functools.lru_cache(maxsize=4096)(ArrayMetadata)
"""Cached constructor of `ArrayMetadata`: one object for all arrays with equal metadata, which is checked once."""


@functools.lru_cache(maxsize=4096)
def compute_shard_bytes(metadata: ArrayMetadata) -> IntArray:
    """Return the number of bytes of each cell of an array with this metadata."""
    grids = [
        functools.reduce(np.multiply.outer, map(np.diff, grid.cuts), np.ones((), np.int64)) for grid in metadata.grids
    ]
    sizes = np.concatenate([np.zeros(0, np.int64), *(np.reshape(sizes, -1) for sizes in grids)])
    return np.asarray(sizes * metadata.dtype.itemsize, np.int64)


def freeze_spec(spec: Any) -> Any:
    """Return a spec, or a part of one, with lists converted to tuples."""
    return tuple(map(freeze_spec, spec)) if isinstance(spec, list | tuple) else spec


ParentBoxes = tuple[Box | None, ...] | None
"""Parent box of each shard of an array, or None if no shard has one."""


@slots_dataclass(kw_only=True)
class ArrayRecord:
    """Metadata of one array and the location of every shard."""

    metadata: ArrayMetadata
    files: tuple[int, ...]
    """Index into the manifest's files, per shard."""

    offsets: tuple[int, ...]
    """Byte offset in the file, per shard."""

    parent_boxes: ParentBoxes = None
    """Parent box of each shard, or None if no shard has one. Always None in the native layout."""

    def __post_init__(self) -> None:
        if not len(self.files) == len(self.offsets) == self.metadata.shard_count:
            raise FormatError("an array has more shards than places", expected=self.metadata.shard_count)

    @property
    def dtype(self) -> DType:
        """Dtype of the elements."""
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
        """Number of bytes of the whole array."""
        return self.metadata.nbytes

    def replace_metadata(self, **facts: Any) -> ArrayRecord:
        """Return a record whose metadata has other values for these fields."""
        return replace(self, metadata=replace(self.metadata, **facts))

    def __iter__(self) -> Iterator[Shard]:
        return (self._create_shard(i, cell) for i, cell in enumerate(self.metadata.list_boxes()))

    def find_overlapping(self, box: Box) -> Iterator[Shard]:
        """Return the shards that share an element with `box`."""
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
    """Create the record of an array from its shards, as one grid if they form one.

    Raises:
        FormatError: The shards do not contain every element exactly once.
    """
    if not isinstance(shards, ShardTable):
        places = [shard for shard in shards if shard.box.size]
        if len(places) == 1 and places[0].parent_box is None:  # true for nearly all arrays
            grids = (create_grid(places[0].box),)
            form = create_metadata(dtype=dtype, shape=shape, grids=grids, spec=freeze_spec(spec), weak_type=weak_type)
            return ArrayRecord(metadata=form, files=(places[0].file,), offsets=(places[0].offset,))
        try:
            shards = ShardTable.from_shards(places)
        except OverflowError as error:  # from numpy: a malicious file may contain any number
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
    """All arrays of a checkpoint by leaf path: a row per array, and a row per shard of each array."""

    names: Sequence[str]
    """Leaf path of each array."""

    metadata: tuple[ArrayMetadata, ...]
    metadata_index: IntArray
    """Index into `metadata`, per array."""

    file: IntArray
    """Index into the manifest's files, per shard. The shards of an array are consecutive, in the order of its cells."""

    offset: IntArray
    """Byte offset in the file, per shard (of its parent box, if it has one)."""

    parent_boxes: Mapping[int, Box] = field(default_factory=dict)
    """Row of a shard -> its parent box, for shards that have one."""

    first_shard: IntArray = field(init=False, repr=False)
    """Row of each array's first shard, followed by the number of shards."""

    row_by_leaf: Mapping[str, int] = field(init=False, repr=False)
    """Row of the array with each leaf path."""

    rows_by_metadata: tuple[IntArray, ...] = field(init=False, repr=False)
    """Rows of the arrays that have each metadata."""

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
        """Create the columns from array records."""
        distinct = {
            id(record.metadata): record.metadata for record in records.values()
        }  # few objects; hashing metadata is slow
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
        """Concatenate several tables."""
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
        """Return the arrays in the order of `names`. The metadata are ordered by their first array."""
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
        """Return the arrays with those in `leaves` marked as `is_divergent`. Unknown leaf paths are ignored."""
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
        """Return the parent boxes of the shards of an array, by its row."""
        if not self.parent_boxes:
            return None  # true for nearly all checkpoints
        frames = tuple(
            [self.parent_boxes.get(cell) for cell in range(int(self.first_shard[row]), int(self.first_shard[row + 1]))]
        )
        return frames if any(frame is not None for frame in frames) else None

    def get_metadata(self, leaf: str) -> ArrayMetadata | None:
        """Return the metadata of a leaf, or None if there is no such leaf."""
        row = self.row_by_leaf.get(leaf)
        return None if row is None else self.metadata[self.metadata_index[row]]

    def get_shard_rows(self, number: int) -> IntArray:
        """Return the rows of the shards of all arrays with this metadata, shape (arrays, shards per array)."""
        return np.asarray(
            self.first_shard[self.rows_by_metadata[number], None] + np.arange(self.metadata[number].shard_count),
            np.int64,
        )

    def compute_shard_bytes(self) -> IntArray:
        """Return the number of bytes of each shard (not of its parent box)."""
        sizes = np.zeros(len(self.offset), np.int64)
        for number, form in enumerate(self.metadata):
            sizes[self.get_shard_rows(number)] = compute_shard_bytes(form)
        return sizes

    @property
    def nbytes(self) -> int:
        """Number of bytes of all arrays."""
        return sum(len(rows) * form.nbytes for rows, form in zip(self.rows_by_metadata, self.metadata, strict=True))

    def check_locations(self, file_sizes: Sequence[int]) -> None:
        """Check that every shard is inside its file.

        Args:
            file_sizes: Size of each file of the manifest (bytes).

        Raises:
            FormatError: A shard is outside of its file, or refers to a missing file.
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
    except OverflowError as error:  # from numpy: a malicious file may contain any number
        raise FormatError("impossible place of a shard", found=str(max(values, key=abs))[:80]) from error
