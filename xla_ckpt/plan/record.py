"""What one rank reports of its part of a save, and how it travels to rank 0. Pure.

What it wrote and sampled is columns of numbers, in which leaf paths have numbers, too. All ranks of a pipeline stage
have the same arrays, but for those that they have of their own: the first rank of the stage says the names, and the
others number them in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from xla_ckpt.manifest.digest import DigestColumn, digest_column, pack_digests
from xla_ckpt.manifest.intseq import pack_ints, unpack_column
from xla_ckpt.manifest.manifest_json import file_json, parse_file
from xla_ckpt.manifest.records import FileRecord
from xla_ckpt.manifest.shards import ShardColumns
from xla_ckpt.plan.file_plan import LeafShards
from xla_ckpt.plan.same_arrays import Types
from xla_ckpt.sharding.corners import Corners, Flags, Ints


@dataclass(frozen=True, slots=True)
class Sample:
    """A few bytes of a replicated leaf on one rank, as fingerprints."""

    place: int
    """That of where its pieces lie: only equal places are compared."""

    content: int
    loose: bool = False
    """Whether a difference is worth a warning only (a buffer)."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleColumns:
    """Many samples: a row for each."""

    leaf: Ints
    """Number of the leaf path."""

    place: DigestColumn
    content: DigestColumn
    loose: Flags

    def __len__(self) -> int:
        return len(self.leaf)

    def to_json(self) -> list[Any]:
        """As plain JSON."""
        digests = [pack_digests(column.tolist()) for column in (self.place, self.content)]
        return [len(self), pack_ints(self.leaf), *digests, pack_ints(self.loose)]

    @classmethod
    def from_json(cls, json: Sequence[Any]) -> SampleColumns:
        """What `to_json` described."""
        count, leaf, place, content, loose = json
        return cls(
            unpack_column(leaf, count),
            digest_column(place, count),
            digest_column(content, count),
            unpack_column(loose, count).astype(np.bool_),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Record:
    """What one rank reports of its part of a save."""

    rank: int
    files: tuple[FileRecord, ...]
    names: tuple[str, ...]
    """Leaf paths, in the order of their numbers. In a record that comes from another rank, those alone that the first
    rank of its stage does not say (see `named_by`)."""

    shared: int = 0
    """How many of the first names the first rank of the stage says, and this one does not."""

    leaf: Ints
    """Number of the leaf path of each shard."""

    shards: ShardColumns
    """They name files by their index in `files`."""

    samples: SampleColumns
    """One for each leaf and set of ranks that hold the same parts of it."""

    arrays: Types
    aliases: Mapping[str, str]
    skeleton: Any
    objects: tuple[int, ...] = ()
    """Index into `files` of each pickled object, as the skeleton numbers them."""

    parts: Mapping[str, str] = field(default_factory=dict)
    """Part of the state -> fingerprint of its plain values."""

    module_metadata: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """As `Manifest.module_metadata`, of the state dicts in `skeleton`."""

    @classmethod
    def of(
        cls,
        shards: LeafShards,
        samples: Mapping[str, Sequence[Sample]] | None = None,
        *,
        common: Sequence[str] = (),
        says_common: bool = True,
        **facts: Any,
    ) -> Record:
        """The record of what a rank wrote and sampled, by leaf path.

        Args:
            shards: What it wrote.
            samples: By leaf path.
            common: Leaf paths that all ranks of its stage have.
            says_common: Whether it says these names, since it is the first of its stage, or has other arrays.
            facts: The other fields.
        """
        numbers = {name: number for number, name in enumerate(sorted(common))}
        leaf = [numbers.setdefault(name, len(numbers)) for name in shards.leaf]
        sampled = [(numbers.setdefault(name, len(numbers)), s) for name, of in (samples or {}).items() for s in of]
        return cls(
            names=tuple(numbers),
            shared=0 if says_common else len(common),
            leaf=np.array(leaf, np.int64),
            shards=shards.columns,
            samples=SampleColumns(
                leaf=np.array([number for number, _ in sampled], np.int64),
                place=np.array([sample.place for _, sample in sampled], np.uint64),
                content=np.array([sample.content for _, sample in sampled], np.uint64),
                loose=np.array([sample.loose for _, sample in sampled], np.bool_),
            ),
            **facts,
        )

    def to_json(self) -> dict[str, Any]:
        """As plain JSON, for the way to rank 0."""
        return {
            "rank": self.rank,
            "files": [file_json(file) for file in self.files],
            "names": self.names[self.shared :],
            "shared": self.shared,
            "shards": _shards_json(self.leaf, self.shards),
            "samples": self.samples.to_json(),
            "arrays": self.arrays,
            "aliases": self.aliases,
            "skeleton": self.skeleton,
            "objects": self.objects,
            "parts": self.parts,
            "module_metadata": self.module_metadata,
        }

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> Record:
        """The record that `to_json` described, before it is `named_by` another one."""
        leaf, shards = _shards_of(json["shards"])
        return cls(
            rank=json["rank"],
            files=tuple(map(parse_file, json["files"])),
            names=tuple(json["names"]),
            shared=json["shared"],
            leaf=leaf,
            shards=shards,
            samples=SampleColumns.from_json(json["samples"]),
            arrays={leaf: (dtype, tuple(shape), *more) for leaf, (dtype, shape, *more) in json["arrays"].items()},
            aliases=json["aliases"],
            skeleton=json["skeleton"],
            objects=tuple(json["objects"]),
            parts=json["parts"],
            module_metadata=json["module_metadata"],
        )

    def named_by(self, first: Record) -> Record:
        """The record with all of its names, of which the first rank of the stage has said some."""
        if not self.shared:
            return self
        common = first.names[: self.shared]
        return replace(self, names=(*common, *self.names) if self.names else common, shared=0)


def _shards_json(leaf: Ints, shards: ShardColumns) -> list[Any]:
    """Columns one after the other, each as differences, which repeat: compressed they are a third of the numbers."""
    frames: list[Ints | Flags] = []
    if shards.framed is not None and shards.frame is not None:
        frames = [shards.framed, *shards.frame.start.T, *shards.frame.stop.T]
    columns = [leaf, shards.file, shards.offset, *shards.box.start.T, *shards.box.stop.T, *frames]
    differences = np.diff(np.array(columns, np.int64), axis=1, prepend=0)
    return [shards.box.dims, bool(frames), differences.reshape(-1).tolist()]


def _shards_of(json: Sequence[Any]) -> tuple[Ints, ShardColumns]:
    dims, framed, differences = json
    rows = 3 + 2 * dims
    columns = np.array(differences, np.int64).reshape(rows + framed * (1 + 2 * dims), -1).cumsum(axis=1)
    box, of_frames = columns[3:rows], columns[rows:]
    return columns[0], ShardColumns(
        box=Corners(box[:dims].T, box[dims:].T),
        file=columns[1],
        offset=columns[2],
        framed=of_frames[0].astype(np.bool_) if framed else None,
        frame=Corners(of_frames[1 : 1 + dims].T, of_frames[1 + dims :].T) if framed else None,
    )
