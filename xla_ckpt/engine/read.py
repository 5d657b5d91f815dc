"""The read pipeline: a restore plan in, verified bytes in the caller's memory out.

What goes straight into its destination (see `plan.batches`) is verified there, everything else in a worker's buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.garbage_collection import collector_paused
from xla_ckpt.engine.phases import Phases
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.manifest.digest import block_sizes, digest, to_hex
from xla_ckpt.plan.batches import ReadBatch, batches_of
from xla_ckpt.plan.restore_plan import RestorePlan, Scattered
from xla_ckpt.sharding.ranges import runs, strides
from xla_ckpt.snapshot.memory import Slabs
from xla_ckpt.storage.pool import HUGE_BYTES, work_off

SCRATCH_BYTES = HUGE_BYTES
"""What a thread reads at a time where it goes around the cache of the storage: into one huge page (see `work_off`)."""

Slots = Sequence[memoryview]
"""Memory of the wanted boxes: writable bytes in C order, by `Want.slot`."""


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

    def work(batch: ReadBatch, memory: memoryview) -> None:
        scratch, buffer = memory[:SCRATCH_BYTES], memory[SCRATCH_BYTES:]
        if batch.straight:
            _read_straight(tag, batch, slots, scratch, crew.phases, slabs)
        else:
            _read_through(tag, batch, buffer, slots, scratch, crew.phases)
        crew.progress(batch.nbytes)

    _run(tag, plan, work, crew.workers, straight=True, scratch=SCRATCH_BYTES)


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

    def work(batch: ReadBatch, buffer: memoryview) -> None:
        try:
            _read_through(tag, batch, buffer, None, None, crew.phases)
        except CorruptCheckpointError as error:
            if on_problem is None:
                raise
            on_problem(error)
        crew.progress(batch.nbytes)

    _run(tag, plan, work, crew.workers, straight=False)


def _run(
    tag: TagReader,
    plan: RestorePlan,
    work: Callable[[ReadBatch, memoryview], None],
    workers: int,
    *,
    straight: bool,
    scratch: int = 0,
) -> None:
    """Work off what is read, each worker with `scratch` bytes and a buffer that the largest batch fits into."""
    costs = tag.directory.costs
    with collector_paused():
        batches = batches_of(plan, straight=straight, costs=costs)
    largest = max((b.stop - b.start for b in batches if not b.straight), default=0)
    work_off(
        batches,
        work,
        workers=min(costs.in_flight or workers, len(batches)) or 1,
        buffer_bytes=scratch + largest,
        name="xla_ckpt-read",
    )


def _read_straight(
    tag: TagReader, batch: ReadBatch, slots: Slots, scratch: memoryview, phases: Phases, slabs: Slabs | None
) -> None:
    """Read a batch into its destination, and verify it there."""
    plan, read = batch.plan, batch.extents.read[0]
    shift = int(plan.at[read] - plan.first[read] - plan.offset[read])  # from an offset in the file to one in the slot
    into = slots[plan.slot[read]][batch.start + shift : batch.stop + shift]
    with phases.timed("read", len(into), about=batch.leaf()):
        if slabs is not None:
            slabs.back(into)
        _fill(tag, batch, into, scratch)
    with phases.timed("verify", len(into), about=batch.leaf()):
        _verify(tag, batch, into)


def _read_through(
    tag: TagReader,
    batch: ReadBatch,
    buffer: memoryview,
    slots: Slots | None,
    scratch: memoryview | None,
    phases: Phases,
) -> None:
    """Read a batch into the buffer, verify it, and copy what is wanted to its destinations (without slots, nothing)."""
    data = buffer[: batch.stop - batch.start]
    with phases.timed("read", len(data), about=tag.file_name(batch.file)):
        _fill(tag, batch, data, scratch)
    with phases.timed("verify", batch.nbytes):
        _verify(tag, batch, data)
    if slots is not None:
        with phases.timed("read"):
            _distribute(batch, data, slots)


def _fill(tag: TagReader, batch: ReadBatch, into: memoryview, scratch: memoryview | None) -> None:
    """Fill memory with the bytes of a batch; without scratch, they will be read again."""
    source, offset = tag.source(batch.file), batch.start
    try:
        got = source.read_into(into, offset) if scratch is None else source.read_once(into, offset, scratch)
    except FileNotFoundError:
        raise tag.missing(batch.file) from None  # a store that was not asked for it when it was opened
    if got < len(into):
        raise CorruptCheckpointError(
            "a payload file ends too early",
            leaf=batch.leaf(),
            file=tag.file_name(batch.file),
            expected=f"{offset + len(into)} bytes",
            found=f"{offset + got}",
            path=tag.root,
            tag=tag.tag,
        )


def _verify(tag: TagReader, batch: ReadBatch, data: memoryview) -> None:
    """Compare each block of a batch, whose bytes are `data`, with its digest. Some foreign files have no digests."""
    table = tag.digest_table(batch.file)
    if table is None:
        return
    extents, plan = batch.extents, batch.plan
    offset, shard = plan.offset[extents.read], plan.shard[extents.read]
    counts = extents.last - extents.first
    extent = np.repeat(np.arange(len(extents)), counts)  # of each block
    block = np.arange(len(extent)) - np.repeat(np.cumsum(counts) - counts, counts)  # counted from that of the extent
    size = block_sizes(shard)[extent]
    begin = extents.start[extent] + block * size
    end = np.minimum(begin + size, extents.stop[extent])
    expected = table.digests[(table.find(offset, shard) + extents.first)[extent] + block]
    places = zip((begin - batch.start).tolist(), (end - batch.start).tolist(), strict=True)
    actual = np.array([digest(data[a:b]) for a, b in places], np.uint64)
    different = np.flatnonzero(actual != expected)
    if different.size:
        bad = int(different[0])
        number = extents.first[extent[bad]] + block[bad]
        raise CorruptCheckpointError(
            f"stored bytes are damaged: block {number} of a shard, bytes {begin[bad]} to {end[bad]} of the file",
            leaf=batch.leaf(int(extent[bad])),
            file=tag.file_name(batch.file),
            path=tag.root,
            tag=tag.tag,
            expected=f"digest {to_hex(int(expected[bad]))}",
            found=to_hex(int(actual[bad])),
            hint=tag.hint,
        )


def _distribute(batch: ReadBatch, data: memoryview, slots: Slots) -> None:
    """Copy what the reads of a batch want, whose bytes are `data`, to its places in the slots."""
    plan, extents = batch.plan, batch.extents
    read = extents.read
    first, offset = plan.first[read], plan.offset[read]
    # A long part comes in several extents: each moves the bytes that the part and the extent have in common.
    low = np.maximum(first, extents.start - offset)
    high = np.minimum(first + plan.span[read], extents.stop - offset)
    columns = (plan.scatter[read], plan.slot[read], low + offset - batch.start, plan.at[read] + low - first, high - low)
    for scatter, slot, source, at, nbytes in zip(*(column.tolist() for column in columns), strict=True):
        if scatter < 0:
            slots[slot][at : at + nbytes] = data[source : source + nbytes]
        else:
            _scatter(plan.scattered[scatter], data[source : source + nbytes], slots[slot])


def _scatter(part: Scattered, data: memoryview, slot: memoryview) -> None:
    """Copy a part that is no run of bytes; `data` are the bytes of its shard from its first to its last."""
    stored, target = runs(part.part, part.stored, part.itemsize), runs(part.part, part.wanted, part.itemsize)
    # Both sides as arrays of runs of bytes, with the same shape and each side's own strides: numpy copies them.
    outer, run = _common_runs(part, min(stored.nbytes, target.nbytes))
    shape = (*part.part.shape[:outer], run)
    from_steps = (*strides(part.stored.shape, part.itemsize)[:outer], 1)
    to_steps = (*strides(part.wanted.shape, part.itemsize)[:outer], 1)
    source = np.ndarray(shape, np.uint8, buffer=data, strides=from_steps)
    into = np.ndarray(shape, np.uint8, buffer=slot, offset=target.offset, strides=to_steps)
    np.copyto(into, source)


def _common_runs(part: Scattered, nbytes: int) -> tuple[int, int]:
    """(outer dims, bytes of a run) of a part that has runs of at least `nbytes` bytes on both sides.

    The inner dims, as many as make up that many bytes, are one run in the shard and in the slot. The outer dims say how
    many runs there are.
    """
    outer, run = len(part.part.shape), part.itemsize
    while outer > 0 and run < nbytes:
        outer -= 1
        run *= part.part.shape[outer]
    return outer, run
