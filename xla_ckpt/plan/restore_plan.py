"""What one process reads: which bytes of which file, for which part of which wanted box.

Pure: given a manifest and the wanted boxes it says what would be read from where, and proves that every wanted
element is covered exactly once, before a single payload byte moves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from xla_ckpt.errors import FormatError, IncompatibleCheckpointError
from xla_ckpt.lightweight import lightweight
from xla_ckpt.manifest.arrays import Frames
from xla_ckpt.manifest.digest import block_size, block_sizes
from xla_ckpt.manifest.forms import ArrayForm
from xla_ckpt.manifest.records import Manifest
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
            manifest.required(want.leaf)
    # Arrays of one form of which the same box is wanted are read alike: that is found out once for all of them.
    alike: dict[tuple[int, Box, Box | None, Frames], list[int]] = {}
    for i, (want, row, form) in enumerate(zip(wants, rows, arrays.form[rows].tolist(), strict=True)):
        alike.setdefault((form, want.box, want.memory, arrays.frames_of(row)), []).append(i)
    row_of, slot_of = np.array(rows, np.int64), np.array([want.slot for want in wants], np.int64)
    parts: list[list[Ints]] = [[np.zeros(0, np.int64) for _ in _COLUMNS]]
    scattered: list[Scattered] = []
    for (form, box, memory, frames), members in alike.items():
        pattern = _pattern(arrays.forms[form], frames, box, memory or box, wants[members[0]].leaf)
        of_form, *facts, scatter = pattern.columns
        facts.append(np.where(scatter < 0, -1, scatter + len(scattered)))
        cell = (arrays.first[row_of[members], None] + of_form).reshape(-1)
        alone = [np.repeat(members, len(of_form)), np.repeat(slot_of[members], len(of_form))]
        common = [np.tile(column, len(members)) for column in facts]
        parts.append([*alone, arrays.file[cell], arrays.offset[cell], *common])
        scattered += pattern.scattered
    columns = dict(zip(_COLUMNS, map(np.concatenate, zip(*parts, strict=True)), strict=True))
    plan = RestorePlan(leaves=[want.leaf for want in wants], scattered=scattered, **columns)
    return plan.rows(np.lexsort((plan.first, plan.offset, plan.file)))


@dataclass(slots=True)
class _Pattern:
    """How a box is read of any array of a form: a row for each part of a shard that moves."""

    rows: list[tuple[int, ...]] = field(default_factory=list)
    """Cell, and the columns of `RestorePlan` from `shard` to `scatter`."""

    scattered: list[Scattered] = field(default_factory=list)

    @property
    def columns(self) -> list[Ints]:
        """Those of all rows."""
        return [*np.array(self.rows, np.int64).reshape(len(self.rows), _FACTS).T]


_FACTS = 1 + len(_COLUMNS[_COLUMNS.index("shard") :])
"""Numbers in a row of a pattern."""


def _pattern(form: ArrayForm, frames: Frames, box: Box, memory: Box, leaf: str) -> _Pattern:
    """How a box of the arrays of a form is read into memory that is a larger box; `leaf` is one of them, for errors."""
    if not Box.whole(form.shape).contains(box):
        raise IncompatibleCheckpointError(
            "the wanted region lies outside of the stored array",
            leaf=leaf,
            expected=f"inside of {form.shape}",
            found=str(box),
        )
    pattern, covered, itemsize = _Pattern(), 0, form.dtype.itemsize
    for cell, shard in form.touching(box):
        touched = shard.intersect(box)
        if touched is None:
            continue
        covered += touched.size
        stored = (frames[cell] if frames else None) or shard
        for part in _bounded(stored, touched, itemsize):
            source, target = runs(part, stored, itemsize), runs(part, memory, itemsize)
            scatter = -1
            if not (source.contiguous and target.contiguous):
                scatter = len(pattern.scattered)
                pattern.scattered.append(Scattered(stored=stored, wanted=memory, part=part, itemsize=itemsize))
            place = stored.size * itemsize, source.offset, source.span, target.offset, part.size * itemsize
            pattern.rows.append((cell, *place, scatter))
    # Forms hold each element once (their constructor's promise), so an equal count is full cover.
    if covered != box.size:
        raise FormatError(
            "stored shards do not cover a wanted region",
            leaf=leaf,
            expected=f"{box.size} elements",
            found=covered,
        )
    return pattern


def _bounded(stored: Box, part: Box, itemsize: int) -> list[Box]:
    """One part for what is contiguous in a shard, several of bounded span for what is scattered."""
    block = block_size(stored.size * itemsize)
    if runs(part, stored, itemsize).contiguous:
        return [part]
    if runs(part, stored, itemsize).nbytes >= 2 * block:
        return list(pieces(part, stored, itemsize, runs(part, stored, itemsize).nbytes))
    return list(pieces(part, stored, itemsize, max(MAX_SPAN, 16 * block)))
