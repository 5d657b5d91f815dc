"""Rank record: one rank's report of its part of a save, and its JSON form for rank 0.

Files, shards and samples are columns of numbers, and leaf paths are numbered. All ranks of a pipeline stage have the
same arrays, except for rank-local ones. The first rank of the stage sends the names, and the others number them in the
same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from xla_ckpt.core.checksum import DigestArray, pack_digests, unpack_digest_array
from xla_ckpt.core.json_data import pack_ints, unpack_int_array
from xla_ckpt.core.manifest.arrays import ShardTable
from xla_ckpt.core.manifest.manifest import FileRecord
from xla_ckpt.core.manifest.manifest_json import dump_file_record, parse_file_record
from xla_ckpt.core.plan.rank_consistency import ArrayInfoByLeaf
from xla_ckpt.core.plan.save_plan import LeafShardTable
from xla_ckpt.core.sharding.box import BoolArray, BoxArray, IntArray


@dataclass(frozen=True, slots=True)
class ReplicaSample:
    """Fingerprints of a few bytes of a replicated leaf on one rank."""

    layout_fingerprint: int
    """Fingerprint of the positions of its pieces. Only samples of equal positions are compared."""

    content_fingerprint: int
    warn_only: bool = False
    """True if a difference only causes a warning (for a buffer)."""


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaSampleTable:
    """Many samples: a row per sample."""

    leaf: IntArray
    """Number of the leaf path."""

    layout_fingerprint: DigestArray
    content_fingerprint: DigestArray
    warn_only: BoolArray

    def __len__(self) -> int:
        return len(self.leaf)

    def to_json(self) -> list[Any]:
        """Return the samples as plain JSON."""
        digests = [pack_digests(column.tolist()) for column in (self.layout_fingerprint, self.content_fingerprint)]
        return [len(self), pack_ints(self.leaf), *digests, pack_ints(self.warn_only)]

    @classmethod
    def from_json(cls, json: Sequence[Any]) -> ReplicaSampleTable:
        """Create the table from the result of `to_json`."""
        count, leaf, place, content, loose = json
        return cls(
            unpack_int_array(leaf, count),
            unpack_digest_array(place, count),
            unpack_digest_array(content, count),
            unpack_int_array(loose, count).astype(np.bool_),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankRecord:
    """One rank's report of its part of a save."""

    rank: int
    files: tuple[FileRecord, ...]
    names: tuple[str, ...]
    """Leaf paths, in the order of their numbers. A record received from another rank only contains the names that the
    first rank of its stage does not report (see `resolve_names`)."""

    shared_count: int = 0
    """Number of leading names that the first rank of the stage reports instead of this one."""

    leaf: IntArray
    """Number of the leaf path of each shard."""

    shards: ShardTable
    """Written shards. Their file indices refer to `files`."""

    samples: ReplicaSampleTable
    """One sample per leaf and per set of ranks that hold the same parts of it."""

    arrays: ArrayInfoByLeaf
    aliases: Mapping[str, str]
    skeleton: Any
    objects: tuple[int, ...] = ()
    """Index into `files` of each pickled object, by the object's index in the skeleton."""

    parts: Mapping[str, str] = field(default_factory=dict)
    """Part of the state -> fingerprint of its plain values."""

    module_metadata: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Metadata of the state dicts in `skeleton`, as in `Manifest.module_metadata`."""

    @classmethod
    def from_shards(
        cls,
        shards: LeafShardTable,
        samples: Mapping[str, Sequence[ReplicaSample]] | None = None,
        *,
        common_leaves: Sequence[str] = (),
        reports_common: bool = True,
        **facts: Any,
    ) -> RankRecord:
        """Create the record of the shards and samples of a rank.

        Args:
            shards: Shards that the rank wrote.
            samples: Samples by leaf path.
            common_leaves: Leaf paths that all ranks of its stage have.
            reports_common: True if the record contains these names, because the rank is the first of its stage or has
                other arrays.
            facts: The other fields.
        """
        numbers = {name: number for number, name in enumerate(sorted(common_leaves))}
        leaf = [numbers.setdefault(name, len(numbers)) for name in shards.leaf]
        sampled = [(numbers.setdefault(name, len(numbers)), s) for name, of in (samples or {}).items() for s in of]
        return cls(
            names=tuple(numbers),
            shared_count=0 if reports_common else len(common_leaves),
            leaf=np.array(leaf, np.int64),
            shards=shards.shards,
            samples=ReplicaSampleTable(
                leaf=np.array([number for number, _ in sampled], np.int64),
                layout_fingerprint=np.array([sample.layout_fingerprint for _, sample in sampled], np.uint64),
                content_fingerprint=np.array([sample.content_fingerprint for _, sample in sampled], np.uint64),
                warn_only=np.array([sample.warn_only for _, sample in sampled], np.bool_),
            ),
            **facts,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain JSON, to send to rank 0."""
        return {
            "rank": self.rank,
            "files": [dump_file_record(file) for file in self.files],
            "names": self.names[self.shared_count :],
            "shared": self.shared_count,
            "shards": _pack_shards(self.leaf, self.shards),
            "samples": self.samples.to_json(),
            "arrays": self.arrays,
            "aliases": self.aliases,
            "skeleton": self.skeleton,
            "objects": self.objects,
            "parts": self.parts,
            "module_metadata": self.module_metadata,
        }

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> RankRecord:
        """Create the record from the result of `to_json`. Call `resolve_names` to add the common names."""
        leaf, shards = _unpack_shards(json["shards"])
        return cls(
            rank=json["rank"],
            files=tuple(map(parse_file_record, json["files"])),
            names=tuple(json["names"]),
            shared_count=json["shared"],
            leaf=leaf,
            shards=shards,
            samples=ReplicaSampleTable.from_json(json["samples"]),
            arrays={leaf: (dtype, tuple(shape), *more) for leaf, (dtype, shape, *more) in json["arrays"].items()},
            aliases=json["aliases"],
            skeleton=json["skeleton"],
            objects=tuple(json["objects"]),
            parts=json["parts"],
            module_metadata=json["module_metadata"],
        )

    def resolve_names(self, stage_leader: RankRecord) -> RankRecord:
        """Return the record with all names, including those that the first rank of the stage reported."""
        if not self.shared_count:
            return self
        common = stage_leader.names[: self.shared_count]
        return replace(self, names=(*common, *self.names) if self.names else common, shared_count=0)


