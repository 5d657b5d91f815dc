"""The write pipeline: plans in, durable payload files out, digested on the way.

Files are cut into segments. A worker gathers the regions of a segment into its aligned buffer, digests the blocks
there, and writes the segment; whoever finishes the last segment of a file puts in what stands between the
regions, and makes the file durable. Memory: one buffer a worker, whatever the size of the state.
"""

from __future__ import annotations

import errno
import itertools
import threading
import time
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.feed import Extract, Feed, Wanted
from xla_ckpt.engine.garbage_collection import collector_paused
from xla_ckpt.engine.phases import Phases
from xla_ckpt.errors import StorageError
from xla_ckpt.files.codec import Glue
from xla_ckpt.files.crc32 import crc32, joined_crc32
from xla_ckpt.manifest import digest as digests
from xla_ckpt.manifest.digest import JoinedDigest
from xla_ckpt.manifest.records import FileRecord
from xla_ckpt.plan.file_plan import FilePlan, Sources
from xla_ckpt.plan.save_plan import SavePlan, Written
from xla_ckpt.sharding.corners import Ints
from xla_ckpt.snapshot.arena import BUDGET_BYTES
from xla_ckpt.snapshot.freezing import Deferred
from xla_ckpt.storage.base import BLOCK, Directory, Sink, write_small
from xla_ckpt.storage.pool import BUFFER_BYTES, threads, work_off

WRITERS = 8
"""Threads that write, if the machine has the cores."""

COPY_WITHOUT_GIL = 64 * 1024
"""From this size on a copy goes through numpy, which releases the interpreter lock."""

SIDE_BY_SIDE = 64
"""Files that are written place by place, at most: as many as one process has devices, and few enough to have open."""

ShardBytes = Mapping[tuple[str, int], memoryview | Deferred]
"""(leaf path, local shard) -> its bytes in C order, unchanging until the save is done; or what they are copied from."""


