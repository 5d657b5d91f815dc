"""What one process writes: which bytes of which shard, into which file, at which offset.

Computed by every process alone, without asking anybody, from the leaves that it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from xla_ckpt.dtypes import DType
from xla_ckpt.files.codec import Codec
from xla_ckpt.files.regions import Regions
from xla_ckpt.files.safetensors import Safetensors
from xla_ckpt.lightweight import Columns, lightweight
from xla_ckpt.manifest.records import FileRecord
from xla_ckpt.plan.file_plan import Entries, FilePlan, LeafShards, RegionSource, Sources, shards_of
from xla_ckpt.plan.leaf import Leaf, Leaves
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.corners import Ints
from xla_ckpt.sharding.owners import owned
from xla_ckpt.sharding.ranges import runs
from xla_ckpt.tree import schema

REST_ITEM = "tree"
"""Payload directory of arrays that belong to no member of a training state. Each member has one of its own name."""


def item_and_name(leaf: str) -> tuple[str, str]:
    """Payload directory and key in its files for a leaf path.

    >>> item_and_name("model/layers.0.weight"), item_and_name("params/w")
    (('model', 'layers.0.weight'), ('tree', 'params/w'))
    """
    first, slash, below = leaf.partition("/")
    item, name = (first, below) if slash and first in schema.MEMBERS else (REST_ITEM, leaf)
    return item, name if name and name != "__metadata__" else "~" + name


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Everything that one process writes."""

    files: tuple[FilePlan, ...]

    @property
    def nbytes(self) -> int:
        """Array bytes that this process writes."""
        return sum(f.data_bytes for f in self.files)

    @property
    def extents(self) -> dict[tuple[str, int], tuple[int, int]]:
        """First byte that this process writes of each shard (leaf path, index), and the one behind the last."""
        bounds: dict[tuple[str, int], tuple[int, int]] = {}
        for file in self.files:
            for source in file.sources:
                low, high = bounds.get((source.leaf, source.shard), (source.offset, source.offset))
                stop = source.offset + source.nbytes
                bounds[source.leaf, source.shard] = min(low, source.offset), max(high, stop)
        return bounds

    def streamed(self) -> SavePlan:
        """The same for a storage whose files are written in the order of their bytes."""
        return SavePlan(tuple(file.streamed() for file in self.files))

    def minus(self, leaves: frozenset[str]) -> SavePlan:
        """What this process writes if other processes, which did not share in this plan, store `leaves`.

        Nobody's part of the other leaves changes, and so each of its sources is one of this plan's: a snapshot that
        was taken for this plan has all bytes that it needs. The processes of this plan must agree about `leaves`.
        """
        kept = (file.minus(leaves) for file in self.files)
        return SavePlan(tuple(file for file in kept if file is not None))


@lightweight(kw_only=True)
class OwnBox:
    """A region of an array that this process writes."""

    leaf: Leaf
    box: Box
    source: RegionSource
    """Its bytes."""

    lane: int
    """Which local device holds it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnBoxes(Columns[OwnBox]):
    """What a process writes of its leaves: a row for each region. Those that lie alike have a form in common."""

    leaves: Leaves
    leaf: Ints
    """The row of its leaf."""

    shard: Ints
    """Index into the leaf's local shards."""

    forms: Sequence[tuple[DType, Box]]
    """Element type, and region of the global array."""

    form: Ints
    offset: Ints
    """Of its first byte in the shard's C-ordered memory, for each form."""

    lane: Ints
    """Which local device holds it, for each form."""

    def __len__(self) -> int:
        return len(self.leaf)

    def row(self, number: int) -> OwnBox:
        form, leaf = int(self.form[number]), self.leaves[int(self.leaf[number])]
        dtype, box = self.forms[form]
        nbytes = box.size * dtype.itemsize
        source = RegionSource(
            leaf=leaf.path, shard=int(self.shard[number]), offset=int(self.offset[form]), nbytes=nbytes
        )
        return OwnBox(leaf=leaf, box=box, source=source, lane=int(self.lane[form]))


def own_boxes(leaves: Sequence[Leaf], *, cut: bool = True) -> OwnBoxes:
    """What this process writes of the leaves that it holds, whatever the files are: their replicas write the rest.

    `cut`: whether the replicas of a large shard split it; else each shard is written whole by one of them.
    """
    leaves = Leaves.of(leaves)
    kinds = [(dtype, shard) for dtype, holding in leaves.forms for shard in holding.shards]
    counts = np.array([len(holding.shards) for _, holding in leaves.forms], np.int64)
    of_leaf = counts[leaves.form]
    leaf = np.repeat(np.arange(len(leaves)), of_leaf)
    shard = np.arange(len(leaf)) - (np.cumsum(of_leaf) - of_leaf)[leaf]
    kind = (np.cumsum(counts) - counts)[leaves.form][leaf] + shard
    parts, rows = owned([(shard, dtype.itemsize) for dtype, shard in kinds], kind, cut=cut)
    forms = [(dtype, part or shard.box) for (dtype, shard), part in zip(kinds, parts, strict=True)]
    offsets = [
        0 if box is shard.box else runs(box, shard.box, dtype.itemsize).offset
        for (_, shard), (dtype, box) in zip(kinds, forms, strict=True)
    ]
    return OwnBoxes(
        leaves=leaves,
        leaf=leaf[rows],
        shard=shard[rows],
        forms=forms,
        form=kind[rows],
        offset=np.array(offsets, np.int64),
        lane=np.array([shard.lane for _, shard in kinds], np.int64),
    )


