"""One payload file, planned: where the bytes of its regions come from, and what elements of which arrays they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from xla_ckpt.dtypes import DType
from xla_ckpt.files.codec import Codec
from xla_ckpt.lightweight import Columns, lightweight
from xla_ckpt.manifest.shards import Shard, ShardColumns
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.corners import Corners, Ints


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sources(Columns[RegionSource]):
    """Where the bytes of many regions come from: a row for each, with the fields of a `RegionSource`."""

    leaf: Sequence[str]
    shard: Ints
    offset: Ints
    nbytes: Ints

    @classmethod
    def of(cls, sources: Sequence[RegionSource]) -> Sources:
        """The columns of some sources."""
        if isinstance(sources, Sources):
            return sources
        numbers = np.array([(s.shard, s.offset, s.nbytes) for s in sources], np.int64).reshape(-1, 3)
        shard, offset, nbytes = numbers.T
        return cls(leaf=[source.leaf for source in sources], shard=shard, offset=offset, nbytes=nbytes)

    def __len__(self) -> int:
        return len(self.leaf)

    def row(self, number: int) -> RegionSource:
        shard, offset, nbytes = (int(column[number]) for column in (self.shard, self.offset, self.nbytes))
        return RegionSource(leaf=self.leaf[number], shard=shard, offset=offset, nbytes=nbytes)

    def rows(self, which: Ints) -> Sources:
        """Some of them."""
        return Sources(
            leaf=[self.leaf[row] for row in which.tolist()],
            shard=self.shard[which],
            offset=self.offset[which],
            nbytes=self.nbytes[which],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Entries(Columns[Entry]):
    """The shards of a file of which each is a region: a row for each."""

    leaf: Sequence[str]
    boxes: Sequence[Box]
    box: Ints
    """The index of each shard's box."""

    def __len__(self) -> int:
        return len(self.leaf)

    def row(self, number: int) -> Entry:
        return Entry(leaf=self.leaf[number], box=self.boxes[self.box[number]], region=number)

    def rows(self, which: Ints) -> Entries:
        """Some of them, in a file that has their regions alone."""
        return Entries(leaf=[self.leaf[row] for row in which.tolist()], boxes=self.boxes, box=self.box[which])


@dataclass(frozen=True, slots=True, eq=False)
class LeafShards:
    """Shards, and the leaf path of each."""

    leaf: Sequence[str]
    columns: ShardColumns

    @classmethod
    def of(cls, shards: Sequence[tuple[str, Shard]]) -> LeafShards:
        """The columns of some of them."""
        return cls([leaf for leaf, _ in shards], ShardColumns.of([shard for _, shard in shards]))

    def __len__(self) -> int:
        return len(self.leaf)

    @staticmethod
    def joined(many: Sequence[LeafShards]) -> LeafShards:
        """All of them, one after the other."""
        if len(many) < 2:
            return many[0] if many else LeafShards.of(())
        columns = ShardColumns.joined([shards.columns for shards in many], [0] * len(many))
        return LeafShards([leaf for shards in many for leaf in shards.leaf], columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """One payload file."""

    path: str
    """Relative to the tag directory."""

    codec: Codec
    """Where its regions lie, and what stands between them."""

    sources: Sequence[RegionSource] = ()
    """Bytes of each region."""

    entries: Sequence[Entry] = ()
    """What elements it holds. Regions may have more: padding."""

    folder: str | None = None
    """A directory that is made along with it, and may stay empty."""

    @property
    def data_bytes(self) -> int:
        """Bytes of all regions."""
        return sum(nbytes for _, nbytes in self.codec.places)

    def streamed(self) -> FilePlan:
        """The same file as it is written in the order of its bytes (see `Codec.streamed`)."""
        codec = self.codec.streamed()
        return self if codec is self.codec else replace(self, codec=codec)

    def minus(self, leaves: frozenset[str]) -> FilePlan | None:
        """The same file if the manifest finds `leaves` elsewhere; None if nothing else is in it.

        Their regions are left out. In a file that needs all of its regions they stay, and count as copies.
        """
        kept = np.array([i for i, source in enumerate(self.sources) if source.leaf not in leaves], np.int64)
        if len(kept) == len(self.sources):
            return self
        rest = self.only(kept)
        if rest is None:
            return replace(self, entries=tuple(replace(e, copy=e.copy or e.leaf in leaves) for e in self.entries))
        return rest if len(kept) else None

    def only(self, kept: Ints) -> FilePlan | None:
        """The same file with these of its regions alone, which ascend; None if it needs all of them."""
        codec = self.codec.without(frozenset(range(len(self.sources))).difference(kept.tolist()))
        if codec is None:
            return None
        entries = self.entries
        if isinstance(entries, Entries):
            entries = entries.rows(kept)
        else:
            number = {old: new for new, old in enumerate(kept.tolist())}
            entries = tuple(replace(e, region=number[e.region]) for e in entries if e.region in number)
        return replace(self, codec=codec, sources=Sources.of(self.sources).rows(kept), entries=entries)


def shards_of(files: Sequence[FilePlan]) -> LeafShards:
    """What the manifest finds in some files, which are numbered from 0."""
    columns, single = [], []
    for number, file in enumerate(files):
        places, entries = file.codec.places, file.entries
        if isinstance(entries, Entries):
            of_file = ShardColumns(
                box=Corners.of(entries.boxes).rows(entries.box),
                file=np.full(len(entries), number, np.int64),
                offset=np.array([offset for offset, _ in places], np.int64),
            )
            columns.append(LeafShards(entries.leaf, of_file))
        else:  # a layout may have a file for each array: no columns are made of a single shard
            single += [(e.leaf, Shard(e.box, number, places[e.region][0], e.frame)) for e in entries if not e.copy]
    return LeafShards.joined([*columns, LeafShards.of(single)] if single else columns)
