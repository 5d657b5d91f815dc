"""Save plan: the bytes of each shard that one process writes, with their files and offsets.

A `FilePlan` is one payload file: the source of the bytes of each region, and the array elements that they contain. Each
process computes its `SavePlan` from its own leaves, without communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.files.file_layout import FileLayout, RegionTable
from xla_ckpt.core.files.safetensors import SafetensorsFile
from xla_ckpt.core.lightweight import ColumnarSequence, slots_dataclass
from xla_ckpt.core.manifest.arrays import Shard, ShardTable
from xla_ckpt.core.manifest.manifest import FileRecord
from xla_ckpt.core.plan.leaf import ArrayLeaf, LeafTable, assign_owners
from xla_ckpt.core.sharding.box import Box, BoxArray, IntArray
from xla_ckpt.core.sharding.memory_layout import compute_runs
from xla_ckpt.core.tree import schema


@slots_dataclass(kw_only=True)
class RegionSource:
    """Source of the bytes of a region."""

    leaf: str
    shard_index: int
    """Index into the leaf's local shards."""

    offset: int
    """Byte offset in the C-ordered memory of that shard."""

    nbytes: int


@slots_dataclass(kw_only=True)
class FileEntry:
    """A shard in a file."""

    leaf: str
    box: Box
    region: int
    """Index of the region that contains the shard."""

    parent_box: Box | None = None
    """Parent box (see `xla_ckpt.core.manifest.arrays.Shard`)."""

    is_copy: bool = False
    """True if the manifest refers to another copy of these elements, because some layouts store replicas."""

    cast: DType | None = None
    """Only in exports: dtype in the file, if it differs from the stored one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RegionSourceTable(ColumnarSequence[RegionSource]):
    """Sources of many regions: a row per region, with the fields of `RegionSource`."""

    leaf: Sequence[str]
    shard_index: IntArray
    offset: IntArray
    nbytes: IntArray

    @classmethod
    def from_sources(cls, sources: Sequence[RegionSource]) -> RegionSourceTable:
        """Create the columns from a sequence of sources."""
        if isinstance(sources, RegionSourceTable):
            return sources
        numbers = np.array([(s.shard_index, s.offset, s.nbytes) for s in sources], np.int64).reshape(-1, 3)
        shard, offset, nbytes = numbers.T
        return cls(leaf=[source.leaf for source in sources], shard_index=shard, offset=offset, nbytes=nbytes)

    def __len__(self) -> int:
        return len(self.leaf)

    def get_row(self, index: int) -> RegionSource:
        shard, offset, nbytes = (int(column[index]) for column in (self.shard_index, self.offset, self.nbytes))
        return RegionSource(leaf=self.leaf[index], shard_index=shard, offset=offset, nbytes=nbytes)

    def select(self, rows: IntArray) -> RegionSourceTable:
        """Return some of the sources."""
        return RegionSourceTable(
            leaf=[self.leaf[row] for row in rows.tolist()],
            shard_index=self.shard_index[rows],
            offset=self.offset[rows],
            nbytes=self.nbytes[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FileEntryTable(ColumnarSequence[FileEntry]):
    """Shards of a file in which each region is a shard: a row per shard."""

    leaf: Sequence[str]
    distinct_boxes: Sequence[Box]
    box_index: IntArray
    """Index into `distinct_boxes`, per shard."""

    def __len__(self) -> int:
        return len(self.leaf)

    def get_row(self, index: int) -> FileEntry:
        return FileEntry(leaf=self.leaf[index], box=self.distinct_boxes[self.box_index[index]], region=index)

    def select(self, rows: IntArray) -> FileEntryTable:
        """Return the entries of a file that contains only these regions."""
        return FileEntryTable(
            leaf=[self.leaf[row] for row in rows.tolist()],
            distinct_boxes=self.distinct_boxes,
            box_index=self.box_index[rows],
        )


@dataclass(frozen=True, slots=True, eq=False)
class LeafShardTable:
    """Shards with their leaf paths."""

    leaf: Sequence[str]
    shards: ShardTable

    @classmethod
    def from_shards(cls, shards: Sequence[tuple[str, Shard]]) -> LeafShardTable:
        """Create the columns from (leaf path, shard) pairs."""
        return cls([leaf for leaf, _ in shards], ShardTable.from_shards([shard for _, shard in shards]))

    def __len__(self) -> int:
        return len(self.leaf)

    @staticmethod
    def concatenate(tables: Sequence[LeafShardTable]) -> LeafShardTable:
        """Concatenate several tables."""
        if len(tables) < 2:
            return tables[0] if tables else LeafShardTable.from_shards(())
        columns = ShardTable.concatenate([shards.shards for shards in tables], [0] * len(tables))
        return LeafShardTable([leaf for shards in tables for leaf in shards.leaf], columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """Plan of one payload file."""

    path: str
    """Path relative to the checkpoint directory."""

    layout: FileLayout
    """Positions of the regions, and the bytes between them."""

    sources: Sequence[RegionSource] = ()
    """Source of each region."""

    entries: Sequence[FileEntry] = ()
    """Shards in the file. Regions may also contain padding."""

    directory: str | None = None
    """Directory that is created with the file, and may stay empty."""

    @property
    def data_bytes(self) -> int:
        """Number of bytes of all regions."""
        return sum(nbytes for _, nbytes in self.layout.region_ranges)

    def to_streaming(self) -> FilePlan:
        """Return the plan with the file written sequentially (see `FileLayout.to_streaming`)."""
        codec = self.layout.to_streaming()
        return self if codec is self.layout else replace(self, layout=codec)

    def exclude_leaves(self, leaves: frozenset[str]) -> FilePlan | None:
        """Return the plan without these leaves, which the manifest finds elsewhere; None if the file has no others.

        Their regions are removed. If the format needs all regions, they are kept and marked as copies.
        """
        kept = np.array([i for i, source in enumerate(self.sources) if source.leaf not in leaves], np.int64)
        if len(kept) == len(self.sources):
            return self
        rest = self.select_regions(kept)
        if rest is None:
            return replace(self, entries=tuple(replace(e, is_copy=e.is_copy or e.leaf in leaves) for e in self.entries))
        return rest if len(kept) else None

    def select_regions(self, regions: IntArray) -> FilePlan | None:
        """Return the plan with only these regions (ascending), or None if the format needs all regions."""
        codec = self.layout.exclude_regions(frozenset(range(len(self.sources))).difference(regions.tolist()))
        if codec is None:
            return None
        entries = self.entries
        if isinstance(entries, FileEntryTable):
            entries = entries.select(regions)
        else:
            number = {old: new for new, old in enumerate(regions.tolist())}
            entries = tuple(replace(e, region=number[e.region]) for e in entries if e.region in number)
        return replace(
            self, layout=codec, sources=RegionSourceTable.from_sources(self.sources).select(regions), entries=entries
        )


def collect_shards(files: Sequence[FilePlan]) -> LeafShardTable:
    """Return the shards in a sequence of files that the manifest refers to, with files numbered from 0."""
    columns, single = [], []
    for number, file in enumerate(files):
        places, entries = file.layout.region_ranges, file.entries
        if isinstance(entries, FileEntryTable):
            of_file = ShardTable(
                box=BoxArray.from_boxes(entries.distinct_boxes).select(entries.box_index),
                file=np.full(len(entries), number, np.int64),
                offset=np.array([offset for offset, _ in places], np.int64),
            )
            columns.append(LeafShardTable(entries.leaf, of_file))
        else:  # a layout may have a file per array: columns of a single shard would be slow
            single += [
                (e.leaf, Shard(e.box, number, places[e.region][0], e.parent_box)) for e in entries if not e.is_copy
            ]
    return LeafShardTable.concatenate([*columns, LeafShardTable.from_shards(single)] if single else columns)


DEFAULT_ITEM = "tree"
"""Payload directory of arrays that belong to no member of a training state. Each member has a directory of the same
name."""


def get_item_and_key(leaf: str) -> tuple[str, str]:
    """Return the payload directory and the key in its files for a leaf path.

    >>> get_item_and_key("model/layers.0.weight"), get_item_and_key("params/w")
    (('model', 'layers.0.weight'), ('tree', 'params/w'))
    """
    first, slash, below = leaf.partition("/")
    item, name = (first, below) if slash and first in schema.MEMBERS else (DEFAULT_ITEM, leaf)
    return item, name if name and name != "__metadata__" else "~" + name


@dataclass(frozen=True, slots=True)
class SavePlan:
    """All files that one process writes."""

    files: tuple[FilePlan, ...]

    @property
    def nbytes(self) -> int:
        """Number of array bytes that this process writes."""
        return sum(f.data_bytes for f in self.files)

    @property
    def shard_ranges(self) -> dict[tuple[str, int], tuple[int, int]]:
        """(leaf path, shard index) -> first byte that this process writes of the shard, and one past the last."""
        bounds: dict[tuple[str, int], tuple[int, int]] = {}
        for file in self.files:
            for source in file.sources:
                low, high = bounds.get((source.leaf, source.shard_index), (source.offset, source.offset))
                stop = source.offset + source.nbytes
                bounds[source.leaf, source.shard_index] = min(low, source.offset), max(high, stop)
        return bounds

    def to_streaming(self) -> SavePlan:
        """Return the plan for a storage whose files are written sequentially."""
        return SavePlan(tuple(file.to_streaming() for file in self.files))

    def exclude_leaves(self, leaves: frozenset[str]) -> SavePlan:
        """Return the plan without `leaves`, which processes outside of this plan store.

        The assignment of the other leaves does not change, so each source is also in this plan, and a snapshot for this
        plan contains all bytes that are needed. The processes of this plan must agree about `leaves`.
        """
        kept = (file.exclude_leaves(leaves) for file in self.files)
        return SavePlan(tuple(file for file in kept if file is not None))


@slots_dataclass(kw_only=True)
class OwnedRegion:
    """A region of an array that this process writes."""

    leaf: ArrayLeaf
    box: Box
    source: RegionSource
    """Source of its bytes."""

    local_device: int
    """Index of the local device that holds it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnedRegionTable(ColumnarSequence[OwnedRegion]):
    """Regions that a process writes: a row per region. Regions with equal shards share one entry of `kinds`."""

    leaves: LeafTable
    leaf: IntArray
    """Row of the leaf, per region."""

    shard_index: IntArray
    """Index into the leaf's local shards, per region."""

    kinds: Sequence[tuple[DType, Box]]
    """(dtype, region of the global array) per kind."""

    kind: IntArray
    offset: IntArray
    """Byte offset in the shard's C-ordered memory, per kind."""

    local_device: IntArray
    """Index of the local device that holds it, per kind."""

    def __len__(self) -> int:
        return len(self.leaf)

    def get_row(self, index: int) -> OwnedRegion:
        form, leaf = int(self.kind[index]), self.leaves[int(self.leaf[index])]
        dtype, box = self.kinds[form]
        nbytes = box.size * dtype.itemsize
        source = RegionSource(
            leaf=leaf.path, shard_index=int(self.shard_index[index]), offset=int(self.offset[form]), nbytes=nbytes
        )
        return OwnedRegion(leaf=leaf, box=box, source=source, local_device=int(self.local_device[form]))