class Filing(Protocol):
    """What the files are called that regions are dealt out to, and how each is laid out."""

    def place(self, leaf: str) -> tuple[str, str]:
        """(directory, key in its files) of a leaf path; the directory of the tag itself is called ``""``."""

    def codec(self, path: str, regions: Regions) -> Codec:
        """The layout of a file."""


class NativeFiling:
    """Plain safetensors files, in a directory for each member of a training state."""

    def place(self, leaf: str) -> tuple[str, str]:
        return item_and_name(leaf)

    def codec(self, path: str, regions: Regions) -> Codec:
        return Safetensors(regions)


def plan_save(
    leaves: Sequence[Leaf], rank: int = 0, world: int = 1, lanes: int = 1, *, filing: Filing | None = None
) -> SavePlan:
    """Decide what process `rank` of `world` writes, in files of which no two hold the same key twice.

    `lanes` is the number of local devices that the job has per process, when its leaves name several. By default the
    files are those of the native layout.
    """
    filing = NativeFiling() if filing is None else filing
    own = own_boxes(leaves)
    paths = [own.leaves.paths[row] for row in own.leaf.tolist()]
    places = [filing.place(path) for path in paths]
    items = sorted({item for item, _ in places})
    number = {item: i for i, item in enumerate(items)}
    item = np.array([number[item] for item, _ in places], np.int64)
    lane = own.lane[own.form]
    # Stock readers know one region per name and file: the second box of a name goes to a second file.
    again = _times_before(own.leaf * (lane.max(initial=0) + 1) + lane)
    width = np.array([dtype.itemsize for dtype, _ in own.forms], np.int64)[own.form]
    order = np.lexsort((-width, again, lane, item))  # wide element types first, so that all are aligned
    keys = np.array([item, lane, again])[:, order]
    begins = np.flatnonzero((np.diff(keys, prepend=-1) != 0).any(axis=0))
    files = []
    for of_file, rows in zip(keys[:, begins].T.tolist(), np.split(order, begins)[1:], strict=True):
        of_item, of_lane, times = of_file
        name = _file_name(rank * lanes + of_lane, world * lanes, times)
        path = f"{items[of_item]}/{name}" if items[of_item] else name
        numbers, form = rows.tolist(), own.form[rows]
        regions = Regions([places[row][1] for row in numbers], own.forms, form)
        leaf = [paths[row] for row in numbers]
        files.append(
            FilePlan(
                path=path,
                codec=filing.codec(path, regions),
                sources=Sources(leaf=leaf, shard=own.shard[rows], offset=own.offset[form], nbytes=regions.nbytes),
                entries=Entries(leaf=leaf, boxes=[box for _, box in own.forms], box=form),
            )
        )
    return SavePlan(tuple(files))


def _times_before(values: Ints) -> Ints:
    """How often each value stands before itself.

    >>> _times_before(np.array([7, 5, 7, 7])).tolist()
    [0, 0, 1, 2]
    """
    order = np.argsort(values, kind="stable")
    first = np.searchsorted(values[order], values[order])
    times = np.empty_like(values)
    times[order] = np.arange(len(values)) - first
    return times


def _file_name(writer: int, writers: int, again: int) -> str:
    more = f"-{again + 1}" if again else ""
    return f"{writer + 1:05d}-of-{writers:05d}{more}.safetensors"


@dataclass(frozen=True, slots=True)
class Written:
    """What one process reports after its bytes are durable: the pure part of its record."""

    files: tuple[FileRecord, ...]
    shards: LeafShards
    """They name files by their index in `files`."""

    @classmethod
    def of(cls, plans: Sequence[FilePlan], records: Sequence[FileRecord]) -> Written:
        """What is reported of files that were written as planned."""
        return cls(tuple(records), shards_of(plans))

    def and_shared(self, other: Written) -> Written:
        """This, and what was there already."""
        if not other.files:
            return self
        moved = replace(other.shards.columns, file=other.shards.columns.file + len(self.files))
        shards = LeafShards.joined([self.shards, LeafShards(other.shards.leaf, moved)])
        return Written((*self.files, *other.files), shards)
