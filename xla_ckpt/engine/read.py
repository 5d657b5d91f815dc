"""The read pipeline: a restore plan in, verified bytes in the caller's memory out.

Large contiguous parts are read straight into their destination and verified there. Everything else (scattered parts,
many small neighbours, the two ends of a part that begins or ends inside a block) goes through a worker's buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.garbage_collection import collector_paused
from xla_ckpt.engine.phases import Phases
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.lightweight import lightweight
from xla_ckpt.manifest.digest import block_size, digest, to_hex
from xla_ckpt.plan.restore_plan import Read, RestorePlan
from xla_ckpt.sharding.ranges import Runs, runs, strides
from xla_ckpt.snapshot.memory import Slabs
from xla_ckpt.storage.pool import BUFFER_BYTES, work_off

SCRATCH_BYTES = 1024 * 1024
"""What a thread reads at a time where it goes around the cache of the storage."""

STRAIGHT_BYTES = 256 * 1024
"""Contiguous reads from this size on go straight into their destination."""

MAX_GAP = 32 * 1024
"""Neighbouring reads this close are one read: skipping so little would cost more than reading it."""

Slots = Sequence[memoryview]
"""Memory of the wanted boxes: writable bytes in C order, by `Want.slot`."""


@lightweight()
class _Extent:
    """Whole digest blocks of one stored shard, and the read that needs them.

    Only whole blocks can be verified. An extent may hold more bytes than its read wants, at both ends.
    """

    read: Read
    first: int
    """First digest block."""

    last: int
    """One past the last digest block."""

    start: int
    """File offset of the first byte."""

    stop: int
    """File offset of one past the last byte."""

    @classmethod
    def of(cls, read: Read, first: int, last: int) -> _Extent:
        """The blocks from `first` to before `last`."""
        size, nbytes = block_size(read.shard_bytes), read.shard_bytes
        return cls(read, first, last, read.offset + first * size, read.offset + min(last * size, nbytes))


@dataclass(frozen=True, slots=True)
class _Batch:
    """Neighbouring extents of one file, which are read in one go."""

    extents: tuple[_Extent, ...]
    direct: bool
    """Whether the bytes are read straight into their destination; else through the worker's buffer."""

    @property
    def start(self) -> int:
        """File offset of the first byte."""
        return self.extents[0].start

    @property
    def stop(self) -> int:
        """File offset of one past the last byte. Extents may overlap, so the last one need not reach furthest."""
        return max(e.stop for e in self.extents)


def read_into(
    tag: TagReader,
    plan: RestorePlan,
    slots: Slots,
    crew: Crew | None = None,
    *,
    slabs: Slabs | None = None,
) -> None:
    """Fill the slots from the tag, verifying every block.

    `slabs` is where slots of new memory come from.

    Raises:
        CorruptCheckpointError: A block is not what was saved. Slots may be partly filled by then.
        OSError: The storage refused.
    """
    crew = Crew() if crew is None else crew

    def work(batch: _Batch, memory: memoryview) -> None:
        scratch, buffer = memory[:SCRATCH_BYTES], memory[SCRATCH_BYTES:]
        if batch.direct:
            _read_direct(tag, batch.extents[0], slots, scratch, crew.phases, slabs)
        else:
            _read_through(tag, batch, buffer, slots, scratch, crew.phases)
        crew.progress(sum(map(_length, batch.extents)))

    _run(_all_batches(plan, direct=True), work, crew.workers, SCRATCH_BYTES)


def check_reads(
    tag: TagReader,
    plan: RestorePlan,
    crew: Crew | None = None,
    *,
    on_problem: Callable[[CorruptCheckpointError], None] | None = None,
) -> None:
    """Verify everything that the plan would read, and keep none of it.

    Raises:
        CorruptCheckpointError: A block is not what was saved; with `on_problem`, that is called instead.
        OSError: The storage refused.
    """
    crew = Crew() if crew is None else crew

    def work(batch: _Batch, buffer: memoryview) -> None:
        try:
            _read_through(tag, batch, buffer, None, None, crew.phases)
        except CorruptCheckpointError as error:
            if on_problem is None:
                raise
            on_problem(error)
        crew.progress(sum(map(_length, batch.extents)))

    _run(_all_batches(plan, direct=False), work, crew.workers, 0)