def assign_regions(leaves: Sequence[ArrayLeaf], *, split: bool = True) -> OwnedRegionTable:
    """Assign regions of the leaves to this process, independent of files. Its replicas write the rest.

    Args:
        leaves: Leaves of this process.
        split: True to split large shards among their replicas. Otherwise one replica writes each shard whole.
    """
    leaves = LeafTable.from_leaves(leaves)
    kinds = [(dtype, shard) for dtype, holding in leaves.kinds for shard in holding.shards]
    counts = np.array([len(holding.shards) for _, holding in leaves.kinds], np.int64)
    of_leaf = counts[leaves.kind]
    leaf = np.repeat(np.arange(len(leaves)), of_leaf)
    shard = np.arange(len(leaf)) - (np.cumsum(of_leaf) - of_leaf)[leaf]
    kind = (np.cumsum(counts) - counts)[leaves.kind][leaf] + shard
    parts, rows = assign_owners([(shard, dtype.itemsize) for dtype, shard in kinds], kind, split=split)
    forms = [(dtype, part or shard.box) for (dtype, shard), part in zip(kinds, parts, strict=True)]
    offsets = [
        0 if box is shard.box else compute_runs(box, shard.box, dtype.itemsize).offset
        for (_, shard), (dtype, box) in zip(kinds, forms, strict=True)
    ]
    return OwnedRegionTable(
        leaves=leaves,
        leaf=leaf[rows],
        shard_index=shard[rows],
        kinds=forms,
        kind=kind[rows],
        offset=np.array(offsets, np.int64),
        local_device=np.array([shard.local_device for _, shard in kinds], np.int64),
    )


