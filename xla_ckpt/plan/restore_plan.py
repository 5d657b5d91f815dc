"""What one process reads: which bytes of which file, for which part of which wanted box.

Pure: given a manifest and the wanted boxes it says what would be read from where, and proves that every wanted
element is covered exactly once, before a single payload byte moves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from xla_ckpt.errors import FormatError, IncompatibleCheckpointError
from xla_ckpt.lightweight import lightweight
from xla_ckpt.manifest.arrays import cell_bytes
from xla_ckpt.manifest.digest import block_size, block_sizes
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.manifest.shards import Shard
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.corners import Flags, Ints
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

    memory: Box | None = None
    """The larger box that the memory is, if it is one."""


@lightweight(kw_only=True)
class Scattered:
    """A part that is not one run of bytes on both sides: the boxes that say how it lies there."""

    stored: Box
    """Box of the stored shard, or its frame."""

    wanted: Box
    """Box of the memory that receives it."""

    part: Box
    """What moves: inside of both."""

    itemsize: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RestorePlan:
    """Everything that one process reads, in file order: a row for each part of a stored shard that it wants.

    All numbers are bytes, but for those of leaves, slots and files.
    """

    leaves: Sequence[str]
    """Leaf paths, each once for each of its wants."""

    leaf: Ints
    """Index into `leaves`."""

    slot: Ints
    """The caller's number for the memory that receives it."""

    file: Ints
    """Index into the manifest's files."""

    offset: Ints
    """Of the first byte of the shard, or of its frame, in the file."""

    shard: Ints
    """Size of the shard, or of its frame."""

    first: Ints
    """Of the first byte that is wanted, in the shard."""

    span: Ints
    """From the first byte that is wanted to one past the last."""

    at: Ints
    """Of the first byte in the memory that receives it."""

    moved: Ints
    """Size of what is wanted: `span`, or less if it is scattered."""

    scatter: Ints
    """Index into `scattered`; -1 for what is one run of bytes on both sides."""

    scattered: Sequence[Scattered] = field(default=())

    def __len__(self) -> int:
        return len(self.file)

    @property
    def needed_bytes(self) -> int:
        """Bytes that the wanted boxes hold."""
        return int(self.moved.sum())

    @property
    def blocks(self) -> tuple[Ints, Ints, Ints]:
        """Size of a digest block of each shard, and the first and one past the last that each read touches."""
        size = block_sizes(self.shard)
        return size, self.first // size, -(-(self.first + self.span) // size)

    @property
    def read_bytes(self) -> int:
        """Bytes that are read for them: whole blocks, so that they can be verified."""
        return sum(self.bytes_of_files.values())

    @property
    def bytes_of_files(self) -> Mapping[int, int]:
        """The bytes that are read of each file that is touched."""
        size, first, last = self.blocks
        files, which = np.unique(self.file, return_inverse=True)
        total = np.zeros(len(files), np.int64)
        np.add.at(total, which, np.minimum(last * size, self.shard) - first * size)
        return dict(zip(files.tolist(), total.tolist(), strict=True))

    def rows(self, which: Ints | Flags) -> RestorePlan:
        """Some of the reads."""
        columns = {name: getattr(self, name)[which] for name in _COLUMNS}
        return RestorePlan(leaves=self.leaves, scattered=self.scattered, **columns)

    def of_slots(self, slots: Collection[int]) -> Flags:
        """Which reads are for one of these slots."""
        return np.isin(self.slot, np.fromiter(slots, np.int64, len(slots)))

    @staticmethod
    def joined(many: Sequence[RestorePlan]) -> RestorePlan:
        """All of several plans, in file order."""
        columns = {name: np.concatenate([getattr(plan, name) for plan in many]) for name in _COLUMNS}
        leaves, scattered = 0, 0
        shifts: list[tuple[int, int]] = []
        for plan in many:
            shifts.append((leaves, scattered))
            leaves += len(plan.leaves)
            scattered += len(plan.scattered)
        columns["leaf"] = np.concatenate([plan.leaf + s for plan, (s, _) in zip(many, shifts, strict=True)])
        columns["scatter"] = np.concatenate(
            [np.where(plan.scatter < 0, -1, plan.scatter + s) for plan, (_, s) in zip(many, shifts, strict=True)]
        )
        plan = RestorePlan(
            leaves=[leaf for plan in many for leaf in plan.leaves],
            scattered=[part for plan in many for part in plan.scattered],
            **columns,
        )
        return plan.rows(np.lexsort((plan.first, plan.offset, plan.file)))


_COLUMNS = tuple(f.name for f in fields(RestorePlan) if f.name not in ("leaves", "scattered"))


