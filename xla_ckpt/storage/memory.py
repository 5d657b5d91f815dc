"""Files in memory: ``memory://name`` is a root in it, as long as the process lives.

For tests and simulations. What is stored there is lost with the process, and ranks of other processes do not see it.
It answers as an object store does: a file appears whole, never changes and never moves, and there are directories only
in the names of files. One that has no file does not exist.
"""

from __future__ import annotations

import bisect
import errno
import itertools
import threading
import time
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass

from xla_ckpt.plan.costs import DISK
from xla_ckpt.storage.addresses import Addresses
from xla_ckpt.storage.base import Changed, InBucket, ReadDirectory
from xla_ckpt.storage.remote import SpooledSink


@dataclass(frozen=True, slots=True)
class File:
    """A file. Whoever writes it anew makes another one: who reads the old one keeps it."""

    data: bytes
    modified: int
    """When it was written (ns since 1970)."""

    version: str
    """Unlike that of any other one."""


class MemoryFiles(MutableMapping[str, bytes]):
    """Files by their full names, such as ``root/tag/file``."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._files: dict[str, File] = {}
        self._names: list[str] = []
        """All names, sorted: those below one lie side by side."""

        self._versions = itertools.count(1)

    def put(self, name: str, data: bytes, version: str | None) -> str:
        """Write a file if it has this version; with None, if there is none. The version that it has then.

        Raises:
            Changed: It has another one.
        """
        with self._lock:
            file = self.file(name)
            if version != (None if file is None else file.version):
                raise Changed(name)
            self[name] = data
            return self._files[name].version

    def file(self, name: str) -> File | None:
        """A file as it is now; None if there is none."""
        return self._files.get(name)

    def discard(self, name: str) -> None:
        """Delete a file, if it is there."""
        with self._lock:
            if name in self._files:
                del self[name]

    def below(self, prefix: str) -> list[str]:
        """The names that begin so, sorted. The prefix ends with a slash, or is empty."""
        with self._lock:
            if not prefix:
                return list(self._names)
            start = bisect.bisect_left(self._names, prefix)
            return self._names[start : bisect.bisect_left(self._names, f"{prefix[:-1]}0", start)]  # "0" follows "/"

    def __getitem__(self, name: str) -> bytes:
        return self._files[name].data

    def __setitem__(self, name: str, data: bytes) -> None:
        with self._lock:
            if name not in self._files:
                bisect.insort(self._names, name)
            self._files[name] = File(data, time.time_ns(), str(next(self._versions)))

    def __delitem__(self, name: str) -> None:
        with self._lock:
            del self._files[name]
            del self._names[bisect.bisect_left(self._names, name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self.below(""))

    def __len__(self) -> int:
        return len(self._files)


def _error(number: int, path: str) -> OSError:
    return OSError(number, errno.errorcode[number], path)


class MemorySource:
    """A file being read from memory; it counts what was read."""

    def __init__(self, data: bytes, counts: list[int]) -> None:
        self._data, self._counts = data, counts
        self.size = len(data)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        part = self._data[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        self._counts.append(len(part))
        return len(part)

    def read_once(self, buffer: memoryview, offset: int, scratch: memoryview) -> int:
        return self.read_into(buffer, offset)

    def close(self) -> None:
        """Nothing to release."""


class MemoryDirectory:
    """The files whose names begin alike, by default in an `MemoryFiles` of their own.

    Args:
        name: What its user calls it.
        objects: All files.
        prefix: The beginning of their names.
    """

    costs = DISK

    def __init__(self, name: str = "", objects: MemoryFiles | None = None, prefix: str = "") -> None:
        self.name, self.prefix = name, prefix
        self.objects = MemoryFiles() if objects is None else objects
        self.read_counts: list[int] = []
        """Bytes of each read."""

        self._open = True

    def _full(self, path: str) -> str:
        if not self._open:
            raise _error(errno.EBADF, path)
        return self.prefix + path

    @property
    def streaming(self) -> MemoryDirectory:
        """Itself."""
        return self

    def stream(self, path: str, size: int, chunks: Iterator[memoryview]) -> None:
        self._put(self._full(path), b"".join(map(bytes, chunks)))

    def create(self, path: str, size: int) -> SpooledSink:
        full = self._full(path)
        if full in self.objects:
            raise _error(errno.EEXIST, path)
        return SpooledSink(lambda file: self._put(full, file.read()), size)

    def _put(self, full: str, data: bytes) -> None:
        try:
            self.objects.put(full, data, None)
        except Changed:
            raise _error(errno.EEXIST, full) from None

    def make(self, path: str) -> None:
        """Nothing: a directory is there when a file is."""

    def open(self, path: str, size: int | None = None) -> MemorySource:
        try:
            return MemorySource(self.objects[self._full(path)], self.read_counts)
        except KeyError:
            raise _error(errno.ENOENT, path) from None

    def link(self, source: ReadDirectory, path: str, name: str) -> None:
        assert isinstance(source, MemoryDirectory), "both are directories of one store"
        try:
            data = source.objects[source._full(path)]
        except KeyError:
            raise _error(errno.ENOENT, path) from None
        self._put(self._full(name), data)

    def files(self) -> list[str]:
        return [name[len(self.prefix) :] for name in self.objects.below(self._full(""))]

    def sync(self) -> None:
        """Nothing to sync."""

    def free(self) -> int | None:
        return None

    def is_at(self, name: str) -> bool:
        return name == self.name and bool(self.objects.below(self.prefix))

    def close(self) -> None:
        self._open = False


FILES = MemoryFiles()
"""What this process keeps at ``memory://``."""