class FileNaming(Protocol):
    """Names and layouts of the files of a save."""

    def place(self, leaf: str) -> tuple[str, str]:
        """Return (directory, key in its files) of a leaf path. ``""`` is the checkpoint directory itself."""

    def create_layout(self, path: str, regions: RegionTable) -> FileLayout:
        """Create the layout of a file."""


class NativeFileNaming:
    """Plain safetensors files, in a directory per member of a training state."""

    def place(self, leaf: str) -> tuple[str, str]:
        return get_item_and_key(leaf)

    def create_layout(self, path: str, regions: RegionTable) -> FileLayout:
        return SafetensorsFile(regions)


def plan_save(
    leaves: Sequence[ArrayLeaf],
    rank: int = 0,
    world_size: int = 1,
    local_devices: int = 1,
    *,
    file_naming: FileNaming | None = None,
) -> SavePlan:
    """Plan the files that process `rank` of `world_size` writes. No file contains the same key twice.

    Args:
        leaves: Leaves of this process.
        rank: Rank of this process.
        world_size: Number of processes.
        local_devices: Number of local devices per process, if the leaves name several.
        file_naming: Names and layouts of the files. Default: the native layout.
    """
    file_naming = NativeFileNaming() if file_naming is None else file_naming
    own = assign_regions(leaves)
    paths = [own.leaves.paths[row] for row in own.leaf.tolist()]
    places = [file_naming.place(path) for path in paths]
    items = sorted({item for item, _ in places})
    number = {item: i for i, item in enumerate(items)}
    item = np.array([number[item] for item, _ in places], np.int64)
    lane = own.local_device[own.kind]
    # Other safetensors readers support one region per name and file, so the second box of a name goes to a second file.
    again = _count_previous(own.leaf * (lane.max(initial=0) + 1) + lane)
    width = np.array([dtype.itemsize for dtype, _ in own.kinds], np.int64)[own.kind]
    order = np.lexsort((-width, again, lane, item))  # large dtypes first, so that all are aligned
    keys = np.array([item, lane, again])[:, order]
    begins = np.flatnonzero((np.diff(keys, prepend=-1) != 0).any(axis=0))
    files = []
    for of_file, rows in zip(keys[:, begins].T.tolist(), np.split(order, begins)[1:], strict=True):
        of_item, of_lane, times = of_file
        name = _format_file_name(rank * local_devices + of_lane, world_size * local_devices, times)
        path = f"{items[of_item]}/{name}" if items[of_item] else name
        numbers, form = rows.tolist(), own.kind[rows]
        regions = RegionTable([places[row][1] for row in numbers], own.kinds, form)
        leaf = [paths[row] for row in numbers]
        files.append(
            FilePlan(
                path=path,
                layout=file_naming.create_layout(path, regions),
                sources=RegionSourceTable(
                    leaf=leaf, shard_index=own.shard_index[rows], offset=own.offset[form], nbytes=regions.nbytes
                ),
                entries=FileEntryTable(leaf=leaf, distinct_boxes=[box for _, box in own.kinds], box_index=form),
            )
        )
    return SavePlan(tuple(files))


