"""The read pipeline: a restore plan in, verified bytes in the caller's memory out.

Large contiguous parts are read straight into their destination and verified there. Everything else (scattered parts,
many small neighbours, the two ends of a part that begins or ends inside a block) goes through a worker's buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from xla_ckpt.engine.phases import Phases
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.manifest.digest import block_size, digest, to_hex
from xla_ckpt.plan.restore_plan import Read, RestorePlan
from xla_ckpt.sharding.ranges import Runs, runs
from xla_ckpt.storage.pool import BUFFER_BYTES, threads, work_off

READERS = 8
"""Threads that read, if the machine has the cores."""

STRAIGHT_BYTES = 256 * 1024
"""Contiguous reads from this size on go straight into their destination."""

MAX_GAP = 32 * 1024
"""Neighbouring reads this close are one read: skipping so little would cost more than reading it."""

Slots = Sequence[memoryview]
"""Memory of the wanted boxes: writable bytes in C order, by `Want.slot`."""


@dataclass(frozen=True, slots=True)
class _Extent:
    """Whole blocks of one stored shard that one read needs, and the read (None of it moves when only checking)."""

    read: Read
    first: int
    """First digest block."""
    last: int
    """One past the last digest block."""

    @property
    def start(self) -> int:
        """File offset of the first byte."""
        return self.read.offset + self.first * block_size(self.read.shard_bytes)

    @property
    def stop(self) -> int:
        """File offset of one past the last byte."""
        end = min(self.last * block_size(self.read.shard_bytes), self.read.shard_bytes)
        return self.read.offset + end


@dataclass(frozen=True, slots=True)
class _Batch:
    """Neighbouring extents that are read in one go: straight into place, or through the buffer."""

    extents: tuple[_Extent, ...]
    direct: bool

    @property
    def start(self) -> int:
        """File offset of the first byte."""
        return self.extents[0].start

    @property
    def stop(self) -> int:
        """File offset of one past the last byte: extents may overlap, so it need not be the last one's."""
        return max(e.stop for e in self.extents)


def read_into(
    tag: TagReader,
    plan: RestorePlan,
    slots: Slots,
    *,
    workers: int = READERS,
    progress: Callable[[int], None] = lambda _: None,
    phases: Phases | None = None,
) -> None:
    """Fill the slots from the tag, verifying every block.

    Raises:
        CorruptCheckpointError: A block is not what was saved. Slots may be partly filled by then.
        OSError: The storage refused.
    """
    measured = Phases() if phases is None else phases

    def work(batch: _Batch, buffer: memoryview) -> None:
        if batch.direct:
            _read_direct(tag, batch.extents[0], slots, measured)
        else:
            _read_through(tag, batch, buffer, slots, measured)
        progress(sum(map(_length, batch.extents)))

    _run(list(_batches(plan.reads, direct=True)), work, workers)


def check_reads(
    tag: TagReader,
    plan: RestorePlan,
    *,
    workers: int = READERS,
    progress: Callable[[int], None] = lambda _: None,
    phases: Phases | None = None,
    on_problem: Callable[[CorruptCheckpointError], None] | None = None,
) -> None:
    """Verify everything that the plan would read, and keep none of it.

    Raises:
        CorruptCheckpointError: A block is not what was saved; with `on_problem`, that is called instead.
        OSError: The storage refused.
    """
    measured = Phases() if phases is None else phases

    def work(batch: _Batch, buffer: memoryview) -> None:
        try:
            _read_through(tag, batch, buffer, None, measured)
        except CorruptCheckpointError as error:
            if on_problem is None:
                raise
            on_problem(error)
        progress(sum(map(_length, batch.extents)))

    _run(list(_batches(plan.reads, direct=False)), work, workers)


def _run(batches: list[_Batch], work: Callable[[_Batch, memoryview], None], workers: int) -> None:
    largest = max((b.stop - b.start for b in batches if not b.direct), default=0)
    work_off(
        batches, work, workers=min(threads(workers, 2), len(batches)) or 1, buffer_bytes=largest, name="xla_ckpt-read"
    )


def _length(extent: _Extent) -> int:
    return extent.stop - extent.start


def _batches(reads: Sequence[Read], direct: bool) -> Iterator[_Batch]:
    group: list[_Extent] = []
    stop = 0
    for read in reads:
        for extent, straight in _extents(read, direct):
            if straight:
                yield _Batch((extent,), direct=True)
                continue
            joins = (
                group
                and read.file == group[0].read.file
                and group[0].start <= extent.start <= stop + MAX_GAP
                and extent.stop - group[0].start <= BUFFER_BYTES
            )
            if group and not joins:
                yield _Batch(tuple(group), direct=False)
                group, stop = [], 0
            group.append(extent)
            stop = max(stop, extent.stop)
    if group:
        yield _Batch(tuple(group), direct=False)


