"""Restore plan: the bytes of each file that one process reads, in batches of whole checksum blocks.

`plan_restore` computes all reads from a manifest and the requested boxes, and checks before any I/O that every
requested element is covered exactly once. `plan_read_batches` groups the reads. Large contiguous parts are read
directly into their destination. All other parts (scattered parts, many small neighbours, and the ends of a part that
begins or ends inside a block) are read through a staging buffer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise

import numpy as np

from xla_ckpt.core.checksum import compute_block_size, compute_block_sizes
from xla_ckpt.core.lightweight import slots_dataclass
from xla_ckpt.core.manifest.arrays import ArrayMetadata, ParentBoxes
from xla_ckpt.core.manifest.manifest import Manifest
from xla_ckpt.core.plan.read_costs import LOCAL_DISK_COSTS, ReadCosts
from xla_ckpt.core.sharding.box import BoolArray, Box, IntArray
from xla_ckpt.core.sharding.memory_layout import compute_runs, split_by_span
from xla_ckpt.errors import FormatError, IncompatibleCheckpointError

MAX_SPAN = 16 * 1024 * 1024
"""Maximum span (bytes) in a file of one part of a scattered read, to bound the memory of a reader."""


@slots_dataclass()
class ReadRequest:
    """A box of a stored array that the caller requests, with separate memory."""

    leaf: str
    box: Box
    slot: int
    """Caller's number of the destination memory."""

    memory_box: Box | None = None
    """Box of the destination memory, if it is larger than `box`."""


@slots_dataclass(kw_only=True)
class ScatteredPart:
    """A part that is not a single run of bytes in both the file and the memory, described by boxes."""

    stored_box: Box
    """Box of the stored shard, or its parent box."""

    memory_box: Box
    """Box of the destination memory."""

    part_box: Box
    """Box that is copied. Both other boxes contain it."""

    itemsize: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RestorePlan:
    """All reads of one process, in file order: a row per requested part of a stored shard.

    All numbers are in bytes, except for leaves, slots and files.
    """

    leaves: Sequence[str]
    """Leaf paths, one per request."""

    leaf: IntArray
    """Index into `leaves`."""

    slot: IntArray
    """Caller's number of the destination memory."""

    file: IntArray
    """Index into the manifest's files."""

    offset: IntArray
    """File offset of the shard, or of its parent box."""

    shard_bytes: IntArray
    """Size of the shard, or of its parent box."""

    shard_offset: IntArray
    """Offset of the first requested byte in the shard."""

    span: IntArray
    """Number of bytes from the first requested byte to one past the last."""

    slot_offset: IntArray
    """Offset of the first byte in the destination memory."""

    nbytes: IntArray
    """Number of requested bytes: `span`, or less if the part is scattered."""

    scattered_index: IntArray
    """Index into `scattered_parts`, or -1 for a single run of bytes in both the file and the memory."""

    scattered_parts: Sequence[ScatteredPart] = field(default=())

    def __len__(self) -> int:
        return len(self.file)

    @property
    def needed_bytes(self) -> int:
        """Number of bytes of the requested boxes."""
        return int(self.nbytes.sum())

    @property
    def block_ranges(self) -> tuple[IntArray, IntArray, IntArray]:
        """Block size of each shard, and the first and one past the last checksum block that each read touches."""
        size = compute_block_sizes(self.shard_bytes)
        return size, self.shard_offset // size, -(-(self.shard_offset + self.span) // size)

    @property
    def read_bytes(self) -> int:
        """Number of bytes that are read: whole blocks, so that they can be verified."""
        return sum(self.bytes_by_file.values())

    @property
    def bytes_by_file(self) -> Mapping[int, int]:
        """Number of bytes that are read from each touched file."""
        size, first, last = self.block_ranges
        files, which = np.unique(self.file, return_inverse=True)
        total = np.zeros(len(files), np.int64)
        np.add.at(total, which, np.minimum(last * size, self.shard_bytes) - first * size)
        return dict(zip(files.tolist(), total.tolist(), strict=True))

    def select(self, rows: IntArray | BoolArray) -> RestorePlan:
        """Return a plan with some of the reads."""
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS}
        return RestorePlan(leaves=self.leaves, scattered_parts=self.scattered_parts, **columns)

    def match_slots(self, slots: Collection[int]) -> BoolArray:
        """Return a mask of the reads into these slots."""
        return np.isin(self.slot, np.fromiter(slots, np.int64, len(slots)))

    @staticmethod
    def concatenate(plans: Sequence[RestorePlan]) -> RestorePlan:
        """Concatenate several plans, in file order."""
        columns = {name: np.concatenate([getattr(plan, name) for plan in plans]) for name in _COLUMNS}
        leaves, scattered = 0, 0
        shifts: list[tuple[int, int]] = []
        for plan in plans:
            shifts.append((leaves, scattered))
            leaves += len(plan.leaves)
            scattered += len(plan.scattered_parts)
        columns["leaf"] = np.concatenate([plan.leaf + s for plan, (s, _) in zip(plans, shifts, strict=True)])
        columns["scattered_index"] = np.concatenate(
            [
                np.where(plan.scattered_index < 0, -1, plan.scattered_index + s)
                for plan, (_, s) in zip(plans, shifts, strict=True)
            ]
        )
        plan = RestorePlan(
            leaves=[leaf for plan in plans for leaf in plan.leaves],
            scattered_parts=[part for plan in plans for part in plan.scattered_parts],
            **columns,
        )
        return plan.select(np.lexsort((plan.shard_offset, plan.offset, plan.file)))


