"""What one process reads: which bytes of which file, for which part of which wanted box.

Pure: given a manifest and the wanted boxes it says what would be read from where, and proves that every wanted
element is covered exactly once, before a single payload byte moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xla_ckpt.errors import FormatError, IncompatibleCheckpointError
from xla_ckpt.lightweight import lightweight
from xla_ckpt.manifest.digest import block_count, block_size
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.manifest.shards import Shard
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.ranges import pieces, runs

MAX_SPAN = 16 * 1024 * 1024
"""Scattered reads are cut into parts that span at most this many bytes of a file: the memory of one reader."""


@lightweight()
class Want:
    """A box of a stored array that the caller wants, in memory of its own."""

    leaf: str
    box: Box
    slot: int
    """The caller's number for the memory that receives it."""


@lightweight(kw_only=True)
class Read:
    """One part of one stored shard, on its way to one part of one wanted box."""

    leaf: str
    slot: int
    file: int
    """Index into the manifest's files."""

    offset: int
    """Of the shard's first byte in the file."""

    stored: Box
    """Box of the stored shard, or its frame."""

    wanted: Box
    """Box of the memory that receives it."""

    part: Box
    """What moves: inside of both."""

    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return self.part.size * self.itemsize

    @property
    def shard_bytes(self) -> int:
        """Bytes of the stored shard."""
        return self.stored.size * self.itemsize

    @property
    def blocks(self) -> tuple[int, int]:
        """First and one past the last digest block of the shard that the read touches."""
        if self.part is self.stored:
            return 0, block_count(self.shard_bytes)  # as of nearly all arrays
        where = runs(self.part, self.stored, self.itemsize)
        block = block_size(self.shard_bytes)
        return where.offset // block, -(-(where.offset + where.span) // block)

    @property
    def read_bytes(self) -> int:
        """Bytes that leave the disk for it: whole blocks, so that they can be verified."""
        if self.part is self.stored:
            return self.nbytes
        first, last = self.blocks
        block = block_size(self.shard_bytes)
        return min(last * block, self.shard_bytes) - first * block


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """Everything that one process reads, in file order."""

    reads: tuple[Read, ...]

    @property
    def needed_bytes(self) -> int:
        """Bytes that the wanted boxes hold."""
        return sum(r.nbytes for r in self.reads)

    @property
    def read_bytes(self) -> int:
        """Bytes that are read for them."""
        return sum(r.read_bytes for r in self.reads)

    @property
    def files(self) -> tuple[int, ...]:
        """The files that are touched."""
        return tuple(sorted({r.file for r in self.reads}))


def plan_restore(manifest: Manifest, wants: Sequence[Want]) -> RestorePlan:
    """Decide what to read for these boxes.

    Raises:
        IncompatibleCheckpointError: A leaf is not stored, or a box lies outside of it.
        FormatError: The stored shards do not cover a wanted box exactly once.
    """
    reads: list[Read] = []
    for want in wants:
        record = manifest.array(want.leaf)
        if record is None:
            raise IncompatibleCheckpointError("the checkpoint has no such array", leaf=want.leaf)
        if not Box.whole(record.shape).contains(want.box):
            raise IncompatibleCheckpointError(
                "the wanted region lies outside of the stored array",
                leaf=want.leaf,
                expected=f"inside of {record.shape}",
                found=str(want.box),
            )
        whole = record.only_shard(want.box)
        if whole is not None:
            reads.append(_read(want, whole, whole.box, record.dtype.itemsize))
            continue
        covered = 0
        for shard in record.touching(want.box):
            part = shard.box.intersect(want.box)
            if part is not None:
                covered += part.size
                reads.extend(_reads(want, shard, part, record.dtype.itemsize))
        # Records hold each element once (their constructor's promise), so an equal count is full cover.
        if covered != want.box.size:
            raise FormatError(
                "stored shards do not cover a wanted region",
                leaf=want.leaf,
                expected=f"{want.box.size} elements",
                found=covered,
            )
    reads.sort(key=lambda r: (r.file, r.offset, r.part))
    return RestorePlan(tuple(reads))


def _reads(want: Want, shard: Shard, part: Box, itemsize: int) -> list[Read]:
    """One read for what is contiguous in the shard, several of bounded span for what is scattered."""
    stored = shard.frame or shard.box
    block = block_size(stored.size * itemsize)
    if runs(part, stored, itemsize).contiguous:
        parts = [part]
    elif runs(part, stored, itemsize).nbytes >= 2 * block:
        parts = list(pieces(part, stored, itemsize, runs(part, stored, itemsize).nbytes))
    else:
        parts = list(pieces(part, stored, itemsize, max(MAX_SPAN, 16 * block)))
    return [_read(want, shard, p, itemsize) for p in parts]


def _read(want: Want, shard: Shard, part: Box, itemsize: int) -> Read:
    return Read(
        leaf=want.leaf,
        slot=want.slot,
        file=shard.file,
        offset=shard.offset,
        stored=shard.frame or shard.box,
        wanted=want.box,
        part=part,
        itemsize=itemsize,
    )
