"""The manifest: what a tag holds and where its bytes are.

Values of these classes are proven: a `Manifest` that exists is consistent in itself (`manifest_json.parse` is the door
from untrusted bytes, and the `scan` functions of foreign layouts are the other). Whether the payload agrees with it is
found out by `engine.verify`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from xla_ckpt.dtypes import DType
from xla_ckpt.errors import FormatError, IncompatibleCheckpointError
from xla_ckpt.lightweight import lightweight
from xla_ckpt.manifest.digest import block_count
from xla_ckpt.manifest.shards import Shard, ShardColumns
from xla_ckpt.sharding.box import Box, overlapping_pair, tiles
from xla_ckpt.sharding.grid import Grid, fit_all, single
from xla_ckpt.tree import path as paths

FORMAT_VERSION = 1
"""The format version that this library writes; it reads this and all older ones."""


MAX_ELEMENTS = 1 << 56
"""The sizes of an array's dims, those of 0 left out, multiply to less: frameworks count bytes in 63 bits."""


MANY_BOXES = 1000
"""Of more boxes no two are looked for that overlap: that may take time in proportion to the square of their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The first line of a manifest: what a listing of tags needs, covered by a digest of its own."""

    tag: str
    """Name under which it was saved (a renamed directory answers to its new name)."""

    sequence: int
    """Commit number in its root directory, from 1; the newest tag has the greatest."""

    pinned: bool
    """Whether retention leaves it alone."""

    created: str
    """Time of the commit: UTC, ISO 8601."""

    version: int = FORMAT_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file of the tag."""

    path: str
    """Relative to the tag directory, with ``/``."""

    size: int
    """Bytes."""

    head: int
    """Number of bytes that no region holds. In the native format, and in files of pickles, they are the first ones."""

    digest: int
    """XXH3-64 of those bytes."""

    regions: tuple[tuple[int, int], ...] = ()
    """(offset, bytes) of each region, ascending, in files that do not hold the digests of their regions themselves."""

    digests: tuple[int, ...] = ()
    """Digests of the blocks of all `regions`."""

    def __post_init__(self) -> None:
        parts = self.path.split("/")
        if not self.path or any(p in ("", ".", "..") or "\\" in p or "\0" in p for p in parts):
            raise FormatError("a file of the manifest lies outside of its tag", file=self.path)
        try:
            self.path.encode(errors="surrogateescape")  # as python gives names that are no UTF-8 to the system
        except UnicodeEncodeError as error:
            raise FormatError("a file of the manifest has an impossible name", file=repr(self.path)[:80]) from error
        if not 0 <= self.head <= self.size:
            raise FormatError("impossible file size", file=self.path, found=f"size {self.size}, head {self.head}")
        if not self.regions:
            return
        at = 0
        for offset, nbytes in self.regions:
            if offset < at or nbytes < 1:
                raise FormatError("regions of a file overlap", file=self.path, found=f"{nbytes} bytes at {offset}")
            at = offset + nbytes
        if at > self.size or self.head + sum(nbytes for _, nbytes in self.regions) != self.size:
            raise FormatError("the regions of a file do not add up to it", file=self.path, expected=self.size)
        if len(self.digests) != sum(block_count(nbytes) for _, nbytes in self.regions):
            raise FormatError("a file has not a digest for each block", file=self.path, found=len(self.digests))

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(offset, bytes) of what `digest` covers."""
        if not self.regions:
            return ((0, self.head),)
        ends = [0, *(offset + nbytes for offset, nbytes in self.regions)]
        starts = [*(offset for offset, _ in self.regions), self.size]
        return tuple((a, b - a) for a, b in zip(ends, starts, strict=True) if b > a)


@lightweight(kw_only=True)
class ShardGrid:
    """Shards that form a grid; one file and one offset per cell."""

    grid: Grid
    files: tuple[int, ...]
    offsets: tuple[int, ...]
    frames: tuple[Box | None, ...] | None = None
    """The frame of each shard; None where no shard has one. The native layout has none."""

    def __post_init__(self) -> None:
        if not len(self.files) == len(self.offsets) == self.grid.cells:
            raise FormatError("a grid of shards has more cells than places", expected=self.grid.cells)

    def __iter__(self) -> Iterator[Shard]:
        for i in range(self.grid.cells):
            yield self._shard(i, self.grid.cell(i))

    def touching(self, box: Box) -> Iterator[Shard]:
        """The shards that share an element with `box`."""
        for i, cell in self.grid.touching(box):
            yield self._shard(i, cell)

    def _shard(self, i: int, cell: Box) -> Shard:
        return Shard(cell, self.files[i], self.offsets[i], None if self.frames is None else self.frames[i])


