"""Stream arrays of a checkpoint into other files, within a memory limit.

Files are written in byte order: a batch of regions is read from the checkpoint (verified), digested, and written before
the next batch is read. Small files are read together and written one by one, because a layout may have a file for each
tensor of each rank. A store with sequential uploads gets each batch immediately, if the bytes between the regions are
known in advance. Any other file is completed after all of its regions are written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from xla_ckpt.core.checksum import BlockDigester, combine_crc32, compute_crc32
from xla_ckpt.core.files.file_layout import Framing, get_static_framing
from xla_ckpt.core.manifest.manifest import FileRecord
from xla_ckpt.core.plan.restore_plan import ReadRequest, plan_restore
from xla_ckpt.core.plan.save_plan import FileEntry, FilePlan, WriteResult
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.memory_layout import split_by_span
from xla_ckpt.loading.read import read_into
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.loading.target import Cast
from xla_ckpt.progress import IoContext
from xla_ckpt.storage.base import Directory
from xla_ckpt.storage.threads import WORKER_BUFFER_BYTES, get_worker_count, run_tasks

GROUP_BYTES, GROUP_FILES = 1 << 20, 64
"""Maximum bytes and maximum number of files that are read together. Larger groups would leave threads idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """Contiguous bytes of one region, and the elements that they contain."""

    region: int
    offset: int
    """Offset of the first byte in the file."""
    nbytes: int
    wants: tuple[tuple[str, Box, Box], ...]
    """(leaf path, elements, box of elements that the bytes of the span cover)."""
    cast: Cast | None = None
    """Cast from the stored dtype, if the dtype in the file differs."""

    @property
    def stored_bytes(self) -> int:
        """Number of bytes that are read for it."""
        return self.nbytes if self.cast is None else self.cast.compute_stored_bytes(self.nbytes)

    @property
    def memory(self) -> int:
        """Number of bytes in memory while it is written."""
        return self.nbytes if self.cast is None else self.nbytes + self.stored_bytes


