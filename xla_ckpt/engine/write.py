"""The write pipeline: plans in, durable payload files out, digested on the way.

Files are cut into segments (`engine.segments`). A worker gathers the regions of a segment into its aligned buffer,
digests the blocks there, and writes the segment; whoever finishes the last segment of a file puts in what stands
between the regions, and makes the file durable. Where files are written in the order of their bytes, a worker has a
whole file. Memory: one buffer a worker, whatever the size of the state.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Hashable, Iterator, Sequence

from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.feed import Extract, Feed, Wanted
from xla_ckpt.engine.garbage_collection import collector_paused
from xla_ckpt.engine.phases import Phases
from xla_ckpt.engine.segments import (
    PayloadFile,
    Segment,
    SegmentParts,
    ShardBytes,
    complete_segment,
    gather,
    segment_parts,
    segments_of,
    tasks_of,
)
from xla_ckpt.errors import StorageError
from xla_ckpt.manifest import digest as digests
from xla_ckpt.manifest.records import FileRecord
from xla_ckpt.plan.save_plan import SavePlan, Written
from xla_ckpt.snapshot.arena import BUDGET_BYTES
from xla_ckpt.snapshot.freezing import Deferred
from xla_ckpt.storage.base import BLOCK, Directory
from xla_ckpt.storage.pool import BUFFER_BYTES, threads, work_off
from xla_ckpt.storage.small_files import write_small

WRITERS = 8
"""Threads that write, if the machine has the cores."""

SIDE_BY_SIDE = 64
"""Files that are written place by place, at most: as many as one process has devices, and few enough to have open."""


def write_files(
    directory: Directory,
    plan: SavePlan,
    memory: ShardBytes,
    crew: Crew | None = None,
    *,
    segment_bytes: int = BUFFER_BYTES,
    budget: int = BUDGET_BYTES,
) -> Written:
    """Write the payload files of a plan.

    Returns when every file is durable; the names in `directory` are not yet (`Directory.sync`). What is `Deferred` is
    copied ahead of the writers, into `budget` bytes of host memory at most.

    Raises:
        SaveError: A copy from the program's memory failed, or came too late.
        OSError: The storage refused. Files that were begun are left for the owner of the directory to remove.
    """
    with collector_paused():
        files = [PayloadFile(plan, memory, segment_bytes) for plan in plan.files]
    segments = list(segments_of(files, segment_bytes))
    largest = max((s.stop - s.start for s in segments), default=0)
    crew = Crew() if crew is None else crew
    phases = crew.phases

    deferred = [source for source in memory.values() if isinstance(source, Deferred)]
    if deferred and directory.streaming is None:
        # The shards of an array lie at about the same places of several files. Where they can only be copied together,
        # the copy would be needed until the last file is written.
        segments.sort(key=lambda segment: (segment.file // SIDE_BY_SIDE, segment.start))
    feed = Feed(_wanted(files, segments) if deferred else {}, deferred, budget)

    streaming = directory.streaming
    tasks = tasks_of(files, segments, streamed=streaming is not None)

    @contextlib.contextmanager
    def image(segment: Segment, buffer: memoryview) -> Iterator[tuple[memoryview, SegmentParts]]:
        """The bytes of a segment but for its glue, and what of the regions they are."""
        file, began = files[segment.file], time.perf_counter()
        if segment not in feed:
            parts = gather(file, segment, buffer)
            _add_copy(phases, file, began, parts)
            yield buffer, parts
            return
        piece = feed.image(segment, buffer)
        try:
            parts = segment_parts(file, segment)
            _add_copy(phases, file, began, parts)
            yield piece.memory.data, parts
        finally:
            piece.give_back()

    def chunks(task: Sequence[Segment], buffer: memoryview) -> Iterator[memoryview]:
        """The bytes of a file, segment after segment."""
        for segment in task:
            file, nbytes = files[segment.file], segment.stop - segment.start
            with image(segment, buffer) as (data, parts):
                complete_segment(file, segment, data, parts, phases)
                began = time.perf_counter()
                yield data[:nbytes]
            ended = time.perf_counter()
            phases.add("write", ended - began, nbytes, ended=ended, about=file.plan.path)
            crew.progress(parts.nbytes)

    def write(task: Sequence[Segment], buffer: memoryview) -> None:
        file = files[task[0].file]
        if streaming is not None and file.streamed:
            streaming.stream(file.plan.path, file.size, chunks(task, buffer))
            if file.record is None:
                file.finish()
            return
        for segment in task:
            with image(segment, buffer) as (data, parts):
                crew.progress(_write_segment(file, directory, segment, data, parts, phases))

    try:
        with feed:
            work_off(
                tasks,
                write,
                workers=min(1 if deferred and streaming is not None else threads(crew.workers, 3), len(tasks)) or 1,
                buffer_bytes=-(-largest // BLOCK) * BLOCK,
                name="xla_ckpt-write",
            )
    finally:
        for file in files:
            if file.sink is not None:
                file.sink.abandon()
    with collector_paused():
        return Written.of(plan.files, [file.record for file in files if file.record is not None])


def check_space(directory: Directory, plan: SavePlan) -> None:
    """Find out whether the files of a plan have room, before the first byte of them is written.

    Quotas are not known to it. They are found out when the first file is made, which reserves its blocks.

    Raises:
        StorageError: They have not.
    """
    needed, free = sum(file.codec.size for file in plan.files), directory.free()
    if free is not None and needed > free:
        error = StorageError(
            "the files of this rank have no room: No space left on device",
            expected=f"{needed} free bytes",
            found=free,
            hint="Delete older tags, keep fewer of them (num_kept_ckpts), or save somewhere else.",
        )
        error.errno = errno.ENOSPC
        raise error


def write_objects(directory: Directory, objects: Sequence[bytes], rank: int, world: int) -> list[FileRecord]:
    """Write a rank's pickled objects, a durable file each; their records, in order.

    Raises:
        OSError: The storage refused.
    """
    called = (f"objects/{rank + 1:05d}-of-{world:05d}-{i + 1:05d}.pickle" for i in range(len(objects)))
    return write_records(directory, [*zip(called, objects, strict=True)])


def write_records(directory: Directory, files: Sequence[tuple[str, bytes]]) -> list[FileRecord]:
    """Write small files by path, as `write_record` does; their records, in order.

    Several at a time: each waits for the disk, which makes many files durable in one go.

    Raises:
        OSError: The storage refused.
    """
    records: list[FileRecord | None] = [None] * len(files)

    def write(number: int, _: memoryview) -> None:
        records[number] = write_record(directory, *files[number])

    workers = min(threads(WRITERS, 3), len(files)) or 1
    work_off(range(len(files)), write, workers=workers, buffer_bytes=0, name="xla_ckpt-write")
    return [record for record in records if record is not None]


def write_record(directory: Directory, path: str, data: bytes) -> FileRecord:
    """Write a small file, durably; the record by which it is verified as a whole.

    Raises:
        OSError: The storage refused.
    """
    write_small(directory, path, data)
    return FileRecord(path=path, size=len(data), head=len(data), digest=digests.digest(data))


def _add_copy(phases: Phases, file: PayloadFile, began: float, parts: SegmentParts) -> None:
    copied = time.perf_counter()
    phases.add("copy", copied - began, parts.nbytes, ended=copied, about=file.plan.path)


def _wanted(files: Sequence[PayloadFile], segments: Sequence[Segment]) -> dict[Hashable, Wanted]:
    """What is in the image of each segment that has bytes of deferred shards."""
    images: dict[Hashable, Wanted] = {}
    for segment in segments:
        file = files[segment.file]
        parts = segment_parts(file, segment)
        extracts = [
            Extract(at, file.sources[region], file.offsets[region] + low, high - low) for region, at, low, high in parts
        ]
        if any(isinstance(extract.source, Deferred) for extract in extracts):
            images[segment] = Wanted(segment.stop - segment.start, extracts)
    return images


def _write_segment(
    file: PayloadFile,
    directory: Directory,
    segment: Segment,
    buffer: memoryview,
    parts: SegmentParts,
    phases: Phases,
) -> int:
    """Write one segment of a file, which is in `buffer`; returns how many bytes of regions are in it."""
    nbytes, path = segment.stop - segment.start, file.plan.path
    with phases.timed("write", about=path):  # making the file
        sink = file.opened(directory)
    complete_segment(file, segment, buffer, parts, phases)
    with phases.timed("write", nbytes, about=path):
        sink.write(buffer, nbytes, segment.start)
    with file.lock:
        file.left -= 1
        last = file.left == 0
    if last:
        if file.record is None:
            for at, text in file.finish():
                sink.patch(text, at)
        with phases.timed("fsync", files=1, about=path):
            sink.commit()
    return parts.nbytes
