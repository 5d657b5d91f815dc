"""What one process writes: which bytes of which shard, into which file, at which offset.

Computed by every process alone, without asking anybody, from the leaves that it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from xla_ckpt.dtypes import DType
from xla_ckpt.files import safetensors as payload
from xla_ckpt.files.codec import Codec
from xla_ckpt.lightweight import lightweight
from xla_ckpt.manifest.records import FileRecord
from xla_ckpt.manifest.shards import Shard
from xla_ckpt.plan.leaf import Leaf, LocalShard
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.owners import HeldShard, owned
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


@lightweight(kw_only=True)
class RegionSource:
    """Where the bytes of a region come from."""

    leaf: str
    shard: int
    """Index into the leaf's local shards."""

    offset: int
    """Of the first byte in that shard's C-ordered memory."""

    nbytes: int


@lightweight(kw_only=True)
class Entry:
    """A shard that lies in a file."""

    leaf: str
    box: Box
    region: int
    """Index of the region that it is, or is a part of."""

    frame: Box | None = None
    """See `xla_ckpt.manifest.records.Shard.frame`."""

    copy: bool = False
    """Whether the manifest finds these elements elsewhere: some layouts store replicas."""

    cast: DType | None = None
    """In exports: the element type that they are written in, if they are stored in another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """One payload file."""

    path: str
    """Relative to the tag directory."""

    codec: Codec
    """Where its regions lie, and what stands between them."""

    sources: tuple[RegionSource, ...] = ()
    """Bytes of each region."""

    entries: tuple[Entry, ...] = ()
    """What elements it holds. Regions may have more: padding."""

    folder: str | None = None
    """A directory that is made along with it, and may stay empty."""

    @property
    def data_bytes(self) -> int:
        """Bytes of all regions."""
        return sum(nbytes for _, nbytes in self.codec.places)

    def shards(self, file: int) -> list[tuple[str, Shard]]:
        """(leaf path, shard) of what the manifest finds in it, if this is file number `file`."""
        places = self.codec.places
        return [(e.leaf, Shard(e.box, file, places[e.region][0], e.frame)) for e in self.entries if not e.copy]

    def minus(self, leaves: frozenset[str]) -> FilePlan | None:
        """The same file if the manifest finds `leaves` elsewhere; None if nothing else is in it.

        Their regions are left out. In a file that needs all of its regions they stay, and count as copies.
        """
        dropped = frozenset(i for i, source in enumerate(self.sources) if source.leaf in leaves)
        if not dropped:
            return self
        codec = self.codec.without(dropped)
        if codec is None:
            return replace(self, entries=tuple(replace(e, copy=e.copy or e.leaf in leaves) for e in self.entries))
        kept = [i for i in range(len(self.sources)) if i not in dropped]
        if not kept:
            return None
        number = {old: new for new, old in enumerate(kept)}
        return replace(
            self,
            codec=codec,
            sources=tuple(self.sources[i] for i in kept),
            entries=tuple(replace(e, region=number[e.region]) for e in self.entries if e.region in number),
        )


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


def own_boxes(leaves: Sequence[Leaf]) -> Iterator[OwnBox]:
    """What this process writes of the leaves that it holds, whatever the files are: their replicas write the rest."""
    shards = [(leaf, i, shard) for leaf in leaves for i, shard in enumerate(leaf.shards)]
    known: dict[tuple[int, int], HeldShard] = {}
    """By the identity of a shard, and the size of its elements: leaves that lie alike have their shards in common."""
    for leaf, _, shard in shards:
        key = id(shard), leaf.dtype.itemsize
        if key not in known:
            known[key] = _held(shard, leaf.dtype.itemsize)
    shards_held = [known[id(shard), leaf.dtype.itemsize] for leaf, _, shard in shards]
    for (leaf, i, shard), box in zip(shards, owned(shards_held), strict=True):
        if box is not None:
            itemsize = leaf.dtype.itemsize
            first = 0 if box is shard.box else runs(box, shard.box, itemsize).offset
            source = RegionSource(leaf=leaf.path, shard=i, offset=first, nbytes=box.size * itemsize)
            yield OwnBox(leaf=leaf, box=box, source=source, lane=shard.lane)


class Filing(Protocol):
    """What the files are called that regions are dealt out to, and how each is laid out."""

    def place(self, leaf: str) -> tuple[str, str]:
        """(directory, key in its files) of a leaf path; the directory of the tag itself is called ``""``."""

    def codec(self, path: str, regions: Sequence[payload.Region]) -> Codec:
        """The layout of a file."""


class NativeFiling:
    """Plain safetensors files, in a directory for each member of a training state."""

    def place(self, leaf: str) -> tuple[str, str]:
        """See `Filing`."""
        return item_and_name(leaf)

    def codec(self, path: str, regions: Sequence[payload.Region]) -> Codec:
        """See `Filing`."""
        return payload.Safetensors(tuple(regions))


def plan_save(
    leaves: Sequence[Leaf], rank: int = 0, world: int = 1, lanes: int = 1, *, filing: Filing | None = None
) -> SavePlan:
    """Decide what process `rank` of `world` writes, in files of which no two hold the same key twice.

    `lanes` is the number of local devices that the job has per process, when its leaves name several. By default the
    files are those of the native layout.
    """
    filing = NativeFiling() if filing is None else filing
    by_file: dict[tuple[str, int, int], list[tuple[str, RegionSource, payload.Region]]] = {}
    seen: dict[tuple[str, int], int] = {}
    for own_box in own_boxes(leaves):
        leaf = own_box.leaf
        item, name = filing.place(leaf.path)
        # Stock readers know one region per name and file: the second box of a name goes to a second file.
        again = seen.get((leaf.path, own_box.lane), 0)
        seen[leaf.path, own_box.lane] = again + 1
        region = payload.Region(name, leaf.dtype, own_box.box)
        by_file.setdefault((item, own_box.lane, again), []).append((leaf.path, own_box.source, region))
    files = []
    for (item, lane, again), unordered in sorted(by_file.items(), key=lambda kv: kv[0]):
        entries = [unordered[i] for i in payload.file_order([region for _, _, region in unordered])]
        name = _file_name(rank * lanes + lane, world * lanes, again)
        path = f"{item}/{name}" if item else name
        files.append(
            FilePlan(
                path=path,
                codec=filing.codec(path, [region for _, _, region in entries]),
                sources=tuple(source for _, source, _ in entries),
                entries=tuple(
                    Entry(leaf=leaf, box=region.box, region=i) for i, (leaf, _, region) in enumerate(entries)
                ),
            )
        )
    return SavePlan(tuple(files))


def _held(shard: LocalShard, itemsize: int) -> HeldShard:
    return HeldShard(
        box=shard.box,
        itemsize=itemsize,
        replica=shard.replica,
        replicas=shard.replicas,
        group=shard.group,
        together=shard.together,
    )


def _file_name(writer: int, writers: int, again: int) -> str:
    more = f"-{again + 1}" if again else ""
    return f"{writer + 1:05d}-of-{writers:05d}{more}.safetensors"


@dataclass(frozen=True, slots=True)
class Written:
    """What one process reports after its bytes are durable: the pure part of its record."""

    files: tuple[FileRecord, ...]
    shards: tuple[tuple[str, Shard], ...]
    """(leaf path, shard); shards name files by their index in `files`."""