_COLUMNS = tuple(f.name for f in fields(RestorePlan) if f.name not in ("leaves", "scattered_parts"))


def plan_whole_shards(
    leaves: Sequence[str], *, slot: IntArray, file: IntArray, offset: IntArray, shard_bytes: IntArray
) -> RestorePlan:
    """Create reads of whole shards, each into separate memory, in file order."""
    zeros = np.zeros(len(file), np.int64)
    plan = RestorePlan(
        leaves=leaves,
        leaf=np.arange(len(file)),
        slot=slot,
        file=file,
        offset=offset,
        shard_bytes=shard_bytes,
        shard_offset=zeros,
        span=shard_bytes,
        slot_offset=zeros,
        nbytes=shard_bytes,
        scattered_index=zeros - 1,
    )
    return plan.select(np.lexsort((offset, file)))


def plan_restore(manifest: Manifest, requests: Sequence[ReadRequest]) -> RestorePlan:
    """Plan the reads for the requested boxes.

    Raises:
        IncompatibleCheckpointError: A leaf is not stored, or a box is outside of it.
        FormatError: The stored shards do not cover a requested box exactly once.
    """
    arrays = manifest.arrays
    rows = [arrays.row_by_leaf.get(manifest.aliases.get(want.leaf, want.leaf), -1) for want in requests]
    if manifest.unreadable or -1 in rows:
        for want in requests:
            manifest.get_array(want.leaf)
    # Requests of the same box of arrays with equal metadata have the same read pattern, which is computed once.
    alike: dict[tuple[int, Box, Box | None, ParentBoxes], list[int]] = {}
    for i, (want, row, form) in enumerate(zip(requests, rows, arrays.metadata_index[rows].tolist(), strict=True)):
        alike.setdefault((form, want.box, want.memory_box, arrays.get_parent_boxes(row)), []).append(i)
    row_of, slot_of = np.array(rows, np.int64), np.array([want.slot for want in requests], np.int64)
    parts: list[list[IntArray]] = [[np.zeros(0, np.int64) for _ in _COLUMNS]]
    scattered: list[ScatteredPart] = []
    for (form, box, memory, frames), members in alike.items():
        pattern = _build_pattern(arrays.metadata[form], frames, box, memory or box, requests[members[0]].leaf)
        of_form, *facts, scatter = pattern.columns
        facts.append(np.where(scatter < 0, -1, scatter + len(scattered)))
        cell = (arrays.first_shard[row_of[members], None] + of_form).reshape(-1)
        alone = [np.repeat(members, len(of_form)), np.repeat(slot_of[members], len(of_form))]
        common = [np.tile(column, len(members)) for column in facts]
        parts.append([*alone, arrays.file[cell], arrays.offset[cell], *common])
        scattered += pattern.scattered_parts
    columns = dict(zip(_COLUMNS, map(np.concatenate, zip(*parts, strict=True)), strict=True))
    plan = RestorePlan(leaves=[want.leaf for want in requests], scattered_parts=scattered, **columns)
    return plan.select(np.lexsort((plan.shard_offset, plan.offset, plan.file)))