def _pack_shards(leaf: IntArray, shards: ShardTable) -> list[Any]:
    """Return the columns as differences, which are repetitive: compressed they take a third of the size."""
    frames: list[IntArray | BoolArray] = []
    if shards.has_parent is not None and shards.parent is not None:
        frames = [shards.has_parent, *shards.parent.start.T, *shards.parent.stop.T]
    columns = [leaf, shards.file, shards.offset, *shards.box.start.T, *shards.box.stop.T, *frames]
    differences = np.diff(np.array(columns, np.int64), axis=1, prepend=0)
    return [shards.box.dims, bool(frames), differences.reshape(-1).tolist()]


def _unpack_shards(json: Sequence[Any]) -> tuple[IntArray, ShardTable]:
    dims, framed, differences = json
    rows = 3 + 2 * dims
    columns = np.array(differences, np.int64).reshape(rows + framed * (1 + 2 * dims), -1).cumsum(axis=1)
    box, of_frames = columns[3:rows], columns[rows:]
    return columns[0], ShardTable(
        box=BoxArray(box[:dims].T, box[dims:].T),
        file=columns[1],
        offset=columns[2],
        has_parent=of_frames[0].astype(np.bool_) if framed else None,
        parent=BoxArray(of_frames[1 : 1 + dims].T, of_frames[1 + dims :].T) if framed else None,
    )