def whole_reads(leaves: Sequence[str], *, slot: Ints, file: Ints, offset: Ints, shard: Ints) -> RestorePlan:
    """Reads of whole shards, each of them into memory of its own, in file order."""
    zeros = np.zeros(len(file), np.int64)
    plan = RestorePlan(
        leaves=leaves,
        leaf=np.arange(len(file)),
        slot=slot,
        file=file,
        offset=offset,
        shard=shard,
        first=zeros,
        span=shard,
        at=zeros,
        moved=shard,
        scatter=zeros - 1,
    )
    return plan.rows(np.lexsort((offset, file)))


def plan_restore(manifest: Manifest, wants: Sequence[Want]) -> RestorePlan:
    """Decide what to read for these boxes.

    Raises:
        IncompatibleCheckpointError: A leaf is not stored, or a box lies outside of it.
        FormatError: The stored shards do not cover a wanted box exactly once.
    """
    arrays = manifest.arrays
    rows = [arrays.row.get(manifest.aliases.get(want.leaf, want.leaf), -1) for want in wants]
    if manifest.unknown or -1 in rows:
        for want in wants:
            if manifest.array(want.leaf) is None:
                raise IncompatibleCheckpointError("the checkpoint has no such array", leaf=want.leaf)
    only = [None if arrays.frames else form.only for form in arrays.forms]
    whole: list[int] = []  # of nearly all arrays: the only shard, which is wanted whole
    leaves: list[str] = []
    moves: list[tuple[int, ...]] = []
    scattered: list[Scattered] = []
    for i, (want, form) in enumerate(zip(wants, arrays.form[rows].tolist(), strict=True)):
        box = only[form]
        if want.memory is None and (want.box is box or want.box == box):
            whole.append(i)
            continue
        for place, scatter in _moves(manifest, want):
            moves.append((len(leaves), want.slot, *place, -1 if scatter is None else len(scattered)))
            scattered += [] if scatter is None else [scatter]
        leaves.append(want.leaf)
    columns = np.array(moves, np.int64).reshape(len(moves), len(_COLUMNS)).T
    others = RestorePlan(leaves=leaves, scattered=scattered, **dict(zip(_COLUMNS, columns, strict=True)))
    of_whole = np.array(rows, np.int64)[whole]
    cells = arrays.first[of_whole]
    sizes = np.array([int(cell_bytes(form)[0]) if form.only else 0 for form in arrays.forms], np.int64)
    straight = whole_reads(
        [wants[i].leaf for i in whole],
        slot=np.array([wants[i].slot for i in whole], np.int64),
        file=arrays.file[cells],
        offset=arrays.offset[cells],
        shard=sizes[arrays.form[of_whole]],
    )
    return RestorePlan.joined([straight, others])


def _moves(manifest: Manifest, want: Want) -> Iterator[tuple[tuple[int, ...], Scattered | None]]:
    """The columns of each read of a want, from `file` to `moved`, and how it lies where it is no run of bytes."""
    record = manifest.array(want.leaf)
    assert record is not None, "looked for before"
    if not Box.whole(record.shape).contains(want.box):
        raise IncompatibleCheckpointError(
            "the wanted region lies outside of the stored array",
            leaf=want.leaf,
            expected=f"inside of {record.shape}",
            found=str(want.box),
        )
    covered, itemsize, memory = 0, record.dtype.itemsize, want.memory or want.box
    for shard in record.touching(want.box):
        touched = shard.box.intersect(want.box)
        if touched is None:
            continue
        covered += touched.size
        stored = shard.frame or shard.box
        for part in _bounded(shard, touched, itemsize):
            source, target = runs(part, stored, itemsize), runs(part, memory, itemsize)
            place = shard.file, shard.offset, stored.size * itemsize, source.offset, source.span
            one_run = source.contiguous and target.contiguous
            lies = None if one_run else Scattered(stored=stored, wanted=memory, part=part, itemsize=itemsize)
            yield (*place, target.offset, part.size * itemsize), lies
    # Records hold each element once (their constructor's promise), so an equal count is full cover.
    if covered != want.box.size:
        raise FormatError(
            "stored shards do not cover a wanted region",
            leaf=want.leaf,
            expected=f"{want.box.size} elements",
            found=covered,
        )


def _bounded(shard: Shard, part: Box, itemsize: int) -> list[Box]:
    """One part for what is contiguous in the shard, several of bounded span for what is scattered."""
    stored = shard.frame or shard.box
    block = block_size(stored.size * itemsize)
    if runs(part, stored, itemsize).contiguous:
        return [part]
    if runs(part, stored, itemsize).nbytes >= 2 * block:
        return list(pieces(part, stored, itemsize, runs(part, stored, itemsize).nbytes))
    return list(pieces(part, stored, itemsize, max(MAX_SPAN, 16 * block)))