@lightweight(kw_only=True)
class ArrayRecord:
    """One array leaf: its type, its global shape, and every shard exactly once."""

    dtype: DType
    shape: tuple[int, ...]
    grids: tuple[ShardGrid, ...]
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

    def __post_init__(self) -> None:
        whole = Box.whole(self.shape)
        # Beside a dim without elements another one may have any size, of which no framework can make an array.
        if not whole.size and prod(max(n, 1) for n in self.shape) >= MAX_ELEMENTS:
            raise FormatError("impossible shape", found=str(list(self.shape))[:80])
        if len(self.grids) == 1 and self.grids[0].grid.whole == whole:
            return
        boxes = [g.grid.whole for g in self.grids]
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
        """Bytes of the whole array."""
        return Box.whole(self.shape).size * self.dtype.itemsize

    def __iter__(self) -> Iterator[Shard]:
        for grid in self.grids:
            yield from grid

    def only_shard(self, box: Box) -> Shard | None:
        """The shard that is `box`, if it is the only one of the array and has no frame: as of most arrays."""
        if len(self.grids) == 1:
            cell = self.grids[0]
            if cell.grid.cells == 1 and cell.frames is None and box.size and cell.grid.whole == box:
                return Shard(cell.grid.whole, cell.files[0], cell.offsets[0])
        return None

    def touching(self, box: Box) -> Iterator[Shard]:
        """The shards that share an element with `box`."""
        for grid in self.grids:
            yield from grid.touching(box)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownArray:
    """An array of a foreign layout that is stored, but of which nothing says how it was split."""

    problem: str
    """Why, as an error says it."""

    hint: str | None = None
    """What to do about it."""

    expected: str | None = None
    found: str | None = None

    dtype: DType | None = None
    """Element type of what the ranks have stored; None if it is no tensor on each of them."""

    shape: tuple[int, ...] | None = None
    """Shape of what each rank has stored."""

    tensors: int = 0
    """How many such tensors are stored, copies included. 0: it is not one array, but a whole part of the state."""

    @property
    def nbytes(self) -> int:
        """Bytes of all these tensors."""
        return 0 if self.dtype is None else self.tensors * Box.whole(self.shape or ()).size * self.dtype.itemsize

    def error(self, leaf: str) -> IncompatibleCheckpointError:
        """A new error each time: an error collects facts and frames on its way up, so it must not be raised twice."""
        stored = None if self.shape is None else f"{list(self.shape)} on each rank"
        return IncompatibleCheckpointError(
            self.problem, leaf=leaf, expected=self.expected, found=self.found or stored, hint=self.hint
        )

    @staticmethod
    def by_reason(unknown: Mapping[str, UnknownArray]) -> list[dict[str, UnknownArray]]:
        """Some unknown arrays by leaf path, in groups that have problem and hint in common."""
        groups: dict[tuple[str, str | None], dict[str, UnknownArray]] = {}
        for leaf, array in unknown.items():
            groups.setdefault((array.problem, array.hint), {})[leaf] = array
        return list(groups.values())


def array_record(
    dtype: DType, shape: tuple[int, ...], shards: Sequence[Shard] | ShardColumns, spec: Any = None
) -> ArrayRecord:
    """The record of an array that is stored in these shards, as one grid if they are one.

    Raises:
        FormatError: The shards do not hold every element exactly once.
    """
    spec = None if spec is None else _frozen(spec)
    if not isinstance(shards, ShardColumns):
        places = [shard for shard in shards if shard.box.size]
        if len(places) == 1 and places[0].frame is None:  # as of nearly all arrays
            return only_record(dtype, shape, places[0], spec)
        try:
            shards = ShardColumns.of(places)
        except OverflowError as error:  # of numpy's: a hostile file may name any number
            raise FormatError("impossible place of a shard", found=str(places)[:200]) from error
        frames: list[Box | None] | None = [shard.frame for shard in places]
    else:
        shards = shards.rows(np.flatnonzero((shards.box.stop > shards.box.start).all(axis=1)), len(shape))
        frames = shards.frames()
    files, offsets = shards.file.tolist(), shards.offset.tolist()
    grids = []
    for grid, order in fit_all(shards.box):
        of_cells = None if frames is None else tuple([frames[i] for i in order])
        grids.append(
            ShardGrid(
                grid=grid,
                files=tuple([files[i] for i in order]),
                offsets=tuple([offsets[i] for i in order]),
                frames=of_cells if of_cells is not None and any(frame is not None for frame in of_cells) else None,
            )
        )
    return ArrayRecord(dtype=dtype, shape=shape, grids=tuple(grids), spec=spec)