def _run(batches: list[_Batch], work: Callable[[_Batch, memoryview], None], workers: int, scratch: int) -> None:
    """Work the batches off, each worker with `scratch` bytes and a buffer that the largest of them fits into."""
    largest = max((b.stop - b.start for b in batches if not b.direct), default=0)
    work_off(
        batches,
        work,
        workers=min(workers, len(batches)) or 1,
        buffer_bytes=scratch + largest,
        name="xla_ckpt-read",
    )


def _length(extent: _Extent) -> int:
    return extent.stop - extent.start


def _all_batches(plan: RestorePlan, *, direct: bool) -> list[_Batch]:
    with collector_paused():
        return list(_batches(plan.reads, direct))


def _batches(reads: Sequence[Read], direct: bool) -> Iterator[_Batch]:
    """The extents of all reads, which come in file order, put together where they are neighbours."""
    group: list[_Extent] = []
    stop = 0  # the furthest end of an extent in the group
    for read in reads:
        for extent, straight in _extents(read, direct):
            if straight:
                yield _Batch((extent,), direct=True)
                continue
            if group and not _joins(group[0], stop, extent):
                yield _Batch(tuple(group), direct=False)
                group, stop = [], 0
            group.append(extent)
            stop = max(stop, extent.stop)
    if group:
        yield _Batch(tuple(group), direct=False)


def _joins(first: _Extent, stop: int, extent: _Extent) -> bool:
    """Whether an extent is read together with a group that begins with `first` and ends at `stop`."""
    if extent.read.file != first.read.file or extent.start > stop + MAX_GAP:
        return False
    # Reads of one shard may overlap. One that begins before the group does is not in what the group reads.
    if extent.start < first.start:
        return False
    return extent.stop - first.start <= BUFFER_BYTES


def _extents(read: Read, direct: bool) -> Iterator[tuple[_Extent, bool]]:
    """The extents of a read, each with whether it can go straight into place. `direct`: whether any may."""
    first, last = read.blocks
    if (
        read.part is read.stored
        and read.nbytes < STRAIGHT_BYTES
        and runs(read.part, read.wanted, read.itemsize).contiguous
    ):
        yield _Extent.of(read, first, last), False  # as of most of many arrays
        return
    stored = runs(read.part, read.stored, read.itemsize)
    target = runs(read.part, read.wanted, read.itemsize)
    if not (stored.contiguous and target.contiguous):
        # The rows of a scattered part are copied between strided views of the whole, so all blocks come together.
        # The plan has bounded what they span (`MAX_SPAN`).
        yield _Extent.of(read, first, last), False
    elif direct and read.nbytes >= STRAIGHT_BYTES:
        yield from _straight(read, stored)
    else:
        for extent in _bounded(read, first, last):
            yield extent, False


def _straight(read: Read, stored: Runs) -> Iterator[tuple[_Extent, bool]]:
    """The extents of a large contiguous read: the blocks that are wanted whole go straight into their destination.

    The first and the last block may also hold bytes that are not wanted. Read straight, those would overwrite the
    destination's neighbours, so these blocks go through the buffer.
    """
    first, last = read.blocks
    size = block_size(read.shard_bytes)
    end = stored.offset + stored.nbytes
    begins_inside = stored.offset % size != 0
    ends_inside = end % size != 0 and end != read.shard_bytes  # the last block of a shard may be short, and is whole
    head = first + 1 if begins_inside else first
    tail = last - 1 if ends_inside else last
    if begins_inside:
        yield _Extent.of(read, first, head), False
    for extent in _bounded(read, head, tail):
        yield extent, True
    # A read that lies inside of one block has a tail before its head: that block has been dealt with.
    if ends_inside and head <= tail:
        yield _Extent.of(read, tail, last), False


