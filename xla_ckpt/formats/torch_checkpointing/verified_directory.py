"""A directory in which every read is verified by the digests of complete files.

This is for files that were digested as a stream (`StreamDigester`), so that digests cover blocks of the file, not of
the arrays in it. A read covers all blocks that it overlaps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing

import numpy as np

from xla_ckpt.core.checksum import BlockDigester, compute_block_size, compute_digest, to_hex
from xla_ckpt.core.manifest.manifest import FileRecord
from xla_ckpt.errors import CorruptCheckpointError, FormatError
from xla_ckpt.loading.tag_reader import DAMAGED_FILE_HINT, make_absent_error
from xla_ckpt.storage.base import FileReader, ReadDirectory

REGION_BYTES = 1 << 22
"""Bytes per region in the record of a file; the last region contains the remaining bytes."""

_PIECE_BYTES = 1 << 23
"""Bytes per read in a verification without other output."""


class StreamDigester:
    """Builder of the record of a file that is streamed with unknown size.

    >>> digester = StreamDigester()
    >>> digester.update(memoryview(b"abc"))
    >>> digester.record("model_0.pt").regions
    ((0, 3),)
    """

    def __init__(self) -> None:
        self._region = bytearray()
        self._digests: list[int] = []
        self.size = 0
        """Number of bytes so far."""

    def update(self, data: memoryview) -> None:
        """Add the next bytes."""
        self.size += len(data)
        while len(data):
            part = data[: REGION_BYTES - len(self._region)]
            if len(part) == REGION_BYTES:
                self._digest(part)
            else:
                self._region += part
                if len(self._region) == REGION_BYTES:
                    self._digest(memoryview(self._region))
                    self._region = bytearray()
            data = data[len(part) :]

    def _digest(self, region: memoryview) -> None:
        digester = BlockDigester(len(region))
        digester.update(region)
        self._digests += digester.digests

    def record(self, path: str) -> FileRecord:
        """Return the record of the complete file."""
        if self._region:
            self._digest(memoryview(self._region))
            self._region = bytearray()
        regions = tuple((at, min(REGION_BYTES, self.size - at)) for at in range(0, self.size, REGION_BYTES))
        return FileRecord(
            path=path, size=self.size, framing_bytes=0, regions=regions, block_digests=tuple(self._digests)
        )


class VerifiedDirectory:
    """Files of a directory whose records cover all bytes with regions.

    Args:
        directory: Directory that contains the files.
        records: Path -> record.
    """

    def __init__(self, directory: ReadDirectory, records: Mapping[str, FileRecord]) -> None:
        self._directory = directory
        self._records = records
        self.name = directory.name
        self.costs = directory.costs

    def open(self, path: str, size: int | None = None) -> FileReader:  # the size is taken from the record
        """Open a file (see `ReadDirectory`).

        Raises:
            CorruptCheckpointError: It is missing, or has another size. Its reads raise this if a block is corrupt.
            ChangedTagError: It is missing because the directory has been removed.
        """
        if (record := self._records.get(path)) is None:
            raise FileNotFoundError(path)
        try:
            source = self._directory.open(path, record.size)
        except (FileNotFoundError, NotADirectoryError):
            raise make_absent_error(self._directory, "a file is missing", file=path, hint=DAMAGED_FILE_HINT) from None
        try:
            return _VerifiedSource(source, record)
        except BaseException:
            source.close()
            raise

    def list_files(self) -> list[str]:
        return sorted(self._records)

    def is_at(self, name: str) -> bool:
        return self._directory.is_at(name)

    def close(self) -> None:
        self._directory.close()


def verify_file(directory: ReadDirectory, path: str) -> int:
    """Read a complete file of a `VerifiedDirectory`. Return its size in bytes.

    Raises:
        CorruptCheckpointError: It is missing or corrupt.
    """
    with closing(directory.open(path)) as source:
        memory = memoryview(bytearray(min(_PIECE_BYTES, source.size)))
        for at in range(0, source.size, _PIECE_BYTES):
            source.read_into(memory[: source.size - at], at)
        return source.size


class _VerifiedSource:
    """File whose blocks are verified as they are read."""

    def __init__(self, source: FileReader, record: FileRecord) -> None:
        self._source = source
        self._file = record.path
        self.size = source.size
        if record.framing_bytes:
            raise FormatError("a file has bytes that no region holds", file=record.path)
        if source.size != record.size:
            raise CorruptCheckpointError(
                "a file does not have its size",
                file=record.path,
                expected=f"{record.size} bytes",
                found=source.size,
                hint=f"It was cut off or replaced. {DAMAGED_FILE_HINT}",
            )
        begins = [np.arange(at, at + nbytes, compute_block_size(nbytes)) for at, nbytes in record.regions]
        self._edges = np.concatenate([*begins, [record.size]]).astype(np.int64)
        self._digests = record.block_digests

    def read_into(self, buffer: memoryview, offset: int) -> int:
        return self._read_blocks(buffer, offset, self._source.read_into)

    def read_once(self, buffer: memoryview, offset: int, scratch: memoryview) -> int:
        return self._read_blocks(buffer, offset, lambda into, at: self._source.read_once(into, at, scratch))

    def close(self) -> None:
        self._source.close()

    def _read_blocks(self, buffer: memoryview, offset: int, read: Callable[[memoryview, int], int]) -> int:
        stop = min(offset + len(buffer), self.size)
        if offset >= stop:
            return 0
        edges = self._edges
        first, last = int(np.searchsorted(edges, offset, "right")) - 1, int(np.searchsorted(edges, stop, "left"))
        # Complete blocks are read in place. A partial block at either end is read to a separate buffer.
        inner = range(first + (edges[first] < offset), last - (edges[last] > stop))
        for block in {first, last - 1}.difference(inner):
            begin, end = int(edges[block]), int(edges[block + 1])
            data = memoryview(bytearray(end - begin))
            self._read_and_verify(data, block, block + 1, read)
            low, high = max(begin, offset), min(end, stop)
            buffer[low - offset : high - offset] = data[low - begin : high - begin]
        if inner:
            begin, end = int(edges[inner.start]), int(edges[inner.stop])
            self._read_and_verify(buffer[begin - offset : end - offset], inner.start, inner.stop, read)
        return stop - offset

    def _read_and_verify(self, into: memoryview, first: int, stop: int, read: Callable[[memoryview, int], int]) -> None:
        """Read complete blocks, and check each against its digest.

        Raises:
            CorruptCheckpointError: A block is corrupt.
        """
        begin = int(self._edges[first])
        got = read(into, begin)
        for block in range(first, stop):
            low, high = int(self._edges[block]), int(self._edges[block + 1])
            actual = compute_digest(into[low - begin : min(high - begin, got)])
            if actual != self._digests[block]:
                raise CorruptCheckpointError(
                    f"stored bytes are damaged: bytes {low} to {high} of the file",
                    file=self._file,
                    expected=f"digest {to_hex(self._digests[block])}",
                    found=to_hex(actual),
                    hint=DAMAGED_FILE_HINT,
                )
