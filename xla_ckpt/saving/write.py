"""Write the payload files of a rank: gather, digest and write segments with a thread pool.

Files are split into segments. A worker gathers the regions of a segment into its aligned buffer, digests their blocks,
and writes the segment; the worker that completes the last segment of a file adds the bytes between the regions and
makes the file durable. If the storage streams files sequentially, one worker writes a whole file. Memory use is one
buffer per worker, independent of the size of the state.

If the snapshot is still in the program's memory or on a device, a `Prefetcher` copies the segments ahead of the
writers into an arena of host memory, in the order in which they are written. The program may write to that memory
again as soon as it is copied.

All ranks write to one draft directory, which rank 0 creates. A host that does not see the directory raises an error.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from types import TracebackType

import numpy as np

from xla_ckpt.core import checksum as digests
from xla_ckpt.core.checksum import OutOfOrderDigest, combine_crc32, compute_crc32
from xla_ckpt.core.files.file_layout import Framing, get_static_framing
from xla_ckpt.core.manifest.manifest import FileRecord
from xla_ckpt.core.plan.save_plan import FilePlan, RegionSourceTable, SavePlan, WriteResult
from xla_ckpt.core.sharding.box import IntArray
from xla_ckpt.errors import CheckpointError, SaveError, StorageError
from xla_ckpt.garbage_collection import pause_gc
from xla_ckpt.progress import IoContext
from xla_ckpt.reports import PhaseRecorder
from xla_ckpt.snapshot.arena import BUDGET_BYTES, Arena, ArenaBlock
from xla_ckpt.snapshot.memory import ByteArray
from xla_ckpt.snapshot.shards import HOST_COPY_ENGINE, CopyEngine
from xla_ckpt.snapshot.snapshot import LazyShard
from xla_ckpt.storage.base import BLOCK_BYTES, Directory, FileWriter, get_file_size, write_file
from xla_ckpt.storage.threads import WORKER_BUFFER_BYTES, Worker, get_worker_count, run_tasks
from xla_ckpt.tags.root import Root

WRITER_THREADS = 8
"""Maximum number of writer threads; fewer if the machine has fewer cores."""

MAX_INTERLEAVED_FILES = 64
"""Maximum number of files written interleaved: as many as one process has devices, and few enough to keep open."""


def write_files(
    directory: Directory,
    plan: SavePlan,
    memory: ShardBytes,
    io: IoContext | None = None,
    *,
    segment_bytes: int = WORKER_BUFFER_BYTES,
    budget: int = BUDGET_BYTES,
) -> WriteResult:
    """Write the payload files of a plan.

    Returns when every file is durable; their names in `directory` are not durable until `Directory.sync`. Each
    `LazyShard` is copied ahead of the writers, into at most `budget` bytes of host memory.

    Raises:
        SaveError: A copy from the program's memory failed, or came too late.
        OSError: The storage failed. Incomplete files are left for the owner of the directory to remove.
    """
    with pause_gc():
        files = [PayloadFile(plan, memory, segment_bytes) for plan in plan.files]
    segments = list(split_into_segments(files, segment_bytes))
    largest = max((s.stop - s.start for s in segments), default=0)
    io = IoContext() if io is None else io
    phases = io.phases

    deferred = [source for source in memory.values() if isinstance(source, LazyShard)]
    if deferred and directory.streaming is None:
        # The shards of an array have similar offsets in several files. Without this order, shards that can only be
        # copied together would stay in memory until the last file is written.
        segments.sort(key=lambda segment: (segment.file // MAX_INTERLEAVED_FILES, segment.start))
    feed = Prefetcher(_plan_copies(files, segments) if deferred else {}, deferred, budget)

    streaming = directory.streaming
    tasks = group_into_tasks(files, segments, streamed=streaming is not None)

    @contextlib.contextmanager
    def image(segment: Segment, buffer: memoryview) -> Iterator[tuple[memoryview, SegmentParts]]:
        """Yield the bytes of a segment without its framing, and the parts of regions that it contains."""
        file, began = files[segment.file], time.perf_counter()
        if segment not in feed:
            parts = gather(file, segment, buffer)
            _record_copy(phases, file, began, parts)
            yield buffer, parts
            return
        piece = feed.fetch(segment, buffer)
        try:
            parts = find_segment_parts(file, segment)
            _record_copy(phases, file, began, parts)
            yield piece.memory.data, parts
        finally:
            piece.release()

    def chunks(task: Sequence[Segment], buffer: memoryview) -> Iterator[memoryview]:
        """Yield the bytes of a file, segment by segment."""
        for segment in task:
            file, nbytes = files[segment.file], segment.stop - segment.start
            with image(segment, buffer) as (data, parts):
                complete_segment(file, segment, data, parts, phases)
                began = time.perf_counter()
                yield data[:nbytes]
            ended = time.perf_counter()
            phases.add("write", ended - began, nbytes, ended=ended, about=file.plan.path)
            io.progress(parts.nbytes)

    def write(task: Sequence[Segment], buffer: memoryview) -> None:
        file = files[task[0].file]
        if streaming is not None and file.is_streamable:
            streaming.stream(file.plan.path, file.size, chunks(task, buffer))
            if file.record is None:
                file.finish()
            return
        for segment in task:
            with image(segment, buffer) as (data, parts):
                io.progress(_write_segment(file, directory, segment, data, parts, phases))

    try:
        with feed:
            run_tasks(
                tasks,
                write,
                workers=min(1 if deferred and streaming is not None else get_worker_count(io.workers, 3), len(tasks))
                or 1,
                buffer_bytes=-(-largest // BLOCK_BYTES) * BLOCK_BYTES,
                name="xla_ckpt-write",
            )
    finally:
        for file in files:
            if file.sink is not None:
                file.sink.abort()
    with pause_gc():
        return WriteResult.from_records(plan.files, [file.record for file in files if file.record is not None])


def check_space(directory: Directory, plan: SavePlan) -> None:
    """Check that the files of a plan fit into the free space, before the first byte is written.

    Quotas are not visible here. They are detected when the first file is created, which reserves its blocks.

    Raises:
        StorageError: The free space is not sufficient.
    """
    needed, free = sum(file.layout.size for file in plan.files), directory.get_free_bytes()
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
    """Write each pickled object of a rank to a durable file, and return the records, in order.

    Raises:
        OSError: The storage failed.
    """
    called = (f"objects/{rank + 1:05d}-of-{world:05d}-{i + 1:05d}.pickle" for i in range(len(objects)))
    return write_records(directory, [*zip(called, objects, strict=True)])


def write_records(directory: Directory, files: Sequence[tuple[str, bytes]]) -> list[FileRecord]:
    """Write small files by path, as `write_record` does, and return their records, in order.

    Files are written in parallel: each write waits for the disk, which makes many files durable in one flush.

    Raises:
        OSError: The storage failed.
    """
    records: list[FileRecord | None] = [None] * len(files)

    def write(number: int, _: memoryview) -> None:
        records[number] = write_record(directory, *files[number])

    workers = min(get_worker_count(WRITER_THREADS, 3), len(files)) or 1
    run_tasks(range(len(files)), write, workers=workers, buffer_bytes=0, name="xla_ckpt-write")
    return [record for record in records if record is not None]


def write_record(directory: Directory, path: str, data: bytes) -> FileRecord:
    """Write a small file durably, and return a record that verifies it as a whole.

    Raises:
        OSError: The storage failed.
    """
    write_file(directory, path, data)
    return FileRecord(path=path, size=len(data), framing_bytes=len(data), framing_digest=digests.compute_digest(data))


def _record_copy(phases: PhaseRecorder, file: PayloadFile, began: float, parts: SegmentParts) -> None:
    copied = time.perf_counter()
    phases.add("copy", copied - began, parts.nbytes, ended=copied, about=file.plan.path)


def _plan_copies(files: Sequence[PayloadFile], segments: Sequence[Segment]) -> dict[Hashable, SegmentCopies]:
    """Return the copies that build the image of each segment with bytes of deferred shards."""
    images: dict[Hashable, SegmentCopies] = {}
    for segment in segments:
        file = files[segment.file]
        parts = find_segment_parts(file, segment)
        extracts = [
            CopyRange(at, file.sources[region], file.offsets[region] + low, high - low)
            for region, at, low, high in parts
        ]
        if any(isinstance(extract.source, LazyShard) for extract in extracts):
            images[segment] = SegmentCopies(segment.stop - segment.start, extracts)
    return images


def _write_segment(
    file: PayloadFile,
    directory: Directory,
    segment: Segment,
    buffer: memoryview,
    parts: SegmentParts,
    phases: PhaseRecorder,
) -> int:
    """Write one segment of a file from `buffer`, and return the number of region bytes in it."""
    nbytes, path = segment.stop - segment.start, file.plan.path
    with phases.measure("write", about=path):  # the time to create the file
        sink = file.open_sink(directory)
    complete_segment(file, segment, buffer, parts, phases)
    with phases.measure("write", nbytes, about=path):
        sink.write(buffer, nbytes, segment.start)
    with file.lock:
        file.remaining_segments -= 1
        last = file.remaining_segments == 0
    if last:
        if file.record is None:
            for at, text in file.finish():
                sink.patch(text, at)
        with phases.measure("fsync", files=1, about=path):
            sink.commit()
    return parts.nbytes


NUMPY_COPY_MIN_BYTES = 64 * 1024
"""Minimum number of bytes for copies through numpy, which releases the interpreter lock."""

ShardBytes = Mapping[tuple[str, int], memoryview | LazyShard]
"""(leaf path, local shard) -> its bytes in C order, unchanged until the save is done, or the source of a deferred copy.
"""


class PayloadFile:
    """Payload file that is being written."""

    def __init__(self, plan: FilePlan, memory: ShardBytes, segment_bytes: int) -> None:
        self.plan = plan
        self.size = plan.layout.size
        places, sources = (
            np.array(plan.layout.region_ranges, np.int64).reshape(-1, 2),
            RegionSourceTable.from_sources(plan.sources),
        )
        self.regions = np.flatnonzero(places[:, 1])
        """Index of each non-empty region."""
        self.starts, self.lengths = places[self.regions].T
        """File offset of each non-empty region, ascending, and its size in bytes."""
        keys = zip(sources.leaf, sources.shard_index.tolist(), sources.nbytes.tolist(), strict=True)
        self.sources = [memory[leaf, shard] for leaf, shard, nbytes in keys if nbytes]
        """Shard that contains each non-empty region."""
        self.offsets: list[int] = sources.offset[self.regions].tolist()
        """Byte offset of each non-empty region in its shard."""
        *self.first_block, blocks = itertools.accumulate(map(digests.count_blocks, self.lengths.tolist()), initial=0)
        """Index of the first digest of each non-empty region."""
        self.digests = [0] * blocks
        self.partial_digests: dict[int, OutOfOrderDigest] = {}
        """Index of a digest -> partial digest of its block, if several segments contain parts of the block."""
        self.crcs: dict[tuple[int, int], tuple[int, int]] = {}
        """(non-empty region, file offset) -> (CRC-32, number of bytes) of a part, if the file layout needs CRC-32."""
        self.remaining_segments = max(-(-self.size // segment_bytes), 1)
        """Number of segments that are not written yet."""
        self.glue: Framing | None = get_static_framing(plan.layout)
        """Bytes between the regions, in file order; None until the digests that they contain are known."""
        self.is_streamable = self.glue is not None or self.remaining_segments == 1
        """True if the file can be written sequentially, because its framing is known in advance."""
        self.sink: FileWriter | None = None
        self.record: FileRecord | None = None
        self.lock = threading.Lock()

    def open_sink(self, directory: Directory) -> FileWriter:
        """Return the open file, created with its first segment, because a layout may have thousands of files."""
        with self.lock:
            if self.sink is None:
                if self.plan.directory is not None:
                    directory.make_directory(self.plan.directory)
                self.sink = directory.create(self.plan.path, self.size)
            return self.sink

    def add_partial_digest(self, number: int, at: int, nbytes: int, data: memoryview) -> None:
        """Digest the part at offset `at` of a block of `nbytes` bytes, of which other segments contain the rest."""
        with self.lock:
            joined = self.partial_digests.setdefault(number, OutOfOrderDigest())
            joined.add(at, data)
            if joined.nbytes == nbytes:
                self.digests[number] = self.partial_digests.pop(number).value

    def finish(self) -> Framing:
        """Create the record when all regions are digested, and return the framing if it was not known before."""
        late: Framing = ()
        if self.glue is None:
            crcs = [0] * len(self.plan.layout.region_ranges)
            parts: dict[int, list[tuple[int, int]]] = {}
            for (region, _), part in sorted(self.crcs.items()):
                parts.setdefault(region, []).append(part)
            for region, region_parts in parts.items():
                crcs[self.regions[region]] = combine_crc32(region_parts)
            late = self.glue = self.plan.layout.build_framing(self.digests, crcs)
        self.record = self.plan.layout.create_record(self.plan.path, self.glue, self.digests)
        return late

    def put_glue(self, segment: Segment, buffer: memoryview) -> None:
        """Copy the framing bytes of a segment into its buffer, if they are known, which saves a separate write."""
        glue = self.glue or ()
        for i in range(max(bisect_right(glue, segment.start, key=itemgetter(0)) - 1, 0), len(glue)):
            at, text = glue[i]
            if at >= segment.stop:
                return
            low, high = max(at, segment.start), min(at + len(text), segment.stop)
            if low < high:
                buffer[low - segment.start : high - segment.start] = text[low - at : high - at]


@dataclass(frozen=True, slots=True)
class Segment:
    """Segment of a file: the range of bytes that a writer buffers at a time."""

    file: int
    """Index of the file."""

    start: int
    """File offset of the first byte."""

    stop: int
    """File offset of the end, exclusive."""


@dataclass(frozen=True, slots=True)
class SegmentParts:
    """Parts of regions that a segment contains: one row per region."""

    first: int
    """Index of the first of these non-empty regions, which are consecutive."""

    at: IntArray
    """Byte offset in the segment."""

    low: IntArray
    high: IntArray
    """Byte range of the part in its region, end exclusive."""

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        """Iterate over (index of the non-empty region, offset in the segment, first byte, end exclusive)."""
        return zip(itertools.count(self.first), self.at.tolist(), self.low.tolist(), self.high.tolist(), strict=False)

    @property
    def nbytes(self) -> int:
        """Total number of bytes."""
        return int((self.high - self.low).sum())


def split_into_segments(files: Sequence[PayloadFile], segment_bytes: int) -> Iterator[Segment]:
    """Yield the segments of all files. An empty file has one segment, too, because it must be created."""
    for number, file in enumerate(files):
        for start in range(0, max(file.size, 1), segment_bytes):
            yield Segment(number, start, min(start + segment_bytes, file.size))


def group_into_tasks(
    files: Sequence[PayloadFile], segments: Sequence[Segment], *, streamed: bool
) -> list[Sequence[Segment]]:
    """Group segments into worker tasks: one segment each, or all segments of a file if it is streamed."""
    if not streamed:
        return [[segment] for segment in segments]
    tasks: list[Sequence[Segment]] = []
    for number, group in itertools.groupby(segments, key=attrgetter("file")):
        of_file = list(group)
        tasks += [of_file] if files[number].is_streamable else [[segment] for segment in of_file]
    return tasks


def complete_segment(
    file: PayloadFile, segment: Segment, data: memoryview, parts: SegmentParts, phases: PhaseRecorder
) -> None:
    """Digest the region parts of a segment, and copy its framing bytes into it."""
    began = time.perf_counter()
    for region, at, low, high in parts:
        # Digest the written copy, not its source, because the program may modify its memory in the meantime.
        _digest(file, region, low, high, data[at : at + high - low])
    if segment.stop - segment.start == file.size:
        file.finish()  # all digests are known: the framing of a small file is part of the same write
    file.put_glue(segment, data)
    ended = time.perf_counter()
    phases.add("digest", ended - began, parts.nbytes, ended=ended, about=file.plan.path)


def find_segment_parts(file: PayloadFile, segment: Segment) -> SegmentParts:
    """Return the parts of regions that a segment contains."""
    first, last = np.searchsorted(file.starts, (segment.start, segment.stop)).tolist()
    if first and file.starts[first - 1] + file.lengths[first - 1] > segment.start:
        first -= 1  # the region in which the segment begins
    starts = file.starts[first:last]
    low = np.maximum(segment.start - starts, 0)
    high = np.minimum(segment.stop - starts, file.lengths[first:last])
    return SegmentParts(first, starts + low - segment.start, low, high)


def gather(file: PayloadFile, segment: Segment, buffer: memoryview) -> SegmentParts:
    """Copy the region parts of a segment into the buffer, and return them."""
    parts = find_segment_parts(file, segment)
    for region, at, low, high in parts:
        source, begin = file.sources[region], file.offsets[region]
        assert isinstance(source, memoryview), "a segment with deferred shards is fed"
        part, target = source[begin + low : begin + high], buffer[at : at + high - low]
        if len(part) < NUMPY_COPY_MIN_BYTES:
            target[:] = part
        else:
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(part, np.uint8))
    return parts


def _digest(file: PayloadFile, region: int, low: int, high: int, data: memoryview) -> None:
    """Digest a part of a region, block by block."""
    first, length = file.first_block[region], int(file.lengths[region])
    if low == 0 and high == length <= digests.MIN_BLOCK and not file.plan.layout.needs_crc32:
        file.digests[first] = digests.compute_digest(data)  # one block, as for many small arrays
        return
    if file.plan.layout.needs_crc32:
        file.crcs[region, int(file.starts[region]) + low] = compute_crc32(data), high - low
    block = digests.compute_block_size(length)
    for b in range(low // block, -(-high // block)):
        start, stop = b * block, min((b + 1) * block, length)
        piece = data[max(start - low, 0) : stop - low]
        if low <= start and stop <= high:
            file.digests[first + b] = digests.compute_digest(piece)
        else:
            file.add_partial_digest(first + b, max(low - start, 0), stop - start, piece)


@dataclass(frozen=True, slots=True)
class CopyRange:
    """Range of bytes to copy from a region into the image of a segment."""

    image_offset: int
    """Byte offset in the image."""

    source: memoryview | LazyShard
    source_offset: int
    """Byte offset of the range in `source`."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class SegmentCopies:
    """Copies that build the image of a segment."""

    nbytes: int
    """Size of the segment in bytes."""

    ranges: Sequence[CopyRange]