def _bounded(read: Read, first: int, last: int) -> Iterator[_Extent]:
    """Some blocks of a read, as extents that fit in a worker's buffer."""
    step = max(BUFFER_BYTES // block_size(read.shard_bytes), 1)
    for block in range(first, last, step):
        yield _Extent.of(read, block, min(block + step, last))


def _read_direct(
    tag: TagReader, extent: _Extent, slots: Slots, scratch: memoryview, phases: Phases, slabs: Slabs | None
) -> None:
    """Read an extent into its destination, and verify it there."""
    read = extent.read
    stored = runs(read.part, read.stored, read.itemsize)
    target = runs(read.part, read.wanted, read.itemsize)
    shift = target.offset - stored.offset - read.offset  # from an offset in the file to one in the slot
    into = slots[read.slot][extent.start + shift : extent.stop + shift]
    with phases.timed("read", len(into), about=read.leaf):
        if slabs is not None:
            slabs.back(into)
        _fill(tag, read, into, extent.start, scratch)
    with phases.timed("verify", len(into), about=read.leaf):
        _verify(tag, extent, into)


def _read_through(
    tag: TagReader,
    batch: _Batch,
    buffer: memoryview,
    slots: Slots | None,
    scratch: memoryview | None,
    phases: Phases,
) -> None:
    """Read a batch into the buffer, verify it, and copy what is wanted to its destinations (without slots, nothing)."""
    start, stop = batch.start, batch.stop
    with phases.timed("read", stop - start, about=tag.file_name(batch.extents[0].read.file)):
        _fill(tag, batch.extents[0].read, buffer[: stop - start], start, scratch)
    parts = [(extent, buffer[extent.start - start : extent.stop - start]) for extent in batch.extents]
    with phases.timed("verify", sum(len(data) for _, data in parts)):
        for extent, data in parts:
            _verify(tag, extent, data)
    if slots is not None:
        with phases.timed("read"):
            for extent, data in parts:
                _scatter(extent, data, slots[extent.read.slot])


def _fill(tag: TagReader, read: Read, into: memoryview, offset: int, scratch: memoryview | None) -> None:
    """Fill memory with the bytes of the read's file from an offset on; without scratch, they will be read again."""
    source = tag.source(read.file)
    got = source.read_into(into, offset) if scratch is None else source.read_once(into, offset, scratch)
    if got < len(into):
        raise CorruptCheckpointError(
            "a payload file ends too early",
            leaf=read.leaf,
            file=tag.file_name(read.file),
            expected=f"{offset + len(into)} bytes",
            found=f"{offset + got}",
            path=tag.root,
            tag=tag.tag,
        )


def _verify(tag: TagReader, extent: _Extent, data: memoryview) -> None:
    """Compare each block of an extent, whose bytes are `data`, with its digest. Some foreign files have no digests."""
    read = extent.read
    size = block_size(read.shard_bytes)
    table = tag.digests(read.file, read.offset, read.shard_bytes)
    if table is None:
        return
    for i, b in enumerate(range(extent.first, extent.last)):
        actual = digest(data[i * size : (i + 1) * size])
        if actual != table[b]:
            begin, end = read.offset + b * size, read.offset + min((b + 1) * size, read.shard_bytes)
            raise CorruptCheckpointError(
                f"stored bytes are damaged: block {b} of shard {read.stored}, bytes {begin} to {end} of the file",
                leaf=read.leaf,
                file=tag.file_name(read.file),
                path=tag.root,
                tag=tag.tag,
                expected=f"digest {to_hex(table[b])}",
                found=to_hex(actual),
                hint=tag.hint,
            )


def _scatter(extent: _Extent, data: memoryview, slot: memoryview) -> None:
    """Copy what the read wants from whole blocks of the shard to its place in the slot."""
    read = extent.read
    stored = runs(read.part, read.stored, read.itemsize)
    target = runs(read.part, read.wanted, read.itemsize)
    base = extent.start - read.offset  # offset in the shard of data[0]
    if stored.contiguous and target.contiguous:
        # A long part comes in several extents: each moves the bytes that the part and the extent have in common.
        low = max(stored.offset, base)
        high = min(stored.offset + stored.nbytes, base + len(data))
        at = target.offset + low - stored.offset
        slot[at : at + high - low] = data[low - base : high - base]
        return
    # Both sides as arrays of runs of bytes, with the same shape and each side's own strides: numpy copies them.
    outer, run = _common_runs(read, min(stored.nbytes, target.nbytes))
    shape = (*read.part.shape[:outer], run)
    from_steps = (*strides(read.stored.shape, read.itemsize)[:outer], 1)
    to_steps = (*strides(read.wanted.shape, read.itemsize)[:outer], 1)
    source = np.ndarray(shape, np.uint8, buffer=data, offset=stored.offset - base, strides=from_steps)
    into = np.ndarray(shape, np.uint8, buffer=slot, offset=target.offset, strides=to_steps)
    np.copyto(into, source)


def _common_runs(read: Read, nbytes: int) -> tuple[int, int]:
    """(outer dims, bytes of a run) of a part that has runs of at least `nbytes` bytes on both sides.

    The inner dims, as many as make up that many bytes, are one run in the shard and in the slot. The outer dims say how
    many runs there are.
    """
    outer, run = len(read.part.shape), read.itemsize
    while outer > 0 and run < nbytes:
        outer -= 1
        run *= read.part.shape[outer]
    return outer, run