class MemoryStore(Addresses):
    """A root in memory.

    Args:
        path: Its address.
        objects: All files; stores that share them find each other's.
    """

    file_system = None

    def __init__(self, path: str = "memory://store", objects: MemoryFiles | None = None) -> None:
        super().__init__(path, path.partition("://")[2])
        self._objects = MemoryFiles() if objects is None else objects

    def __repr__(self) -> str:
        return f"MemoryStore({self.path!r})"

    @property
    def object_store(self) -> MemoryStore:
        """Itself."""
        return self

    def look(self) -> MemoryStore:
        """Itself: no question costs anything."""
        return self

    def prepare(self) -> None:
        """Nothing: it is there when a file is, and can be written."""

    def in_bucket(self, name: str) -> InBucket:
        return InBucket("memory", "", self.below(name))

    def names(self, path: str = "") -> list[str]:
        prefix = self.below(path)
        names = self._objects.below(prefix)
        if not path and not names and self.has(""):
            raise _error(errno.ENOTDIR, self.path)
        return sorted({name[len(prefix) :].partition("/")[0] for name in names})

    def has(self, path: str) -> bool:
        return self.key(path) in self._objects or self.is_directory(path)

    def is_directory(self, path: str) -> bool:
        return bool(self._objects.below(self.below(path)))

    def start_of(self, path: str, nbytes: int, *, links: bool = True) -> bytes:
        try:
            return self._objects[self.key(path)][:nbytes]
        except KeyError:
            raise _error(errno.ENOENT, path) from None

    def modified(self, path: str) -> int | None:
        names = [self.key(path), *self._objects.below(self.below(path))]
        files = [file for name in names if (file := self._objects.file(name)) is not None]
        return max((file.modified for file in files), default=None)

    def open(self, name: str, *, lock: bool = True, links: bool = False) -> MemoryDirectory:
        if not self.is_directory(name):
            raise _error(errno.ENOENT, name)
        return self.fill(name)

    def fill(self, name: str) -> MemoryDirectory:
        return MemoryDirectory(name, self._objects, self.below(name))

    def check_conditions(self) -> None:
        """Nothing: they are."""

    def remove(self, name: str) -> None:
        for full in (self.key(name), *self._objects.below(self.below(name))):
            self._objects.discard(full)

    def read_record(self, name: str) -> tuple[bytes, str] | None:
        file = self._objects.file(self.key(name))
        return None if file is None else (file.data, file.version)

    def write_record(self, name: str, data: bytes, version: str | None) -> str:
        return self._objects.put(self.key(name), data, version)