@dataclass(slots=True)
class _ReadPattern:
    """Read pattern of a box for any array with the same metadata: a row per part of a shard."""

    rows: list[tuple[int, ...]] = field(default_factory=list)
    """Cell, and the columns of `RestorePlan` from `shard_bytes` to `scattered_index`."""

    scattered_parts: list[ScatteredPart] = field(default_factory=list)

    @property
    def columns(self) -> list[IntArray]:
        """Columns of all rows."""
        return [*np.array(self.rows, np.int64).reshape(len(self.rows), _PATTERN_WIDTH).T]


_PATTERN_WIDTH = 1 + len(_COLUMNS[_COLUMNS.index("shard_bytes") :])
"""Numbers per row of a pattern."""


def _build_pattern(
    metadata: ArrayMetadata, parent_boxes: ParentBoxes, box: Box, memory_box: Box, leaf: str
) -> _ReadPattern:
    """Compute how a box of arrays with this metadata is read into memory of a larger box.

    Args:
        metadata: Metadata of the arrays.
        parent_boxes: Parent box of each shard, or None.
        box: The requested box.
        memory_box: Box of the destination memory.
        leaf: Leaf path of one of the arrays, for errors.

    Raises:
        IncompatibleCheckpointError: The box is outside of the array.
        FormatError: The shards do not cover the box.
    """
    if not Box.from_shape(metadata.shape).contains(box):
        raise IncompatibleCheckpointError(
            "the wanted region lies outside of the stored array",
            leaf=leaf,
            expected=f"inside of {metadata.shape}",
            found=str(box),
        )
    pattern, covered, itemsize = _ReadPattern(), 0, metadata.dtype.itemsize
    for cell, shard in metadata.find_overlapping(box):
        touched = shard.intersect(box)
        if touched is None:
            continue
        covered += touched.size
        stored = (parent_boxes[cell] if parent_boxes else None) or shard
        for part in _split_part(stored, touched, itemsize):
            source, target = compute_runs(part, stored, itemsize), compute_runs(part, memory_box, itemsize)
            scatter = -1
            if not (source.is_contiguous and target.is_contiguous):
                scatter = len(pattern.scattered_parts)
                pattern.scattered_parts.append(
                    ScatteredPart(stored_box=stored, memory_box=memory_box, part_box=part, itemsize=itemsize)
                )
            place = stored.size * itemsize, source.offset, source.span, target.offset, part.size * itemsize
            pattern.rows.append((cell, *place, scatter))
    # `ArrayMetadata` guarantees that each element is stored once, so an equal count means full coverage.
    if covered != box.size:
        raise FormatError(
            "stored shards do not cover a wanted region",
            leaf=leaf,
            expected=f"{box.size} elements",
            found=covered,
        )
    return pattern


