"""The read pipeline: a restore plan in, verified bytes in the caller's memory out.

What goes straight into its destination (see `plan.batches`) is verified there, everything else in a worker's buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.garbage_collection import collector_paused
from xla_ckpt.engine.phases import Phases
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import CheckpointError, CorruptCheckpointError, UnprovenLoadError
from xla_ckpt.manifest.digest import DigestColumn, block_sizes, digest, to_hex
from xla_ckpt.plan.batches import ReadBatch, batches_of
from xla_ckpt.plan.restore_plan import RestorePlan, Scattered
from xla_ckpt.sharding.corners import Ints
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
        data, blocks = buffer[: batch.stop - batch.start], _Blocks.of(batch)
        expected = blocks.stored(tag)
        if expected is None or not batch.is_wanted_whole:
            _read_through(tag, batch, buffer, None, None, crew.phases)
        if expected is None:
            expected = blocks.digests(data)
        with crew.phases.timed("prove", batch.nbytes):
            for in_slot, in_file in _moves(batch, data, slots):
                in_file[:] = in_slot
            blocks.compare(
                tag,
                expected,
                data,
                UnprovenLoadError,
                "after the load, memory holds other bytes than the tag",
                "Load again, into new memory or on another device; if the error returns, the device, or the program "
                "that writes to this memory, is at fault. The load cannot be undone: the objects have their new state, "
                "with these bytes wrong.",
            )
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
    blocks = _Blocks.of(batch)
    if (expected := blocks.stored(tag)) is not None:
        blocks.compare(tag, expected, data, CorruptCheckpointError, "stored bytes are damaged", tag.hint)


@dataclass(frozen=True, slots=True, eq=False)
class _Blocks:
    """The digest blocks of a batch: a row for each."""

    batch: ReadBatch
    extent: Ints
    """Row of the extent that it belongs to."""

    number: Ints
    """Which of the blocks of its shard it is."""

    begin: Ints
    """File offset of the first byte."""

    end: Ints
    """File offset of one past the last byte."""

    @classmethod
    def of(cls, batch: ReadBatch) -> _Blocks:
        extents = batch.extents
        counts = extents.last - extents.first
        extent = np.repeat(np.arange(len(extents)), counts)
        # Counted from the first block of the extent.
        block = np.arange(len(extent)) - np.repeat(np.cumsum(counts) - counts, counts)
        size = block_sizes(batch.plan.shard[extents.read])[extent]
        begin = extents.start[extent] + block * size
        return cls(batch, extent, extents.first[extent] + block, begin, np.minimum(begin + size, extents.stop[extent]))

    def stored(self, tag: TagReader) -> DigestColumn | None:
        """Their digests, as the tag has them; None if it has none."""
        table = tag.digest_table(self.batch.file)
        if table is None:
            return None
        plan, read = self.batch.plan, self.batch.extents.read
        first = table.find(plan.offset[read], plan.shard[read])
        digests: DigestColumn = table.digests[first[self.extent] + self.number]
        return digests

    def digests(self, data: memoryview) -> DigestColumn:
        """Their digests, if `data` are the bytes of the batch."""
        start = self.batch.start
        places = zip((self.begin - start).tolist(), (self.end - start).tolist(), strict=True)
        return np.array([digest(data[a:b]) for a, b in places], np.uint64)

    def compare(
        self,
        tag: TagReader,
        expected: DigestColumn,
        data: memoryview,
        error: type[CheckpointError],
        problem: str,
        hint: str | None,
    ) -> None:
        """Raise an error if a block of the batch, whose bytes are `data`, has another digest than is expected."""
        actual = self.digests(data)
        different = np.flatnonzero(actual != expected)
        if different.size:
            bad = int(different[0])
            begin, end = self.begin[bad], self.end[bad]
            raise error(
                f"{problem}: block {self.number[bad]} of a shard, bytes {begin} to {end} of the file",
                leaf=self.batch.leaf(int(self.extent[bad])),
                file=tag.file_name(self.batch.file),
                path=tag.root,
                tag=tag.tag,
                expected=f"digest {to_hex(int(expected[bad]))}",
                found=to_hex(int(actual[bad])),
                hint=hint,
            )


def _distribute(batch: ReadBatch, data: memoryview, slots: Slots) -> None:
    """Copy what the reads of a batch want, whose bytes are `data`, to its places in the slots."""
    for in_slot, in_file in _moves(batch, data, slots):
        in_slot[:] = in_file


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