class _File:
    """A payload file on its way to the disk."""

    def __init__(self, plan: FilePlan, memory: ShardBytes, segment_bytes: int) -> None:
        self.plan = plan
        self.size = plan.codec.size
        places, sources = np.array(plan.codec.places, np.int64).reshape(-1, 2), Sources.of(plan.sources)
        self.regions = np.flatnonzero(places[:, 1])
        """Index of each non-empty region."""
        self.starts, self.lengths = places[self.regions].T
        """File offset of each non-empty region, ascending; and its bytes."""
        keys = zip(sources.leaf, sources.shard.tolist(), sources.nbytes.tolist(), strict=True)
        self.sources = [memory[leaf, shard] for leaf, shard, nbytes in keys if nbytes]
        """The shard that each non-empty region is a part of."""
        self.offsets: list[int] = sources.offset[self.regions].tolist()
        """Where each non-empty region begins in its shard."""
        *self.first_block, blocks = itertools.accumulate(map(digests.block_count, self.lengths.tolist()), initial=0)
        """Index of the first digest of each non-empty region."""
        self.digests = [0] * blocks
        self.cut: dict[int, JoinedDigest] = {}
        """Index of a digest -> what is digested of its block so far, where several segments have a part of it."""
        self.crcs: dict[tuple[int, int], tuple[int, int]] = {}
        """(non-empty region, file offset) -> (CRC-32, bytes) of a part of it, where the codec wants them."""
        self.left = max(-(-self.size // segment_bytes), 1)
        """Segments that are still to be written."""
        of_bytes = plan.codec.wants_digests or plan.codec.wants_crc32
        self.glue: Glue | None = None if of_bytes else plan.codec.glue((), ())
        """What stands between the regions, in file order; None until the digests that it is made of are known."""
        self.sink: Sink | None = None
        self.record: FileRecord | None = None
        self.lock = threading.Lock()

    def opened(self, directory: Directory) -> Sink:
        """The file, created when its first segment is written: a layout may have thousands of them."""
        with self.lock:
            if self.sink is None:
                if self.plan.folder is not None:
                    directory.make(self.plan.folder)
                self.sink = directory.create(self.plan.path, self.size)
            return self.sink

    def join(self, number: int, at: int, nbytes: int, data: memoryview) -> None:
        """Digest a part of a block of `nbytes` bytes, of which other segments have the rest. It begins at `at`."""
        with self.lock:
            joined = self.cut.setdefault(number, JoinedDigest())
            joined.add(at, data)
            if joined.nbytes == nbytes:
                self.digests[number] = self.cut.pop(number).value

    def finish(self) -> Glue:
        """Make the record, once all regions have been digested; the glue, if it was not known before."""
        late: Glue = ()
        if self.glue is None:
            crcs = [0] * len(self.plan.codec.places)
            parts: dict[int, list[tuple[int, int]]] = {}
            for (region, _), part in sorted(self.crcs.items()):
                parts.setdefault(region, []).append(part)
            for region, region_parts in parts.items():
                crcs[self.regions[region]] = joined_crc32(region_parts)
            late = self.glue = self.plan.codec.glue(self.digests, crcs)
        self.record = self.plan.codec.record(self.plan.path, self.glue, self.digests)
        return late

    def put_glue(self, segment: _Segment, buffer: memoryview) -> None:
        """Put what a segment has of the glue into its buffer, if the glue is known: it needs no write of its own."""
        glue = self.glue or ()
        for i in range(max(bisect_right(glue, segment.start, key=itemgetter(0)) - 1, 0), len(glue)):
            at, text = glue[i]
            if at >= segment.stop:
                return
            low, high = max(at, segment.start), min(at + len(text), segment.stop)
            if low < high:
                buffer[low - segment.start : high - segment.start] = text[low - at : high - at]


@dataclass(frozen=True, slots=True)
class _Segment:
    file: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a segment has of the regions of its file: a row for each."""

    first: int
    """Index of the first of these non-empty regions. The others are those behind it."""

    at: Ints
    """Offset in the segment."""

    low: Ints
    high: Ints
    """First byte of the region in the segment, and the one behind the last."""

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        """(index of the non-empty region, offset in the segment, first byte, one behind the last) of each."""
        return zip(itertools.count(self.first), self.at.tolist(), self.low.tolist(), self.high.tolist(), strict=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return int((self.high - self.low).sum())


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
        files = [_File(plan, memory, segment_bytes) for plan in plan.files]
    segments = list(_segments(files, segment_bytes))
    largest = max((s.stop - s.start for s in segments), default=0)
    crew = Crew() if crew is None else crew
    phases = crew.phases

    deferred = [source for source in memory.values() if isinstance(source, Deferred)]
    if deferred:
        # The shards of an array lie at about the same places of several files. Where they can only be copied together,
        # the copy would be needed until the last file is written.
        segments.sort(key=lambda segment: (segment.file // SIDE_BY_SIDE, segment.start))
    feed = Feed(_wanted(files, segments) if deferred else {}, deferred, budget)

    def write(segment: _Segment, buffer: memoryview) -> None:
        file, began = files[segment.file], time.perf_counter()
        if segment not in feed:
            with collector_paused():
                parts = _gather(file, segment, buffer)
            _add_copy(phases, file, began, parts)
            crew.progress(_write_segment(file, directory, segment, buffer, parts, phases))
            return
        piece = feed.image(segment)
        try:
            parts = _parts(file, segment)
            _add_copy(phases, file, began, parts)
            crew.progress(_write_segment(file, directory, segment, piece.memory.data, parts, phases))
        finally:
            piece.give_back()

    try:
        with feed:
            work_off(
                segments,
                write,
                workers=min(threads(crew.workers, 3), len(segments)) or 1,
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
    return [
        write_record(directory, f"objects/{rank + 1:05d}-of-{world:05d}-{i + 1:05d}.pickle", data)
        for i, data in enumerate(objects)
    ]


def write_record(directory: Directory, path: str, data: bytes) -> FileRecord:
    """Write a small file, durably; the record by which it is verified as a whole.

    Raises:
        OSError: The storage refused.
    """
    write_small(directory, path, data)
    return FileRecord(path=path, size=len(data), head=len(data), digest=digests.digest(data))


def _add_copy(phases: Phases, file: _File, began: float, parts: _Parts) -> None:
    copied = time.perf_counter()
    phases.add("copy", copied - began, parts.nbytes, ended=copied, about=file.plan.path)


def _segments(files: Sequence[_File], segment_bytes: int) -> Iterator[_Segment]:
    """The segments of all files. A file without a byte has one, too: somebody has to make it."""
    for number, file in enumerate(files):
        for start in range(0, max(file.size, 1), segment_bytes):
            yield _Segment(number, start, min(start + segment_bytes, file.size))


def _wanted(files: Sequence[_File], segments: Sequence[_Segment]) -> dict[Hashable, Wanted]:
    """What is in the image of each segment that has bytes of deferred shards."""
    images: dict[Hashable, Wanted] = {}
    for segment in segments:
        file = files[segment.file]
        parts = _parts(file, segment)
        extracts = [
            Extract(at, file.sources[region], file.offsets[region] + low, high - low) for region, at, low, high in parts
        ]
        if any(isinstance(extract.source, Deferred) for extract in extracts):
            images[segment] = Wanted(segment.stop - segment.start, extracts)
    return images


def _write_segment(
    file: _File,
    directory: Directory,
    segment: _Segment,
    buffer: memoryview,
    parts: _Parts,
    phases: Phases,
) -> int:
    """Write one segment of a file, which is in `buffer`; returns how many bytes of regions are in it."""
    nbytes = segment.stop - segment.start
    began = time.perf_counter()
    sink = file.opened(directory)
    opened = time.perf_counter()
    for region, at, low, high in parts:
        # Of what is written, not of where it came from: a program may write to its memory meanwhile.
        _digest(file, region, low, high, buffer[at : at + high - low])
    if nbytes == file.size:
        file.finish()  # all digests are known already: the glue of a small file goes out with the same write
    file.put_glue(segment, buffer)
    digested = time.perf_counter()
    sink.write(buffer, nbytes, segment.start)
    written = time.perf_counter()
    moved, path = parts.nbytes, file.plan.path
    phases.add("digest", digested - opened, moved, ended=digested, about=path)
    phases.add("write", opened - began, ended=opened, about=path)  # making the file
    phases.add("write", written - digested, nbytes, ended=written, about=path)
    with file.lock:
        file.left -= 1
        last = file.left == 0
    if last:
        if file.record is None:
            for at, text in file.finish():
                sink.patch(text, at)
        with phases.timed("fsync", files=1, about=path):
            sink.commit()
    return moved


def _parts(file: _File, segment: _Segment) -> _Parts:
    """What a segment has of the regions of its file."""
    first, last = np.searchsorted(file.starts, (segment.start, segment.stop)).tolist()
    if first and file.starts[first - 1] + file.lengths[first - 1] > segment.start:
        first -= 1  # the region that the segment begins in
    starts = file.starts[first:last]
    low = np.maximum(segment.start - starts, 0)
    high = np.minimum(segment.stop - starts, file.lengths[first:last])
    return _Parts(first, starts + low - segment.start, low, high)


def _gather(file: _File, segment: _Segment, buffer: memoryview) -> _Parts:
    """Copy what lies in a segment into the buffer; the parts of it."""
    parts = _parts(file, segment)
    for region, at, low, high in parts:
        source, begin = file.sources[region], file.offsets[region]
        assert isinstance(source, memoryview), "a segment with deferred shards is fed"
        part, target = source[begin + low : begin + high], buffer[at : at + high - low]
        if len(part) < COPY_WITHOUT_GIL:
            target[:] = part
        else:
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(part, np.uint8))
    return parts


def _digest(file: _File, region: int, low: int, high: int, data: memoryview) -> None:
    """Digest what a part has of the blocks of its region."""
    first, length = file.first_block[region], int(file.lengths[region])
    if low == 0 and high == length <= digests.MIN_BLOCK and not file.plan.codec.wants_crc32:
        file.digests[first] = digests.digest(data)  # one block, as of many small arrays
        return
    if file.plan.codec.wants_crc32:
        file.crcs[region, int(file.starts[region]) + low] = crc32(data), high - low
    block = digests.block_size(length)
    for b in range(low // block, -(-high // block)):
        start, stop = b * block, min((b + 1) * block, length)
        piece = data[max(start - low, 0) : stop - low]
        if low <= start and stop <= high:
            file.digests[first + b] = digests.digest(piece)
        else:
            file.join(first + b, max(low - start, 0), stop - start, piece)
