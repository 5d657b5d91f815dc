"""Virtual files of arrays whose chunks are computed on read. A `TagReader` reads them like a directory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np

from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.manifest.manifest import FileRecord
from xla_ckpt.core.plan.read_costs import LOCAL_DISK_COSTS, ReadCosts
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.storage.base import FileReader, ReadDirectory

A = TypeVar("A", bound=FileReader)

CHUNK_CACHE_BYTES = 1 << 30
"""Maximum bytes of chunks in memory at a time, or one chunk, if it is larger."""


def compute_chunk_costs(uncached_sizes: Iterable[int], cached_sizes: Iterable[int] = ()) -> ReadCosts:
    """Return the read costs of files whose chunks are computed completely.

    Args:
        uncached_sizes: Bytes of the largest chunk of each array whose chunks are computed for each read. Such a chunk
            is read in one batch.
        cached_sizes: Bytes of the largest chunk of each array whose chunks are cached (`ChunkCache`).
    """
    batch = max([LOCAL_DISK_COSTS.batch_bytes, *uncached_sizes])
    largest = max([batch, *cached_sizes])
    return replace(
        LOCAL_DISK_COSTS,
        batch_bytes=batch,
        chunk_bytes=batch,
        max_gap=0,
        concurrent_reads=max(CHUNK_CACHE_BYTES // largest, 1) if largest * 8 > CHUNK_CACHE_BYTES else 0,
        is_cached=False,
    )


class ChunkCache:
    """LRU cache of computed chunks. A chunk with parts of several layers is computed once for all of them.

    The cached chunks have at most `CHUNK_CACHE_BYTES`, except for a single larger chunk. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[Hashable, _CacheEntry] = {}
        """Entries, the most recently used last."""

    def get(self, key: Hashable, nbytes: int, make: Callable[[], Any]) -> Any:
        """Return the elements of a chunk. They are computed unless they are cached."""
        with self._lock:
            kept = self._entries[key] = self._entries.pop(key) if key in self._entries else _CacheEntry(nbytes)
            while len(self._entries) > 1 and sum(other.nbytes for other in self._entries.values()) > CHUNK_CACHE_BYTES:
                del self._entries[next(iter(self._entries))]
        with kept.lock:
            if kept.elements is None:
                kept.elements = make()
            return kept.elements

    def clear(self) -> None:
        """Remove all chunks."""
        with self._lock:
            self._entries.clear()


class _CacheEntry:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.lock = threading.Lock()
        self.elements: Any = None


def slice_elements(array: Any, start: int, stop: int) -> Any:
    """Return a copy of the elements `start` to `stop` of a numpy array in C order, independent of its memory layout.

    >>> slice_elements(np.arange(6).reshape(3, 2).T, 2, 5)
    array([4, 1, 3])
    """
    while array.ndim > 1:
        step = array.size // array.shape[0]
        low, high = start // step, -(-stop // step)
        array, start, stop = array[low:high], start - low * step, stop - low * step
        if high - low > 1:
            break
        array = array[0]
    return np.ascontiguousarray(array).reshape(-1)[start:stop]


class VirtualDirectory(Generic[A]):
    """Arrays as files, one per array: a `ReadDirectory` without its costs."""

    def __init__(self, directory: ReadDirectory) -> None:
        self.directory = directory
        """Source directory."""
        self.arrays: dict[str, A] = {}
        """Path of each file -> its array."""

    @property
    def name(self) -> str:
        return self.directory.name

    def make_file_records(self) -> list[FileRecord]:
        """Return the manifest records of the files, without digests."""
        return [FileRecord(path=p, size=array.size) for p, array in self.arrays.items()]

    def open(self, path: str, size: int | None = None) -> A:
        if path not in self.arrays:
            raise FileNotFoundError(path)
        return self.arrays[path]

    def list_files(self) -> list[str]:
        return sorted(self.arrays)

    def is_at(self, name: str) -> bool:
        return self.directory.is_at(name)

    def close(self) -> None:
        self.directory.close()


class ChunkedFile:
    """Array as a file of its concatenated chunks, with one chunk in memory at a time. A `FileReader`."""

    def __init__(self, chunks: Sequence[Box], dtype: DType) -> None:
        self.chunks = chunks
        self.dtype = dtype
        self.largest = max((chunk.size for chunk in chunks), default=0) * dtype.itemsize
        """Bytes of the largest chunk."""

    @property
    def size(self) -> int:
        """Bytes of all elements."""
        return sum(chunk.size for chunk in self.chunks) * self.dtype.itemsize

    def read_chunk(self, chunk: Box) -> Any:
        """Return the elements of a chunk, a numpy array, in the order of the file."""
        raise NotImplementedError

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` from `offset` on, with newly computed chunks."""
        wanted = min(len(buffer), self.size - offset)
        begin = 0
        for chunk in self.chunks:
            end = begin + chunk.size * self.dtype.itemsize
            low, high = max(offset, begin), min(offset + wanted, end)
            if low < high:
                elements = np.ascontiguousarray(self.read_chunk(chunk)).reshape(-1).view(np.uint8)
                np.frombuffer(buffer, np.uint8)[low - offset : high - offset] = elements[low - begin : high - begin]
            begin = end
        return wanted

    def read_once(self, buffer: memoryview, offset: int, scratch: memoryview) -> int:
        """Read as `read_into` does."""
        return self.read_into(buffer, offset)

    def close(self) -> None:
        """Do nothing: no file is open between reads."""
