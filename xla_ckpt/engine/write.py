"""The write pipeline: plans in, durable payload files out, digested on the way.

Files are cut into segments. A worker gathers the regions of a segment into its aligned buffer, digests the blocks
that begin there, and writes the segment; whoever finishes the last segment of a file writes its header and makes it
durable. Memory: one buffer a worker, whatever the size of the state.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from xla_ckpt.crew import BUFFER_BYTES, threads, work_off
from xla_ckpt.format import digest as digests
from xla_ckpt.format import payload
from xla_ckpt.format.manifest import FileRecord
from xla_ckpt.plan.save_plan import FilePlan, SavePlan, Written, stored_shards
from xla_ckpt.storage.base import BLOCK, Directory, Sink

WRITERS = 8
"""Threads that write, if the machine has the cores."""

COPY_WITHOUT_GIL = 64 * 1024
"""From this size on a copy goes through numpy, which releases the interpreter lock."""

Memory = Mapping[tuple[str, int], memoryview]
"""(leaf path, local shard) -> its bytes in C order, unchanging until the save is done."""

Progress = Callable[[int], None]
"""Called with the number of bytes that have just been dealt with, from any thread."""


@dataclass(slots=True)
class _File:
    """A payload file on its way to the disk."""

    plan: FilePlan
    sink: Sink
    head: bytes
    size: int
    starts: list[int]
    """File offset of each non-empty region, ascending."""
    sources: list[memoryview]
    """Bytes of each non-empty region."""
    first_block: list[int]
    """Index of the first digest of each non-empty region."""
    digests: list[int]
    left: int
    """Segments that are still to be written."""
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class _Segment:
    file: int
    start: int
    stop: int


def write_files(
    directory: Directory,
    plan: SavePlan,
    memory: Memory,
    *,
    workers: int = WRITERS,
    progress: Progress = lambda _: None,
    segment_bytes: int = BUFFER_BYTES,
) -> Written:
    """Write the payload files of a plan.

    Returns when every file is durable; the names in `directory` are not yet (`Directory.sync`).

    Raises:
        OSError: The storage refused. Files that were begun are left for the owner of the directory to remove.
    """
    files: list[_File] = []
    try:
        files += [_begin(directory, file, memory, segment_bytes) for file in plan.files]
        segments = list(_segments(files, segment_bytes))
        largest = max((s.stop - s.start for s in segments), default=0)

        def write(segment: _Segment, buffer: memoryview) -> None:
            _write_segment(files[segment.file], segment, buffer)
            progress(segment.stop - segment.start)

        work_off(
            segments, write, workers=min(threads(workers, 3), len(segments)) or 1,
            buffer_bytes=-(-largest // BLOCK) * BLOCK, name="xla_ckpt-write",
        )  # fmt: skip
    finally:
        for file in files:
            file.sink.abandon()
    records = tuple(FileRecord(f.plan.path, f.size, len(f.head), digests.digest(f.head)) for f in files)
    shards = [
        (leaf, shard.box, shard.file, shard.offset)
        for number, f in enumerate(files)
        for leaf, shard in stored_shards(f.plan, len(f.head), number)
    ]
    return Written(records, tuple(shards))


def _begin(directory: Directory, plan: FilePlan, memory: Memory, segment_bytes: int) -> _File:
    head = payload.header(plan.regions)
    starts, sources, first_block, blocks = [], [], [], 0
    for region, source, at in zip(plan.regions, plan.sources, payload.offsets(plan.regions), strict=True):
        if region.nbytes:
            starts.append(len(head) + at)
            sources.append(memory[source.leaf, source.shard][source.offset : source.offset + source.nbytes])
            first_block.append(blocks)
            blocks += digests.block_count(region.nbytes)
    size = len(head) + plan.data_bytes
    segments = -(-plan.data_bytes // segment_bytes) or 1
    return _File(
        plan, directory.create(plan.path, size), head, size, starts, sources, first_block, [0] * blocks, segments
    )


def _segments(files: Sequence[_File], segment_bytes: int) -> Iterator[_Segment]:
    for number, file in enumerate(files):
        first = len(file.head)
        for start in range(first, max(file.size, first + 1), segment_bytes):
            yield _Segment(number, start, min(start + segment_bytes, file.size))


def _write_segment(file: _File, segment: _Segment, buffer: memoryview) -> None:
    i = max(bisect_right(file.starts, segment.start) - 1, 0)
    while i < len(file.starts) and file.starts[i] < segment.stop:
        start, source = file.starts[i], file.sources[i]
        low, high = max(segment.start, start), min(segment.stop, start + len(source))
        if low < high:
            _copy(buffer[low - segment.start : high - segment.start], source[low - start : high - start])
            _digest_blocks(file, i, low - start, high - start)
        i += 1
    if segment.stop > segment.start:
        file.sink.write(buffer, segment.stop - segment.start, segment.start)
    with file.lock:
        file.left -= 1
        last = file.left == 0
    if last:
        file.head = payload.header(file.plan.regions, file.digests)
        file.sink.write(_aligned(file.head), len(file.head), 0)
        file.sink.commit()


def _copy(target: memoryview, source: memoryview) -> None:
    if len(source) < COPY_WITHOUT_GIL:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _digest_blocks(file: _File, i: int, low: int, high: int) -> None:
    """Digest the blocks of region `i` that begin at `low <= byte < high` of it; a block may reach further."""
    source = file.sources[i]
    block = digests.block_size(len(source))
    for b in range(-(-low // block), -(-high // block)):
        file.digests[file.first_block[i] + b] = digests.digest(source[b * block : (b + 1) * block])


def _aligned(data: bytes) -> memoryview:
    """A page-aligned copy."""
    import mmap

    buffer = mmap.mmap(-1, len(data))
    buffer[:] = data
    return memoryview(buffer)
