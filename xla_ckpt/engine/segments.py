"""A payload file on its way to the storage: the segments that it is cut into, and what is in each of them.

A segment is what a writer has in its buffer at a time. The regions that lie in it are gathered there, digested, and
completed by what stands between them, as far as that is known.
"""

from __future__ import annotations

import itertools
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter

import numpy as np

from xla_ckpt.engine.phases import Phases
from xla_ckpt.files.codec import Glue, known_glue
from xla_ckpt.files.crc32 import crc32, joined_crc32
from xla_ckpt.manifest import digest as digests
from xla_ckpt.manifest.digest import JoinedDigest
from xla_ckpt.manifest.records import FileRecord
from xla_ckpt.plan.file_plan import FilePlan, Sources
from xla_ckpt.sharding.corners import Ints
from xla_ckpt.snapshot.freezing import Deferred
from xla_ckpt.storage.base import Directory, Sink

COPY_WITHOUT_GIL = 64 * 1024
"""From this size on a copy goes through numpy, which releases the interpreter lock."""

ShardBytes = Mapping[tuple[str, int], memoryview | Deferred]
"""(leaf path, local shard) -> its bytes in C order, unchanging until the save is done; or what they are copied from."""


class PayloadFile:
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
        self.glue: Glue | None = known_glue(plan.codec)
        """What stands between the regions, in file order; None until the digests that it is made of are known."""
        self.streamed = self.glue is not None or self.left == 1
        """Whether it can be written in the order of its bytes: its glue is known before they are written."""
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

    def put_glue(self, segment: Segment, buffer: memoryview) -> None:
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
class Segment:
    """What a writer has in its buffer at a time."""

    file: int
    """Index of its file."""

    start: int
    """File offset of its first byte."""

    stop: int
    """File offset of one past the last."""


@dataclass(frozen=True, slots=True)
class SegmentParts:
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


def segments_of(files: Sequence[PayloadFile], segment_bytes: int) -> Iterator[Segment]:
    """The segments of all files. A file without a byte has one, too: somebody has to make it."""
    for number, file in enumerate(files):
        for start in range(0, max(file.size, 1), segment_bytes):
            yield Segment(number, start, min(start + segment_bytes, file.size))


def tasks_of(files: Sequence[PayloadFile], segments: Sequence[Segment], *, streamed: bool) -> list[Sequence[Segment]]:
    """What one worker does at a time: a segment; where files are streamed, all segments of one."""
    if not streamed:
        return [[segment] for segment in segments]
    tasks: list[Sequence[Segment]] = []
    for number, group in itertools.groupby(segments, key=attrgetter("file")):
        of_file = list(group)
        tasks += [of_file] if files[number].streamed else [[segment] for segment in of_file]
    return tasks


def complete_segment(
    file: PayloadFile, segment: Segment, data: memoryview, parts: SegmentParts, phases: Phases
) -> None:
    """Digest what a segment has of the regions, and put what it has of the glue into it."""
    began = time.perf_counter()
    for region, at, low, high in parts:
        # Of what is written, not of where it came from: a program may write to its memory meanwhile.
        _digest(file, region, low, high, data[at : at + high - low])
    if segment.stop - segment.start == file.size:
        file.finish()  # all digests are known already: the glue of a small file goes out with the same write
    file.put_glue(segment, data)
    ended = time.perf_counter()
    phases.add("digest", ended - began, parts.nbytes, ended=ended, about=file.plan.path)


def segment_parts(file: PayloadFile, segment: Segment) -> SegmentParts:
    """What a segment has of the regions of its file."""
    first, last = np.searchsorted(file.starts, (segment.start, segment.stop)).tolist()
    if first and file.starts[first - 1] + file.lengths[first - 1] > segment.start:
        first -= 1  # the region that the segment begins in
    starts = file.starts[first:last]
    low = np.maximum(segment.start - starts, 0)
    high = np.minimum(segment.stop - starts, file.lengths[first:last])
    return SegmentParts(first, starts + low - segment.start, low, high)


def gather(file: PayloadFile, segment: Segment, buffer: memoryview) -> SegmentParts:
    """Copy what lies in a segment into the buffer; the parts of it."""
    parts = segment_parts(file, segment)
    for region, at, low, high in parts:
        source, begin = file.sources[region], file.offsets[region]
        assert isinstance(source, memoryview), "a segment with deferred shards is fed"
        part, target = source[begin + low : begin + high], buffer[at : at + high - low]
        if len(part) < COPY_WITHOUT_GIL:
            target[:] = part
        else:
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(part, np.uint8))
    return parts


def _digest(file: PayloadFile, region: int, low: int, high: int, data: memoryview) -> None:
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
