"""Stored regions: a single one, and many as one value of columns.

At thousands of ranks rank 0 has millions of shards to put together, and to make, sort or compare an object of Python
for each of them takes minutes. As columns they are dealt with as a whole; a `Shard` is made when one is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xla_ckpt.lightweight import lightweight
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.corners import Corners, Flags, Ints


@lightweight()
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

    frame: Box | None = None
    """In other layouts than the native one: the larger box whose elements lie there, of which this is a part."""


@dataclass(frozen=True, slots=True, eq=False)
class ShardColumns:
    """Many shards: a row for each."""

    box: Corners
    file: Ints
    offset: Ints
    framed: Flags | None = None
    """Which of them have a frame; None if none has."""

    frame: Corners | None = None
    """The frames; in rows without one, anything."""

    @classmethod
    def of(cls, shards: Sequence[Shard]) -> ShardColumns:
        """The columns of some shards."""
        framed = np.array([shard.frame is not None for shard in shards], np.bool_)
        return cls(
            box=Corners.of([shard.box for shard in shards]),
            file=np.array([shard.file for shard in shards], np.int64),
            offset=np.array([shard.offset for shard in shards], np.int64),
            framed=framed if framed.any() else None,
            frame=Corners.of([shard.frame or shard.box for shard in shards]) if framed.any() else None,
        )

    def __len__(self) -> int:
        return len(self.file)

    def rows(self, which: Ints, dims: int | None = None) -> ShardColumns:
        """Some of the shards; with `dims`, as those of an array of so many dims."""
        framed = None if self.framed is None else self.framed[which]
        has_frames = framed is not None and bool(framed.any())
        return ShardColumns(
            box=self.box.rows(which, dims),
            file=self.file[which],
            offset=self.offset[which],
            framed=framed if has_frames else None,
            frame=self.frame.rows(which, dims) if has_frames and self.frame is not None else None,
        )

    def frames(self) -> list[Box | None] | None:
        """The frame of each of them; None if none has one."""
        if self.framed is None or self.frame is None:
            return None
        return [self.frame.box(row) if framed else None for row, framed in enumerate(self.framed.tolist())]

    @staticmethod
    def joined(many: Sequence[ShardColumns], first_files: Sequence[int]) -> ShardColumns:
        """All of them, one after the other; `first_files` is the number of the first file of each."""
        framed = any(columns.framed is not None for columns in many)
        return ShardColumns(
            box=Corners.joined([columns.box for columns in many]),
            file=np.concatenate([c.file + first for c, first in zip(many, first_files, strict=True)]),
            offset=np.concatenate([columns.offset for columns in many]),
            framed=np.concatenate([np.zeros(len(c), np.bool_) if c.framed is None else c.framed for c in many])
            if framed
            else None,
            frame=Corners.joined([c.frame or c.box for c in many]) if framed else None,
        )