def _count_previous(values: IntArray) -> IntArray:
    """Return, for each value, the number of equal values before it.

    >>> _count_previous(np.array([7, 5, 7, 7])).tolist()
    [0, 0, 1, 2]
    """
    order = np.argsort(values, kind="stable")
    first = np.searchsorted(values[order], values[order])
    times = np.empty_like(values)
    times[order] = np.arange(len(values)) - first
    return times


def _format_file_name(writer: int, writers: int, repeat: int) -> str:
    more = f"-{repeat + 1}" if repeat else ""
    return f"{writer + 1:05d}-of-{writers:05d}{more}.safetensors"


@dataclass(frozen=True, slots=True)
class WriteResult:
    """One process's report after its bytes are durable: the pure part of its record."""

    files: tuple[FileRecord, ...]
    shards: LeafShardTable
    """Written shards. Their file indices refer to `files`."""

    @classmethod
    def from_records(cls, plans: Sequence[FilePlan], records: Sequence[FileRecord]) -> WriteResult:
        """Create the result of writing files as planned."""
        return cls(tuple(records), collect_shards(plans))

    def add_shared(self, other: WriteResult) -> WriteResult:
        """Return the result with reused files added."""
        if not other.files:
            return self
        moved = replace(other.shards.shards, file=other.shards.shards.file + len(self.files))
        shards = LeafShardTable.concatenate([self.shards, LeafShardTable(other.shards.leaf, moved)])
        return WriteResult((*self.files, *other.files), shards)
