"""Read and verify the blocks of a restore plan, with a thread pool.

Bytes that go directly into their destination are verified there; all others are staged in the buffer of a worker,
verified, and copied. Every digest block is compared with its digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from xla_ckpt.core.checksum import compute_block_sizes, compute_digest, to_hex
from xla_ckpt.core.plan.restore_plan import ReadBatch, RestorePlan, ScatteredPart, plan_read_batches
from xla_ckpt.core.sharding.box import IntArray
from xla_ckpt.core.sharding.memory_layout import compute_runs, compute_strides
from xla_ckpt.errors import CheckpointError, CorruptCheckpointError, UnprovenLoadError
from xla_ckpt.garbage_collection import pause_gc
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.progress import IoContext
from xla_ckpt.reports import PhaseRecorder
from xla_ckpt.snapshot.memory import SlabAllocator
from xla_ckpt.storage.threads import HUGE_PAGE_BYTES, get_worker_count, run_tasks

SCRATCH_BYTES = HUGE_PAGE_BYTES
"""Number of bytes of each uncached read of a thread: into one huge page (see `run_tasks`)."""

_MISMATCH_HINT = (
    "Load again, into new memory or on another device; if the error returns, the device, or the program that writes to "
    "this memory, is at fault. The load cannot be undone: the objects have their new state, with these bytes wrong."
)

Buffers = Sequence[memoryview]
"""Memory of the requested boxes: writable bytes in C order, by `ReadRequest.slot`."""


def read_into(
    tag: TagReader,
    plan: RestorePlan,
    buffers: Buffers,
    io: IoContext | None = None,
    *,
    slabs: SlabAllocator | None = None,
) -> None:
    """Fill the slots from the tag, verifying every block.

    `slabs` is the allocator of slots in new memory.

    Raises:
        CorruptCheckpointError: A block differs from the saved bytes. Slots may be partly filled then.
        OSError: The storage failed.
    """
    io = IoContext() if io is None else io

    def work(batch: ReadBatch, memory: memoryview) -> None:
        scratch, buffer = memory[:SCRATCH_BYTES], memory[SCRATCH_BYTES:]
        if batch.is_direct:
            _read_direct(tag, batch, buffers, scratch, io.phases, slabs)
        else:
            _read_staged(tag, batch, buffer, buffers, scratch, io.phases)
        io.progress(batch.nbytes)

    _run_batches(tag, plan, work, io.workers, direct=True, scratch=SCRATCH_BYTES)


def verify_reads(
    tag: TagReader,
    plan: RestorePlan,
    io: IoContext | None = None,
    *,
    on_problem: Callable[[CorruptCheckpointError], None] | None = None,
) -> None:
    """Verify everything that the plan would read, without keeping the bytes.

    Raises:
        CorruptCheckpointError: A block differs from the saved bytes; with `on_problem`, that is called instead.
        OSError: The storage failed.
    """
    io = IoContext() if io is None else io

    def work(batch: ReadBatch, buffer: memoryview) -> None:
        try:
            _read_blocks(tag, batch, buffer, None, io.phases, keep=False)
        except CorruptCheckpointError as error:
            if on_problem is None:
                raise
            on_problem(error)
        io.progress(batch.nbytes)

    _run_batches(tag, plan, work, get_worker_count(io.workers, 3), direct=False)


def verify_loaded(tag: TagReader, plan: RestorePlan, buffers: Buffers, io: IoContext) -> None:
    """Compare memory with the bytes that the plan would read into it.

    Each stored block must have its digest when it is filled with the bytes of the slots.

    No two reads of the plan may request the same stored bytes. The rest of partly requested blocks is read again, and
    blocks of foreign files without digests are read completely.

    Raises:
        UnprovenLoadError: The bytes in a slot differ.
        CorruptCheckpointError: Bytes that are read again differ from the saved bytes.
        OSError: The storage failed.
    """

    def work(batch: ReadBatch, buffer: memoryview) -> None:
        data, blocks = buffer[: batch.stop - batch.start], DigestBlocks.from_batch(batch)
        expected, every = blocks.get_stored_digests(tag), range(len(blocks))
        if expected is None or not batch.is_fully_wanted:
            _read_blocks(tag, batch, data, None, io.phases)
        if expected is None:
            expected = blocks.compute_digests(data, every)
        with io.phases.measure("prove", batch.nbytes):
            for in_slot, in_file in _match_copies(batch, data, buffers):
                in_file[:] = in_slot
            problem = "after the load, memory holds other bytes than the tag"
            blocks.compare(tag, expected, data, UnprovenLoadError, problem, lambda: _MISMATCH_HINT, every)
        io.progress(batch.nbytes)

    _run_batches(tag, plan, work, io.workers, direct=False)


def _run_batches(
    tag: TagReader,
    plan: RestorePlan,
    work: Callable[[ReadBatch, memoryview], None],
    workers: int,
    *,
    direct: bool,
    scratch: int = 0,
) -> None:
    """Run the read batches, each worker with `scratch` bytes and a buffer for the largest batch."""
    costs = tag.directory.costs
    with pause_gc():
        batches = plan_read_batches(plan, direct=direct, costs=costs)
    largest = max((b.stop - b.start for b in batches if not b.is_direct), default=0)
    run_tasks(
        batches,
        work,
        workers=min(costs.concurrent_reads or workers, len(batches)) or 1,
        buffer_bytes=scratch + largest,
        name="xla_ckpt-read",
    )


def _read_direct(
    tag: TagReader,
    batch: ReadBatch,
    buffers: Buffers,
    scratch: memoryview,
    phases: PhaseRecorder,
    slabs: SlabAllocator | None,
) -> None:
    """Read a batch into its destination, and verify it there."""
    plan, read = batch.plan, batch.extents.plan_row[0]
    # From an offset in the file to one in the slot.
    shift = int(plan.slot_offset[read] - plan.shard_offset[read] - plan.offset[read])
    into = buffers[plan.slot[read]][batch.start + shift : batch.stop + shift]
    if slabs is not None:
        with phases.measure("read", about=batch.get_leaf()):
            slabs.touch_pages(into)
    _read_blocks(tag, batch, into, scratch, phases)


def _read_staged(
    tag: TagReader, batch: ReadBatch, buffer: memoryview, buffers: Buffers, scratch: memoryview, phases: PhaseRecorder
) -> None:
    """Read a batch into the buffer, verify it, and copy the requested parts to their destinations."""
    data = buffer[: batch.stop - batch.start]
    _read_blocks(tag, batch, data, scratch, phases)
    with phases.measure("read"):
        for in_slot, in_file in _match_copies(batch, data, buffers):
            in_slot[:] = in_file


def _read_blocks(
    tag: TagReader,
    batch: ReadBatch,
    memory: memoryview,
    scratch: memoryview | None,
    phases: PhaseRecorder,
    *,
    keep: bool = True,
) -> None:
    """Read the blocks of a batch, and compare each with its digest. Some foreign files have no digests.

    Blocks are read in pieces, so that the bytes are still in the processor's cache when they are digested.

    Args:
        tag: Reader of the tag.
        batch: Batch to read.
        memory: Memory for the bytes of the batch; if they are not kept, at least for one piece.
        scratch: Scratch memory for `FileReader.read_once`. None if the bytes will be read again.
        phases: Recorder of the time spent.
        keep: Keep all bytes in the memory. If False, each piece overwrites the previous one.
    """
    blocks, about = (
        DigestBlocks.from_batch(batch),
        batch.get_leaf() if batch.is_direct else tag.get_file_name(batch.file),
    )
    expected = blocks.get_stored_digests(tag)
    for rows, start, stop in blocks.split_into_pieces(tag.directory.costs.chunk_bytes):
        at = start - batch.start if keep else 0
        data = memory[at : at + stop - start]
        with phases.measure("read", len(data), about=about):
            _fill_memory(tag, batch, data, start, scratch)
        with phases.measure("verify", len(data), about=about):
            if expected is not None:
                blocks.compare(
                    tag, expected, data, CorruptCheckpointError, "stored bytes are damaged", lambda: tag.hint, rows
                )


def _fill_memory(tag: TagReader, batch: ReadBatch, into: memoryview, offset: int, scratch: memoryview | None) -> None:
    """Fill memory with bytes of a batch's file."""
    source = tag.open_file(batch.file)
    try:
        got = source.read_into(into, offset) if scratch is None else source.read_once(into, offset, scratch)
    except FileNotFoundError:
        raise tag.make_missing_error(batch.file) from None  # a store that did not check the file when it was opened
    if got < len(into):
        raise CorruptCheckpointError(
            "a payload file ends too early",
            leaf=batch.get_leaf(),
            file=tag.get_file_name(batch.file),
            expected=f"{batch.stop} bytes",
            found=f"{offset + got}",
            path=tag.root,
            tag=tag.tag,
        )