def _split_part(stored_box: Box, part: Box, itemsize: int) -> list[Box]:
    """Return a single part if it is contiguous in the shard, otherwise several parts of bounded span."""
    block = compute_block_size(stored_box.size * itemsize)
    if compute_runs(part, stored_box, itemsize).is_contiguous:
        return [part]
    if compute_runs(part, stored_box, itemsize).run_bytes >= 2 * block:
        return list(split_by_span(part, stored_box, itemsize, compute_runs(part, stored_box, itemsize).run_bytes))
    return list(split_by_span(part, stored_box, itemsize, max(MAX_SPAN, 16 * block)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExtentTable:
    """Whole checksum blocks of stored shards, and the reads that need them: a row per extent, in file order.

    Only whole blocks can be verified, so an extent may contain more bytes than its read requests, at both ends.
    """

    plan_row: IntArray
    """Row in the plan."""

    first_block: IntArray
    """First checksum block."""

    stop_block: IntArray
    """One past the last checksum block."""

    start: IntArray
    """File offset of the first byte."""

    stop: IntArray
    """File offset of one past the last byte."""

    direct: BoolArray
    """True if the bytes are read directly into their destination."""

    def __len__(self) -> int:
        return len(self.plan_row)

    @classmethod
    def from_blocks(
        cls, plan: RestorePlan, plan_row: IntArray, first_block: IntArray, stop_block: IntArray, direct: BoolArray
    ) -> ExtentTable:
        """Create the extents of block ranges of reads."""
        offset, shard = plan.offset[plan_row], plan.shard_bytes[plan_row]
        size = compute_block_sizes(shard)
        start, stop = offset + first_block * size, offset + np.minimum(stop_block * size, shard)
        return cls(
            plan_row=plan_row, first_block=first_block, stop_block=stop_block, start=start, stop=stop, direct=direct
        )

    def select(self, rows: IntArray | slice) -> ExtentTable:
        """Return some of the extents."""
        return ExtentTable(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


@dataclass(frozen=True, slots=True, eq=False)
class ReadBatch:
    """Neighbouring extents of one file, which are read together."""

    plan: RestorePlan
    extents: ExtentTable
    file: int
    start: int
    """File offset of the first byte."""

    stop: int
    """File offset of one past the last byte."""

    @property
    def is_direct(self) -> bool:
        """True if the batch is one extent that is read directly into its destination."""
        return bool(self.extents.direct[0])

    @property
    def nbytes(self) -> int:
        """Number of bytes of all extents. Overlapping bytes count several times."""
        return int((self.extents.stop - self.extents.start).sum())

    @property
    def wanted_ranges(self) -> tuple[IntArray, IntArray]:
        """Requested range of each extent: offsets in the shard, of the first byte and of one past the last."""
        plan, extents = self.plan, self.extents
        first, offset = plan.shard_offset[extents.plan_row], plan.offset[extents.plan_row]
        # A long part has several extents. The range of each is its intersection with the part.
        low = np.maximum(first, extents.start - offset)
        return low, np.minimum(first + plan.span[extents.plan_row], extents.stop - offset)

    @property
    def is_fully_wanted(self) -> bool:
        """True if all bytes of the blocks are requested. Only valid for plans that request no byte twice."""
        (low, high), read, extents = self.wanted_ranges, self.extents.plan_row, self.extents
        wanted = np.where(self.plan.scattered_index[read] < 0, high - low, self.plan.nbytes[read])
        behind = np.concatenate([extents.start[:1], np.maximum.accumulate(extents.stop)[:-1]])  # of previous extents
        return bool(wanted.sum() == np.maximum(extents.stop - np.maximum(extents.start, behind), 0).sum())

    def get_leaf(self, extent: int = 0) -> str:
        """Return the leaf path of the array that an extent belongs to."""
        return self.plan.leaves[int(self.plan.leaf[self.extents.plan_row[extent]])]


def plan_read_batches(plan: RestorePlan, *, direct: bool, costs: ReadCosts = LOCAL_DISK_COSTS) -> list[ReadBatch]:
    """Return the batches of all reads, in file order.

    Args:
        plan: All reads.
        direct: True to allow reads directly into their destination.
        costs: Read costs of the storage.
    """
    extents = _build_extents(plan, direct, costs)
    alone, through = np.flatnonzero(extents.direct), np.flatnonzero(~extents.direct)
    some = extents.select(through)
    groups = [alone[i : i + 1] for i in range(len(alone))]
    groups += [through[i:j] for i, j in _group_adjacent(plan.file[some.plan_row], some.start, some.stop, costs)]
    groups.sort(key=lambda group: int(group[0]))
    return [_build_batch(plan, extents.select(group)) for group in groups]


def _build_batch(plan: RestorePlan, extents: ExtentTable) -> ReadBatch:
    # Extents may overlap, so the last one does not necessarily end last.
    return ReadBatch(plan, extents, int(plan.file[extents.plan_row[0]]), int(extents.start[0]), int(extents.stop.max()))


def _group_adjacent(file: IntArray, start: IntArray, stop: IntArray, costs: ReadCosts) -> Iterator[tuple[int, int]]:
    """Yield (first, one past the last) of groups of extents that are close together and fit into a buffer."""
    if not len(file):
        return
    furthest = _compute_furthest_stop(file, stop)
    # Reads of one shard may overlap. A group does not cover an extent that starts before its first extent.
    apart = (file[1:] != file[:-1]) | (start[1:] > furthest[:-1] + costs.max_gap) | (start[1:] < start[:-1])
    bounds = np.concatenate([[0], np.flatnonzero(apart) + 1, [len(file)]])
    small = furthest[bounds[1:] - 1] - start[bounds[:-1]] <= costs.batch_bytes
    for (first, last), fits in zip(pairwise(bounds.tolist()), small.tolist(), strict=True):
        at = first
        while at < last:
            end = at + int(np.searchsorted(furthest[at:last], start[at] + costs.batch_bytes, side="right"))
            end = last if fits else max(end, at + 1)
            yield at, end
            at = end


def _compute_furthest_stop(file: IntArray, stop: IntArray) -> IntArray:
    """Return, for each extent, the furthest end of it and the previous extents in its file."""
    if ((stop[1:] >= stop[:-1]) | (file[1:] != file[:-1])).all():
        return stop
    bounds = [0, *(np.flatnonzero(file[1:] != file[:-1]) + 1).tolist(), len(file)]
    return np.concatenate([np.maximum.accumulate(stop[first:last]) for first, last in pairwise(bounds)])


def _build_extents(plan: RestorePlan, direct: bool, costs: ReadCosts) -> ExtentTable:
    """Build the extents of all reads.

    The rows of a scattered part are copied between strided views, so all of its blocks form one extent, whose span the
    plan has bounded. A large contiguous part is split into several extents.
    """
    size, first, last = plan.block_ranges
    one_run = plan.scattered_index < 0
    goes_straight = one_run & (plan.nbytes >= costs.direct_bytes) if direct else np.zeros(len(plan), np.bool_)
    cut = goes_straight | (one_run & ((last - first) * size > costs.batch_bytes))
    rows: list[tuple[int, int, int, bool]] = []
    for read in np.flatnonzero(cut).tolist():
        if goes_straight[read]:
            rows += _split_direct_read(plan, read, int(size[read]), costs)
        else:
            groups = _group_blocks(int(size[read]), int(first[read]), int(last[read]), costs)
            rows += [(read, a, b, False) for a, b in groups]
    whole, pieces = np.flatnonzero(~cut), np.array(rows, np.int64).reshape(-1, 4)
    extents = ExtentTable.from_blocks(
        plan,
        np.concatenate([whole, pieces[:, 0]]),
        np.concatenate([first[whole], pieces[:, 1]]),
        np.concatenate([last[whole], pieces[:, 2]]),
        np.concatenate([np.zeros(len(whole), np.bool_), pieces[:, 3] != 0]),
    )
    return extents.select(np.lexsort((extents.first_block, extents.plan_row))) if rows else extents


def _split_direct_read(
    plan: RestorePlan, plan_row: int, block_bytes: int, costs: ReadCosts
) -> Sequence[tuple[int, int, int, bool]]:
    """Return the extents of a large contiguous read. Blocks that are requested completely are read directly.

    The first and the last block may also contain bytes that are not requested. A direct read would overwrite the memory
    next to the destination, so these blocks are read through the buffer.
    """
    begin = int(plan.shard_offset[plan_row])
    end = begin + int(plan.span[plan_row])
    begins_inside = begin % block_bytes != 0
    ends_inside = (
        end % block_bytes != 0 and end != plan.shard_bytes[plan_row]
    )  # the last block of a shard may be short, and is complete
    head, tail = -(-begin // block_bytes), end // block_bytes if ends_inside else -(-end // block_bytes)
    rows = [(plan_row, begin // block_bytes, head, False)] if begins_inside else []
    rows += [(plan_row, a, b, True) for a, b in _group_blocks(block_bytes, head, tail, costs)]
    # A read inside a single block has its tail before its head: that block has already been added.
    return [*rows, (plan_row, tail, tail + 1, False)] if ends_inside and head <= tail else rows


def _group_blocks(block_bytes: int, first: int, last: int, costs: ReadCosts) -> Iterator[tuple[int, int]]:
    """Yield ranges of blocks that fit into a worker's buffer."""
    step = max(costs.batch_bytes // block_bytes, 1)
    for block in range(first, last, step):
        yield block, min(block + step, last)
