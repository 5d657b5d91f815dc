"""The read pipeline: a restore plan in, verified bytes in the caller's memory out.

What goes straight into its destination (see `plan.batches`) is verified there, everything else in a worker's buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from xla_ckpt.engine.blocks import DigestBlocks
from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.garbage_collection import collector_paused
from xla_ckpt.engine.phases import Phases
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import CorruptCheckpointError, UnprovenLoadError
from xla_ckpt.plan.batches import ReadBatch, batches_of
from xla_ckpt.plan.restore_plan import RestorePlan, Scattered
from xla_ckpt.sharding.ranges import runs, strides
from xla_ckpt.snapshot.memory import Slabs
from xla_ckpt.storage.pool import HUGE_BYTES, threads, work_off

SCRATCH_BYTES = HUGE_BYTES
"""What a thread reads at a time where it goes around the cache of the storage: into one huge page (see `work_off`)."""

_UNPROVEN = (
    "Load again, into new memory or on another device; if the error returns, the device, or the program that writes to "
    "this memory, is at fault. The load cannot be undone: the objects have their new state, with these bytes wrong."
)

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
            _read(tag, batch, buffer, None, crew.phases, keep=False)
        except CorruptCheckpointError as error:
            if on_problem is None:
                raise
            on_problem(error)
        crew.progress(batch.nbytes)

    _run(tag, plan, work, threads(crew.workers, 3), straight=False)


def check_slots(tag: TagReader, plan: RestorePlan, slots: Slots, crew: Crew) -> None:
    """Compare memory with what the plan would read into it.

    Each stored block has to have its digest when the bytes of the slots are in it.

    No two reads of the plan may want the same stored bytes. Blocks that are wanted in part are read again for the rest
    of them, and those of foreign files that have no digests are read whole.

    Raises:
        UnprovenLoadError: A slot holds other bytes.
        CorruptCheckpointError: What is read again is not what was saved.
        OSError: The storage refused.
    """

    def work(batch: ReadBatch, buffer: memoryview) -> None:
        data, blocks = buffer[: batch.stop - batch.start], DigestBlocks.of(batch)
        expected, every = blocks.stored(tag), range(len(blocks))
        if expected is None or not batch.is_wanted_whole:
            _read(tag, batch, data, None, crew.phases)
        if expected is None:
            expected = blocks.digests(data, every)
        with crew.phases.timed("prove", batch.nbytes):
            for in_slot, in_file in _moves(batch, data, slots):
                in_file[:] = in_slot
            problem = "after the load, memory holds other bytes than the tag"
            blocks.compare(tag, expected, data, UnprovenLoadError, problem, lambda: _UNPROVEN, every)
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
    if slabs is not None:
        with phases.timed("read", about=batch.leaf()):
            slabs.back(into)
    _read(tag, batch, into, scratch, phases)


def _read_through(
    tag: TagReader, batch: ReadBatch, buffer: memoryview, slots: Slots, scratch: memoryview, phases: Phases
) -> None:
    """Read a batch into the buffer, verify it, and copy what is wanted to its destinations."""
    data = buffer[: batch.stop - batch.start]
    _read(tag, batch, data, scratch, phases)
    with phases.timed("read"):
        for in_slot, in_file in _moves(batch, data, slots):
            in_slot[:] = in_file


def _read(
    tag: TagReader,
    batch: ReadBatch,
    memory: memoryview,
    scratch: memoryview | None,
    phases: Phases,
    *,
    keep: bool = True,
) -> None:
    """Read the blocks of a batch, and compare each with its digest. Some foreign files have no digests.

    They come in pieces: a digest that is taken just after a read finds the bytes in the processor's cache.

    Args:
        tag: What is read.
        batch: What of it.
        memory: For the bytes of the batch; if they are not kept, at least for one piece.
        scratch: As `Source.read_once` has it. Without it, the bytes will be read again.
        phases: Receives what is measured.
        keep: Whether all bytes are in the memory in the end. If not, each piece overwrites the one before it.
    """
    blocks, about = DigestBlocks.of(batch), batch.leaf() if batch.straight else tag.file_name(batch.file)
    expected = blocks.stored(tag)
    for rows, start, stop in blocks.pieces(tag.directory.costs.piece_bytes):
        at = start - batch.start if keep else 0
        data = memory[at : at + stop - start]
        with phases.timed("read", len(data), about=about):
            _fill(tag, batch, data, start, scratch)
        with phases.timed("verify", len(data), about=about):
            if expected is not None:
                blocks.compare(
                    tag, expected, data, CorruptCheckpointError, "stored bytes are damaged", lambda: tag.hint, rows
                )


def _fill(tag: TagReader, batch: ReadBatch, into: memoryview, offset: int, scratch: memoryview | None) -> None:
    """Fill memory with bytes of a batch's file."""
    source = tag.source(batch.file)
    try:
        got = source.read_into(into, offset) if scratch is None else source.read_once(into, offset, scratch)
    except FileNotFoundError:
        raise tag.missing(batch.file) from None  # a store that was not asked for it when it was opened
    if got < len(into):
        raise CorruptCheckpointError(
            "a payload file ends too early",
            leaf=batch.leaf(),
            file=tag.file_name(batch.file),
            expected=f"{batch.stop} bytes",
            found=f"{offset + got}",
            path=tag.root,
            tag=tag.tag,
        )


def _moves(batch: ReadBatch, data: memoryview, slots: Slots) -> Iterator[tuple[Any, Any]]:
    """What the reads of a batch want, in the slots and in `data`, the bytes of the batch: memory of the same shape."""
    plan, read = batch.plan, batch.extents.read
    low, high = batch.wanted
    in_slot, in_file = plan.at[read] + low - plan.first[read], low + plan.offset[read] - batch.start
    columns = (plan.scatter[read], plan.slot[read], in_slot, in_file, high - low)
    for scatter, slot, at, source, nbytes in zip(*(column.tolist() for column in columns), strict=True):
        if scatter < 0:
            yield slots[slot][at : at + nbytes], data[source : source + nbytes]
        else:
            yield _scattered(plan.scattered[scatter], slots[slot], data[source : source + nbytes])


def _scattered(part: Scattered, slot: memoryview, data: memoryview) -> tuple[Any, Any]:
    """A part that is no run of bytes, in its slot and in the bytes of its shard from its first to its last."""
    stored, target = runs(part.part, part.stored, part.itemsize), runs(part.part, part.wanted, part.itemsize)
    # Both sides as arrays of runs of bytes, with the same shape and each side's own strides: numpy copies them.
    outer, run = _common_runs(part, min(stored.nbytes, target.nbytes))
    shape = (*part.part.shape[:outer], run)
    file_steps = (*strides(part.stored.shape, part.itemsize)[:outer], 1)
    slot_steps = (*strides(part.wanted.shape, part.itemsize)[:outer], 1)
    in_slot = np.ndarray(shape, np.uint8, buffer=slot, offset=target.offset, strides=slot_steps)
    return in_slot, np.ndarray(shape, np.uint8, buffer=data, strides=file_steps)


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
