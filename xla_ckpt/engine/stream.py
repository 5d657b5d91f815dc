"""Writing the arrays of a tag into other files, with no more than a given amount of them in memory.

Files are made in the order of their bytes: a batch of regions is read from the tag (verified), digested, and written,
before the next one is read. A store that takes files in that order gets each batch at once, if what stands between the
regions is known first. Any other file is completed when all of its regions are there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from xla_ckpt.engine.cast import Cast
from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.read import read_into
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.files.codec import Glue, known_glue
from xla_ckpt.files.crc32 import crc32, joined_crc32
from xla_ckpt.manifest.digest import BlockDigester
from xla_ckpt.manifest.records import FileRecord
from xla_ckpt.plan.file_plan import Entry, FilePlan
from xla_ckpt.plan.restore_plan import Want, plan_restore
from xla_ckpt.plan.save_plan import Written
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.ranges import pieces
from xla_ckpt.storage.base import Directory
from xla_ckpt.storage.pool import BUFFER_BYTES, threads, work_off


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """Neighbouring bytes of one region, and the elements that they hold."""

    region: int
    offset: int
    """Of the first byte in the file."""
    nbytes: int
    wants: tuple[tuple[str, Box, Box], ...]
    """(leaf path, elements, the box that the bytes of the span are)."""
    cast: Cast | None = None
    """How they are made of what is stored, if their element type is not the stored one."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of what is read for it."""
        return self.nbytes if self.cast is None else self.cast.stored_bytes(self.nbytes)

    @property
    def memory(self) -> int:
        """Bytes in memory while it is written."""
        return self.nbytes if self.cast is None else self.nbytes + self.stored_bytes


def stream_files(
    reader: TagReader,
    directory: Directory,
    files: Sequence[FilePlan],
    crew: Crew,
    *,
    max_memory: int,
) -> Written:
    """Write planned files with the arrays of a tag in them; leaf paths are the tag's.

    Every file is durable when this returns. The memory taken is `max_memory` and a reader's buffers, unless one
    strided tensor alone is larger.

    Raises:
        CorruptCheckpointError: The tag is damaged.
        OSError: The storage refused. What was written is left for the owner of the directory to remove.
    """
    if directory.streaming is not None:
        files = [file.streamed() for file in files]
    at_once = min(threads(crew.workers, 2), len(files)) or 1
    each = replace(crew, workers=max(crew.workers // at_once, 1))
    records: list[FileRecord | None] = [None] * len(files)

    def write(number: int, _: memoryview) -> None:
        records[number] = _File(reader, files[number], each, max(max_memory // at_once, 1)).write(directory)

    work_off(range(len(files)), write, workers=at_once, buffer_bytes=0, name="xla_ckpt-stream")
    return Written.of(files, [record for record in records if record is not None])


class _File:
    """One file on its way."""

    def __init__(self, reader: TagReader, plan: FilePlan, crew: Crew, max_memory: int) -> None:
        self.reader = reader
        self.plan = plan
        self.crew = crew
        self.max_memory = max_memory
        self.digesters = [BlockDigester(nbytes) for _, nbytes in plan.codec.places]
        self.crcs: list[list[tuple[int, int]]] = [[] for _ in plan.codec.places]

    def write(self, directory: Directory) -> FileRecord:
        """Write all of it; what the manifest says of it."""
        codec, streaming = self.plan.codec, directory.streaming
        if streaming is not None and (glue := known_glue(codec)) is not None:
            streaming.stream(self.plan.path, codec.size, self._in_order(glue))
            return codec.record(self.plan.path, glue, self._digests())
        if self.plan.folder is not None:
            directory.make(self.plan.folder)
        sink = directory.create(self.plan.path, codec.size)
        try:
            for offset, data in self._regions():
                sink.patch(data, offset)
                del data  # else two batches would be in memory while the next one is read
            glue = codec.glue(self._digests(), [joined_crc32(parts) for parts in self.crcs])
            for offset, text in glue:
                sink.patch(text, offset)
            sink.commit()
        except BaseException:
            sink.abandon()
            raise
        return codec.record(self.plan.path, glue, self._digests())

    def _in_order(self, glue: Glue) -> Iterator[memoryview]:
        """All bytes of the file, whose glue is known before its regions are read."""
        left = deque(glue)
        for offset, data in self._regions():
            while left and left[0][0] < offset:
                yield memoryview(left.popleft()[1])
            for at in range(0, len(data), BUFFER_BYTES):  # a store may copy what it has to send
                yield data[at : at + BUFFER_BYTES]
            del data  # else two batches would be in memory while the next one is read
        yield from (memoryview(text) for _, text in left)

    def _regions(self) -> Iterator[tuple[int, memoryview]]:
        """(offset, bytes) of what is in the regions, in file order."""
        for batch in _batches(self._spans(), self.max_memory):
            yield from self._read(batch)

    def _read(self, batch: Sequence[_Span]) -> Iterator[tuple[int, memoryview]]:
        """(offset, bytes) of some spans, verified and digested."""
        memory = np.zeros(sum(s.stored_bytes for s in batch), np.uint8).data  # padding stays zero
        slots, at = [], 0
        for span in batch:
            slots.append(memory[at : at + span.stored_bytes])
            at += span.stored_bytes
        wants = [Want(leaf, box, slot, frame) for slot, s in enumerate(batch) for leaf, box, frame in s.wants]
        read_into(self.reader, plan_restore(self.reader.manifest, wants), slots, Crew(workers=self.crew.workers))
        for span, stored in zip(batch, slots, strict=True):
            data = stored if span.cast is None else span.cast(stored)
            self.digesters[span.region].update(data)
            if self.plan.codec.wants_crc32:
                self.crcs[span.region].append((crc32(data), span.nbytes))
            yield span.offset, data
            self.crew.progress(span.nbytes)

    def _digests(self) -> list[int]:
        return [d for digester in self.digesters for d in digester.digests]

    def _spans(self) -> Iterator[_Span]:
        """All regions, in file order. One that holds a single array's elements in C order is cut to fit the memory.

        Any other region has padding between its elements, and is made as a whole.
        """
        by_region: dict[int, list[Entry]] = {}
        for entry in self.plan.entries:
            by_region.setdefault(entry.region, []).append(entry)
        for region, (offset, nbytes) in enumerate(self.plan.codec.places):
            entries = by_region.get(region, [])
            if len(entries) != 1 or entries[0].frame is not None:
                wants = tuple((e.leaf, e.box, e.frame or e.box) for e in entries)
                yield _Span(region=region, offset=offset, nbytes=nbytes, wants=wants)
                continue
            leaf, box = entries[0].leaf, entries[0].box
            itemsize = nbytes // max(box.size, 1)
            cast = self._cast(entries[0])
            at = offset
            for part in pieces(box, box, itemsize if cast is None else cast.memory, self.max_memory):
                wants = ((leaf, part, part),)
                yield _Span(region=region, offset=at, nbytes=part.size * itemsize, wants=wants, cast=cast)
                at += part.size * itemsize

    def _cast(self, entry: Entry) -> Cast | None:
        record = None if entry.cast is None else self.reader.manifest.array(entry.leaf)
        return None if entry.cast is None or record is None else Cast(record.dtype, entry.cast)


def _batches(spans: Iterator[_Span], max_memory: int) -> Iterator[list[_Span]]:
    """The spans in groups that fit in memory; a span that does not fit is a group of its own."""
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