class Prefetcher:
    """Background copies of segments ahead of the writers. A context manager: copying stops when it exits.

    Args:
        copies: Copies for each segment, in the order in which the segments are fetched.
        deferred: All shards that are still in the program's memory. Those that no segment needs are released at once.
        budget: Maximum number of bytes of host memory.
    """

    def __init__(self, copies: Mapping[Hashable, SegmentCopies], deferred: Iterable[LazyShard], budget: int) -> None:
        self._copies = copies
        sources = [extract.source for image in copies.values() for extract in image.ranges]
        self._pending = Counter(source for source in sources if isinstance(source, LazyShard))
        for shard in deferred:
            if shard not in self._pending:
                shard.discard()
        self._arena = Arena(_select_copy_engine(self._pending), budget)
        self._lock = threading.Lock()
        self._images: dict[Hashable, ArenaBlock] = {}
        self._error: BaseException | None = None
        self._runs_ahead = any(source.is_mutable or source.engine is not HOST_COPY_ENGINE for source in self._pending)
        """True if copying ahead of the writers helps: a source may be modified by the program, or is on a device.
        """
        self._worker = Worker("xla_ckpt-feed", daemon=True)
        self._has_thread = False
        """False if not started, if prefetching would not help, or if no thread is available; the writer then copies the
        segment itself."""

    def __contains__(self, segment: Hashable) -> bool:
        return segment in self._copies

    def __enter__(self) -> Prefetcher:
        if self._runs_ahead and (self._worker.submit(self._copy_segments, self._record_error)):
            self._has_thread = True
            self._worker.submit(self._wait_for_copies, self._record_error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._arena.stop()
        if self._has_thread:
            self._worker.wait()
        self._arena.close()

    def fetch(self, segment: Hashable, buffer: memoryview) -> ArenaBlock:
        """Return the image of a segment, prefetched or copied into `buffer`; the caller releases it.

        Raises:
            CheckpointError: The bytes could not be copied, or were modified before.
        """
        if not self._has_thread:
            memory = np.frombuffer(buffer, np.uint8)
            self._begin_copies(self._copies[segment].ranges, memory)()
            return ArenaBlock(memory, _release_nothing)
        self._worker.wait(lambda: segment in self._images or self._error is not None)
        if (piece := self._images.pop(segment, None)) is not None:
            return piece
        raise self._error or SaveError("the thread that copies to host memory has ended")

    def _wait_for_copies(self) -> None:
        """Wait for all copies, because the arena's memory must not be reused while a copy into it is in flight."""
        for link in {source.engine for source in self._pending}:
            link.record_event()()

    def _copy_segments(self) -> None:
        """Copy one segment after the other. While one copy is in flight, the previous one is published."""
        under_way: Callable[[], None] | None = None
        for segment, wanted in self._copies.items():
            room = self._arena.allocate(wanted.nbytes, wait=False)
            if room is None and under_way is not None:
                under_way()  # the writers can release memory only after they have received it
                under_way = None
            room = room or self._arena.allocate(wanted.nbytes, wait=True)
            if room is None:  # stopped before everything was written: the save has failed
                return
            begun = partial(self._publish_image, segment, room, self._begin_copies(wanted.ranges, room.memory))
            if under_way is not None:
                under_way()
            under_way = begun
        if under_way is not None:
            under_way()

    def _record_error(self, error: BaseException) -> None:
        """Store an error, which is raised in writers that wait for an image."""
        self._error = self._error or error
        self._worker.notify()

    def _publish_image(self, segment: Hashable, image: ArenaBlock, complete: Callable[[], None]) -> None:
        """Publish an image to the writers when its copies are complete."""
        complete()
        self._images[segment] = image
        self._worker.notify()

    def _begin_copies(self, ranges: Sequence[CopyRange], memory: ByteArray) -> Callable[[], None]:
        """Begin the copies of one segment, and return a function that waits for them and finishes completed shards."""
        moved: list[LazyShard] = []
        for extract in ranges:
            target = memory[extract.image_offset : extract.image_offset + extract.nbytes]
            if isinstance(extract.source, LazyShard):
                with _wrap_copy_errors(extract.source):
                    extract.source.begin_copy(extract.source_offset, target)
                moved.append(extract.source)
            else:
                source_bytes = np.frombuffer(extract.source, np.uint8)
                np.copyto(target, source_bytes[extract.source_offset : extract.source_offset + extract.nbytes])
        waits = [link.record_event() for link in {source.engine for source in moved}]

        def finish() -> None:
            with _wrap_copy_errors(moved[0]):
                for wait in waits:
                    wait()
            for source in moved:
                with self._lock:
                    self._pending[source] -= 1
                    last = self._pending[source] == 0
                if last:
                    source.finish_copy()

        return finish


def _release_nothing() -> None:
    """Do nothing, because a writer's own buffer needs no release."""


def _select_copy_engine(sources: Iterable[LazyShard]) -> CopyEngine:
    """Return the engine that allocates the arena: a device copies asynchronously only into memory that it allocated."""
    return next((source.engine for source in sources if source.engine is not HOST_COPY_ENGINE), HOST_COPY_ENGINE)


@contextlib.contextmanager
def _wrap_copy_errors(source: LazyShard) -> Iterator[None]:
    """Raise other errors of a copy as a `SaveError` with the leaf.

    Raises:
        SaveError: The copy failed.
    """
    try:
        yield
    except CheckpointError:
        raise
    except BaseException as error:
        # A driver may raise any type of exception.
        raise SaveError(
            f"a copy to host memory failed: {type(error).__name__}: {error}",
            leaf=source.leaf,
            hint='See what the device says. snapshot="host" copies before the call returns.',
        ) from error


SHARED_DIRECTORY_HINT = "All hosts must see the same directory under the checkpoint path, such as a shared file system."
"""Hint for hosts that do not see the same directory."""


def open_shared_draft(root: Root, draft: str) -> Directory:
    """Open the draft directory that rank 0 created, and on which rank 0 holds the lock.

    Raises:
        StorageError: This process does not see the directory.
    """
    try:
        return root.open_draft(draft)
    except FileNotFoundError as error:
        raise StorageError.of(
            error, "opening the directory that rank 0 made", file=draft, hint=SHARED_DIRECTORY_HINT
        ) from error


def check_written_files(directory: Directory, rank: int, files: Iterable[FileRecord]) -> None:
    """Check that the files that a rank has written exist.

    Raises:
        StorageError: A file is missing, or has another size.
    """
    for file in files:
        size = _get_file_size(directory, file.path)
        if size != file.size:
            raise StorageError(
                "what this rank has written is not in the directory that rank 0 made",
                rank=rank,
                file=file.path,
                expected=f"{file.size} bytes",
                found="no file" if size is None else f"{size} bytes",
                hint=SHARED_DIRECTORY_HINT,
            )


def _get_file_size(directory: Directory, path: str) -> int | None:
    try:
        return get_file_size(directory, path)
    except FileNotFoundError:
        return None