def _match_copies(batch: ReadBatch, data: memoryview, buffers: Buffers) -> Iterator[tuple[Any, Any]]:
    """Yield the requested parts of a batch, as memory of the same shape in the slots and in `data`."""
    plan, read = batch.plan, batch.extents.plan_row
    low, high = batch.wanted_ranges
    in_slot, in_file = plan.slot_offset[read] + low - plan.shard_offset[read], low + plan.offset[read] - batch.start
    columns = (plan.scattered_index[read], plan.slot[read], in_slot, in_file, high - low)
    for scatter, slot, at, source, nbytes in zip(*(column.tolist() for column in columns), strict=True):
        if scatter < 0:
            yield buffers[slot][at : at + nbytes], data[source : source + nbytes]
        else:
            yield _map_scattered(plan.scattered_parts[scatter], buffers[slot], data[source : source + nbytes])


def _map_scattered(part: ScatteredPart, slot: memoryview, data: memoryview) -> tuple[Any, Any]:
    """Return views of a non-contiguous part, in its slot and in the bytes of its shard from first to last."""
    stored, target = (
        compute_runs(part.part_box, part.stored_box, part.itemsize),
        compute_runs(part.part_box, part.memory_box, part.itemsize),
    )
    # Both sides are arrays of runs of bytes, of the same shape with different strides: numpy copies them.
    outer, run = _compute_common_runs(part, min(stored.run_bytes, target.run_bytes))
    shape = (*part.part_box.shape[:outer], run)
    file_steps = (*compute_strides(part.stored_box.shape, part.itemsize)[:outer], 1)
    slot_steps = (*compute_strides(part.memory_box.shape, part.itemsize)[:outer], 1)
    in_slot = np.ndarray(shape, np.uint8, buffer=slot, offset=target.offset, strides=slot_steps)
    return in_slot, np.ndarray(shape, np.uint8, buffer=data, strides=file_steps)


