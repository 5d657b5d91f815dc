"""One file as a directory, of which every byte is compared with a CRC-32 before anybody has it.

torch.save writes a CRC-32 of each storage, which torch.load does not look at. A storage is read whole when something in
it is wanted for the first time, compared, and read again for whoever wants it, the second time from the page cache.
"""

from __future__ import annotations

import threading
import zlib
from bisect import bisect_right
from collections.abc import Sequence

from xla_ckpt.errors import CorruptCheckpointError, UsageError
from xla_ckpt.layouts.torch_save.zip_reader import StorageAt
from xla_ckpt.storage.base import Directory, Sink, Source

_CHUNK = 1 << 20
"""Bytes that are compared at a time."""


class OneFileDirectory:
    """A directory as if one file were all that is in it. It is only read."""

    def __init__(self, directory: Directory, file: str) -> None:
        self._directory = directory
        self.name = file
        self.storages: Sequence[StorageAt] = ()
        """The storages that are compared, in the order of the file."""

    def create(self, path: str, size: int) -> Sink:
        raise UsageError("a file of torch.save is only read", file=self.name)

    def make(self, path: str) -> None:
        raise UsageError("a file of torch.save is only read", file=self.name)

    def open(self, path: str) -> Source:
        if path != self.name:
            raise FileNotFoundError(path)
        return _Compared(self._directory.open(path), path, self.storages)

    def files(self) -> list[str]:
        return [self.name]

    def sync(self) -> None:
        """Nothing was written."""

    def close(self) -> None:
        self._directory.close()


class _Compared:
    """A file whose storages are compared with their CRC-32s."""

    def __init__(self, source: Source, file: str, storages: Sequence[StorageAt]) -> None:
        self._source = source
        self._file = file
        self.size = source.size
        self._storages = [storage for storage in storages if storage.crc and storage.nbytes]
        self._starts = [storage.offset for storage in self._storages]
        self._locks = [threading.Lock() for _ in self._storages]
        self._sound = [False for _ in self._storages]

    def read_into(self, buffer: memoryview, offset: int) -> int:
        first = max(bisect_right(self._starts, offset) - 1, 0)
        for number in range(first, len(self._storages)):
            storage = self._storages[number]
            if storage.offset >= offset + len(buffer):
                break
            if storage.offset + storage.nbytes > offset:
                with self._locks[number]:  # the others that want something of it wait for its verdict
                    if not self._sound[number]:
                        self._compare(storage)
                        self._sound[number] = True
        return self._source.read_into(buffer, offset)

    def _compare(self, storage: StorageAt) -> None:
        buffer = memoryview(bytearray(min(_CHUNK, storage.nbytes)))
        found = 0
        for at in range(0, storage.nbytes, _CHUNK):
            part = buffer[: min(_CHUNK, storage.nbytes - at)]
            if self._source.read_into(part, storage.offset + at) < len(part):
                raise CorruptCheckpointError("the file ends inside of a tensor", file=self._file)
            found = zlib.crc32(part, found)
        if found != storage.crc:
            raise CorruptCheckpointError(
                f"the record data/{storage.key} is not what its CRC-32 says: stored bytes are damaged",
                file=self._file,
                expected=f"{storage.crc:08x}",
                found=f"{found:08x}",
                hint="Restore the file from a copy.",
            )

    def close(self) -> None:
        self._source.close()