def stream_files(
    reader: TagReader,
    directory: Directory,
    files: Sequence[FilePlan],
    io: IoContext,
    *,
    max_memory: int,
) -> WriteResult:
    """Write planned files that contain arrays of a tag; leaf paths are those in the tag.

    Every file is durable when this returns. Peak memory is `max_memory` plus the buffers of a reader, unless a
    single strided tensor is larger.

    Raises:
        CorruptCheckpointError: The tag is corrupt.
        OSError: A storage operation failed. The owner of the directory has to remove the files already written.
    """
    if directory.streaming is not None:
        files = [file.to_streaming() for file in files]
    at_once = min(get_worker_count(io.workers, 2), len(files)) or 1
    each, share = IoContext(workers=max(io.workers // at_once, 1)), max(max_memory // at_once, 1)
    records: list[FileRecord | None] = [None] * len(files)
    groups = _group_files(files)

    def write(number: int, _: memoryview) -> None:
        group = [_FileStream(reader, files[i], share, io.progress) for i in groups[number]]
        spans = (span for file in group for span in file.spans)
        read = _read_spans(reader, spans, each, share)
        for i, file in zip(groups[number], group, strict=True):
            records[i] = file.write(directory, read)

    run_tasks(range(len(groups)), write, workers=at_once, buffer_bytes=0, name="xla_ckpt-stream")
    return WriteResult.from_records(files, [record for record in records if record is not None])


def _group_files(files: Sequence[FilePlan]) -> list[list[int]]:
    """Return groups of indices of adjacent files that are read together."""
    groups: list[list[int]] = []
    left = 0
    for i, file in enumerate(files):
        if not groups or file.data_bytes > left or len(groups[-1]) == GROUP_FILES:
            groups.append([])
            left = GROUP_BYTES
        groups[-1].append(i)
        left -= file.data_bytes
    return groups


_SpanData = Iterator[tuple[_Span, memoryview]]
"""Spans, each with its verified stored bytes."""


def _read_spans(reader: TagReader, spans: Iterable[_Span], io: IoContext, max_memory: int) -> _SpanData:
    """Yield the stored bytes of spans in order, read in batches that fit in memory."""
    for batch in _split_into_batches(spans, max_memory):
        yield from _read_batch(reader, batch, io)


def _read_batch(reader: TagReader, batch: Sequence[_Span], io: IoContext) -> _SpanData:
    memory = np.zeros(sum(s.stored_bytes for s in batch), np.uint8).data  # padding stays zero
    slots, at = [], 0
    for span in batch:
        slots.append(memory[at : at + span.stored_bytes])
        at += span.stored_bytes
    wants = [ReadRequest(leaf, box, slot, frame) for slot, s in enumerate(batch) for leaf, box, frame in s.wants]
    read_into(reader, plan_restore(reader.manifest, wants), slots, io)
    yield from zip(batch, slots, strict=True)


class _FileStream:
    """File that is being written."""

    def __init__(self, reader: TagReader, plan: FilePlan, max_memory: int, progress: Callable[[int], object]) -> None:
        self.reader = reader
        self.plan = plan
        self.max_memory = max_memory
        self.progress = progress
        places = plan.layout.region_ranges
        self.spans = [*self._split_into_spans(places)]
        self.digesters = [BlockDigester(nbytes) for _, nbytes in places]
        self.crcs: list[list[tuple[int, int]]] = [[] for _ in places]

    def write(self, directory: Directory, read: _SpanData) -> FileRecord:
        """Write the file, and return its manifest record. The next items of `read` must be its spans."""
        codec, streaming = self.plan.layout, directory.streaming
        if streaming is not None and (glue := get_static_framing(codec)) is not None:
            streaming.stream(self.plan.path, codec.size, self._stream_bytes(read, glue))
            return codec.create_record(self.plan.path, glue, self._list_digests())
        if self.plan.directory is not None:
            directory.make_directory(self.plan.directory)
        sink = directory.create(self.plan.path, codec.size)
        try:
            for offset, data in self._read_regions(read):
                sink.patch(data, offset)
                del data  # otherwise two batches would be in memory while the next one is read
            glue = codec.build_framing(self._list_digests(), [combine_crc32(parts) for parts in self.crcs])
            for offset, text in glue:
                sink.patch(text, offset)
            sink.commit()
        except BaseException:
            sink.abort()
            raise
        return codec.create_record(self.plan.path, glue, self._list_digests())

    def _stream_bytes(self, read: _SpanData, glue: Framing) -> Iterator[memoryview]:
        """Yield all bytes of the file. Its framing must be known before its regions are read."""
        left = deque(glue)
        for offset, data in self._read_regions(read):
            while left and left[0][0] < offset:
                yield memoryview(left.popleft()[1])
            for at in range(0, len(data), WORKER_BUFFER_BYTES):  # a store may copy the bytes that it sends
                yield data[at : at + WORKER_BUFFER_BYTES]
            del data  # otherwise two batches would be in memory while the next one is read
        yield from (memoryview(text) for _, text in left)

    def _read_regions(self, read: _SpanData) -> Iterator[tuple[int, memoryview]]:
        """Yield (offset, bytes) of the regions in file order, and update the digests."""
        for _ in self.spans:
            span, stored = next(read)
            data = stored if span.cast is None else span.cast(stored)
            del stored  # otherwise two batches would be in memory while the next one is read
            self.digesters[span.region].update(data)
            if self.plan.layout.needs_crc32:
                self.crcs[span.region].append((compute_crc32(data), span.nbytes))
            yield span.offset, data
            del data  # for the same reason
            self.progress(span.nbytes)

    def _list_digests(self) -> list[int]:
        return [d for digester in self.digesters for d in digester.digests]

    def _split_into_spans(self, places: Sequence[tuple[int, int]]) -> Iterator[_Span]:
        """Yield all regions in file order. A region that contains one array in C order is split to fit in memory.

        Any other region has padding between its elements, and is written as one span.
        """
        by_region: dict[int, list[FileEntry]] = {}
        for entry in self.plan.entries:
            by_region.setdefault(entry.region, []).append(entry)
        for region, (offset, nbytes) in enumerate(places):
            entries = by_region.get(region, [])
            if len(entries) != 1 or entries[0].parent_box is not None:
                wants = tuple((e.leaf, e.box, e.parent_box or e.box) for e in entries)
                yield _Span(region=region, offset=offset, nbytes=nbytes, wants=wants)
                continue
            leaf, box = entries[0].leaf, entries[0].box
            itemsize = nbytes // max(box.size, 1)
            cast = self._get_cast(entries[0])
            at = offset
            for part in split_by_span(box, box, itemsize if cast is None else cast.bytes_per_element, self.max_memory):
                wants = ((leaf, part, part),)
                yield _Span(region=region, offset=at, nbytes=part.size * itemsize, wants=wants, cast=cast)
                at += part.size * itemsize

    def _get_cast(self, entry: FileEntry) -> Cast | None:
        record = None if entry.cast is None else self.reader.manifest.find_array(entry.leaf)
        return None if entry.cast is None or record is None else Cast(record.dtype, entry.cast)


def _split_into_batches(spans: Iterable[_Span], max_memory: int) -> Iterator[list[_Span]]:
    """Yield groups of spans that fit in memory; a span that does not fit is in a group of its own."""
    batch: list[_Span] = []
    batch_memory = 0
    for span in spans:
        if batch and batch_memory + span.memory > max_memory:
            yield batch
            batch, batch_memory = [], 0
        batch.append(span)
        batch_memory += span.memory
    if batch:
        yield batch