def only_record(dtype: DType, shape: tuple[int, ...], shard: Shard, spec: Any = None) -> ArrayRecord:
    """The record of an array that is stored in one shard, without a frame."""
    cell = ShardGrid(grid=single(shard.box), files=(shard.file,), offsets=(shard.offset,))
    return ArrayRecord(dtype=dtype, shape=shape, grids=(cell,), spec=spec)


def _frozen(spec: Any) -> Any:
    return tuple(map(_frozen, spec)) if isinstance(spec, list | tuple) else spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The index of one tag."""

    head: Head
    skeleton: Any
    """The state tree without its arrays, as typed JSON (see `xla_ckpt.tree`)."""

    arrays: Mapping[str, ArrayRecord]
    """Array leaves by leaf path."""

    files: tuple[FileRecord, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Leaf path of a shared array -> leaf path under which it is stored."""

    objects: tuple[int, ...] = ()
    """The file of each pickled object, by its index in the skeleton."""

    mesh: str | None = None
    """The mesh that it was saved from, as `Mesh.parse` reads it, or None. It is for people; nothing depends on it."""

    world: int = 1
    """Number of processes that saved it. It is for people, too."""

    unknown: Mapping[str, UnknownArray] = field(default_factory=dict)
    """In foreign layouts: arrays that are stored, but of which nothing says how they were split, by leaf path."""

    left_out: tuple[str, ...] = ()
    """In foreign layouts: leaf paths of arrays that the tag names, and whose bytes were never written."""

    def __post_init__(self) -> None:
        names = [f.path for f in self.files]
        if len(set(names)) != len(names):
            raise FormatError(
                "a file is listed twice", found=next(n for n, count in Counter(names).items() if count > 1)
            )
        for alias, target in self.aliases.items():
            if alias in self.arrays or target not in self.arrays:
                raise FormatError("a shared array points nowhere", leaf=alias, found=target)
        for number in self.objects:
            if not 0 <= number < len(self.files):
                raise FormatError("a pickled object lies in no file", found=number)
        sizes = [f.size for f in self.files]
        for leaf, record in self.arrays.items():
            for grid in record.grids:
                _check_places(leaf, record.dtype.itemsize, grid, sizes)

    def array(self, leaf: str) -> ArrayRecord | None:
        """The record of a leaf, shared ones included; None if there is no such leaf.

        Raises:
            IncompatibleCheckpointError: It is stored, but nothing says how it was split.
        """
        if leaf in self.unknown:
            raise self.unknown[leaf].error(leaf)
        return self.arrays.get(self.aliases.get(leaf, leaf))

    @property
    def divergent(self) -> tuple[str, ...]:
        """Leaf paths of the arrays whose replicas differed (see `ArrayRecord.divergent`)."""
        return tuple(leaf for leaf, record in self.arrays.items() if record.divergent)

    def divergence(self, leaves: Iterable[str] | None = None) -> str | None:
        """Which arrays have the bytes of a first replica, as a sentence; None if there are none.

        `leaves` are the leaf paths that are asked about, None all of them.
        """
        asked = None if leaves is None else {self.aliases.get(leaf, leaf) for leaf in leaves}
        differing = [leaf for leaf in self.divergent if asked is None or leaf in asked]
        if not differing:
            return None
        arrays = f"{len(differing)} array{'s' if len(differing) > 1 else ''}"
        return f"the replicas of {arrays} differed, and the bytes of the first are stored: {paths.listed(differing)}"

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, shared ones once."""
        return sum(record.nbytes for record in self.arrays.values())


@functools.lru_cache(maxsize=4096)
def _largest_cell(grid: Grid) -> int:
    """Elements of a cell that is as large as the largest in every dim."""
    return prod(max(b - a for a, b in pairwise(cuts)) for cuts in grid.cuts)


def _check_places(leaf: str, itemsize: int, grid: ShardGrid, sizes: list[int]) -> None:
    """Check that every shard of a grid lies inside of its file.

    Raises:
        FormatError: One does not.
    """
    # A cell as large as the largest in every dim. Where even that fits, the exact cell need not be worked out.
    largest = itemsize * _largest_cell(grid.grid)
    for i, (file, offset) in enumerate(zip(grid.files, grid.offsets, strict=True)):
        if not 0 <= file < len(sizes):
            raise FormatError("a shard lies in no file", leaf=leaf, found=file)
        frame = None if grid.frames is None else grid.frames[i]
        if frame is not None:
            if not frame.contains(grid.grid.cell(i)) or offset + frame.size * itemsize > sizes[file]:
                raise FormatError("a shard reaches past the end of its frame or file", leaf=leaf, found=str(frame))
        elif offset + largest > sizes[file] and offset + grid.grid.cell(i).size * itemsize > sizes[file]:
            raise FormatError("a shard reaches past the end of its file", leaf=leaf, found=f"offset {offset}")