def _compute_common_runs(part: ScatteredPart, nbytes: int) -> tuple[int, int]:
    """Return (outer dims, bytes of a run) of a part that has runs of at least `nbytes` bytes on both sides.

    The inner dims that make up these bytes are one run in the shard and in the slot. The outer dims count the runs.
    """
    outer, run = len(part.part_box.shape), part.itemsize
    while outer > 0 and run < nbytes:
        outer -= 1
        run *= part.part_box.shape[outer]
    return outer, run


@dataclass(frozen=True, slots=True, eq=False)
class DigestBlocks:
    """Digest blocks of a batch, one row per block."""

    batch: ReadBatch
    extent: IntArray
    """Row of the extent that contains the block."""

    block: IntArray
    """Index of the block in its shard."""

    begin: IntArray
    """File offset of the first byte."""

    end: IntArray
    """File offset of the end, exclusive."""

    @classmethod
    def from_batch(cls, batch: ReadBatch) -> DigestBlocks:
        extents = batch.extents
        counts = extents.stop_block - extents.first_block
        extent = np.repeat(np.arange(len(extents)), counts)
        # Counted from the first block of the extent.
        block = np.arange(len(extent)) - np.repeat(np.cumsum(counts) - counts, counts)
        size = compute_block_sizes(batch.plan.shard_bytes[extents.plan_row])[extent]
        begin = extents.start[extent] + block * size
        return cls(
            batch, extent, extents.first_block[extent] + block, begin, np.minimum(begin + size, extents.stop[extent])
        )

    def __len__(self) -> int:
        return len(self.extent)

    def get_stored_digests(self, tag: TagReader) -> list[int] | None:
        """Return the digests that the tag contains; None if it contains none."""
        table = tag.get_digest_table(self.batch.file)
        if table is None:
            return None
        plan, read = self.batch.plan, self.batch.extents.plan_row
        first = table.find_first_digests(plan.offset[read], plan.shard_bytes[read])
        digests: list[int] = table.digests[first[self.extent] + self.block].tolist()
        return digests

    def split_into_pieces(self, nbytes: int) -> Iterator[tuple[range, int, int]]:
        """Yield (rows, file offset of their first byte, file offset of their end) of blocks that are read together.

        A piece has about `nbytes` bytes, or more if single blocks are larger.
        """
        ahead, behind = np.minimum.accumulate(self.begin[::-1])[::-1], np.maximum.accumulate(self.end)
        number = (self.begin - self.batch.start) // nbytes
        # Several reads may request the same block: it is in the piece of all of them.
        cuts = np.flatnonzero((ahead[1:] >= behind[:-1]) & (number[1:] != number[:-1])) + 1
        for first, last in pairwise([0, *cuts.tolist(), len(number)]):
            yield range(first, last), int(self.begin[first]), int(behind[last - 1])

    def compute_digests(self, data: memoryview, rows: range) -> list[int]:
        """Return the digests of some blocks, whose bytes, from the first byte of the first block on, are `data`."""
        start = int(self.begin[rows.start])
        begin, end = self.begin[rows.start : rows.stop].tolist(), self.end[rows.start : rows.stop].tolist()
        return [compute_digest(data[a - start : b - start]) for a, b in zip(begin, end, strict=True)]

    def compare(
        self,
        tag: TagReader,
        expected: list[int],
        data: memoryview,
        error: type[CheckpointError],
        problem: str,
        hint: Callable[[], str],
        rows: range,
    ) -> None:
        """Raise an error if the digests of some blocks, whose bytes are `data`, differ from `expected`.

        `expected` contains the digests of all blocks. The hint is computed only for an error, because finding the
        parity takes a request to the storage.
        """
        for bad, actual in zip(rows, self.compute_digests(data, rows), strict=True):
            if actual != expected[bad]:
                raise error(
                    f"{problem}: block {self.block[bad]} of a shard, bytes {self.begin[bad]} to {self.end[bad]} of "
                    "the file",
                    leaf=self.batch.get_leaf(int(self.extent[bad])),
                    file=tag.get_file_name(self.batch.file),
                    path=tag.root,
                    tag=tag.tag,
                    expected=f"digest {to_hex(expected[bad])}",
                    found=to_hex(actual),
                    hint=hint(),
                )