def _extents(read: Read, direct: bool) -> Iterator[tuple[_Extent, bool]]:
    """The blocks of a read in pieces of bounded size, each with whether it can go straight into place."""
    first, last = read.blocks
    size = block_size(read.shard_bytes)
    step = max(BUFFER_BYTES // size, 1)
    stored = runs(read.part, read.stored, read.itemsize)
    target = runs(read.part, read.wanted, read.itemsize)
    if not stored.contiguous:
        yield _Extent(read, first, last), False
    elif not (direct and target.contiguous and read.nbytes >= STRAIGHT_BYTES):
        if target.contiguous:
            for b in range(first, last, step):
                yield _Extent(read, b, min(b + step, last)), False
        else:
            yield _Extent(read, first, last), False
    else:
        # The first and the last block may hold bytes that are not wanted: they must not touch the destination.
        head = first + (1 if stored.offset % size else 0)
        end = stored.offset + stored.nbytes
        tail = last - (1 if end % size and end != read.shard_bytes else 0)
        if first < head:
            yield _Extent(read, first, head), False
        for b in range(head, tail, step):
            yield _Extent(read, b, min(b + step, tail)), True
        if head <= tail < last:
            yield _Extent(read, tail, last), False


def _read_direct(tag: TagReader, extent: _Extent, slots: Slots, phases: Phases) -> None:
    read = extent.read
    stored = runs(read.part, read.stored, read.itemsize)
    target = runs(read.part, read.wanted, read.itemsize)
    shift = target.offset - stored.offset - read.offset
    into = slots[read.slot][extent.start + shift : extent.stop + shift]
    with phases.timed("read", len(into)):
        _fill(tag, read, into, extent.start)
    with phases.timed("verify", len(into)):
        _verify(tag, extent, into)


def _read_through(tag: TagReader, batch: _Batch, buffer: memoryview, slots: Slots | None, phases: Phases) -> None:
    start, stop = batch.start, batch.stop
    with phases.timed("read", stop - start):
        _fill(tag, batch.extents[0].read, buffer[: stop - start], start)
    parts = [(extent, buffer[extent.start - start : extent.stop - start]) for extent in batch.extents]
    with phases.timed("verify", sum(len(data) for _, data in parts)):
        for extent, data in parts:
            _verify(tag, extent, data)
    if slots is not None:
        with phases.timed("read"):
            for extent, data in parts:
                _scatter(extent, data, slots[extent.read.slot])


def _fill(tag: TagReader, read: Read, into: memoryview, offset: int) -> None:
    got = tag.source(read.file).read_into(into, offset)
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
    read = extent.read
    size = block_size(read.shard_bytes)
    table = tag.digests(read.file, read.offset, read.shard_bytes)
    if table is None:
        return
    for i, b in enumerate(range(extent.first, extent.last)):
        found = digest(data[i * size : (i + 1) * size])
        if found != table[b]:
            begin, end = read.offset + b * size, read.offset + min((b + 1) * size, read.shard_bytes)
            raise CorruptCheckpointError(
                f"stored bytes are damaged: block {b} of shard {read.stored}, bytes {begin} to {end} of the file",
                leaf=read.leaf,
                file=tag.file_name(read.file),
                path=tag.root,
                tag=tag.tag,
                expected=f"digest {to_hex(table[b])}",
                found=to_hex(found),
                hint="Load another tag, or restore this file from a copy.",
            )


def _scatter(extent: _Extent, data: memoryview, slot: memoryview) -> None:
    """Copy what the read wants from whole blocks of the shard to its place in the slot."""
    read = extent.read
    stored = runs(read.part, read.stored, read.itemsize)
    target = runs(read.part, read.wanted, read.itemsize)
    base = extent.start - read.offset  # shard offset of data[0]
    if stored.contiguous and target.contiguous:
        low = max(stored.offset, base)
        high = min(stored.offset + stored.nbytes, base + len(data))
        at = target.offset + low - stored.offset
        slot[at : at + high - low] = data[low - base : high - base]
        return
    shape, source_steps, target_steps, run = _common(read, stored, target)
    source = np.ndarray((*shape, run), np.uint8, buffer=data, offset=stored.offset - base, strides=(*source_steps, 1))
    into = np.ndarray((*shape, run), np.uint8, buffer=slot, offset=target.offset, strides=(*target_steps, 1))
    np.copyto(into, source)


def _common(read: Read, stored: Runs, target: Runs) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
    """The part as runs that are contiguous on both sides: shape of the runs, strides on either side, bytes of one."""
    shape = read.part.shape
    run = min(stored.nbytes, target.nbytes)
    inner, d = read.itemsize, len(shape)
    while d > 0 and inner < run:
        d -= 1
        inner *= shape[d]
    return (
        shape[:d],
        _strides(read.stored.shape, read.itemsize)[:d],
        _strides(read.wanted.shape, read.itemsize)[:d],
        inner,
    )


def _strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    steps = [itemsize] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        steps[d] = steps[d + 1] * shape[d + 1]
    return tuple(steps)
