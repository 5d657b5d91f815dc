"""Files in memory: ``memory://name`` is a root directory in it, as long as the process lives.

For tests and simulations. What is stored there is lost with the process, and ranks of other processes do not see it.
It refuses what a file system refuses, with the same errors, so that a program that works here works there.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping

from xla_ckpt.errors import NotAFileError
from xla_ckpt.storage.base import Directory

_LOCK = threading.RLock()
"""Held by whoever looks at folders or changes them."""


class _File:
    """The bytes of a file. A change makes new ones: who reads the old ones keeps them."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.modified = time.time_ns()


class Folder:
    """A directory, by itself: its name is known to the one above."""

    def __init__(self) -> None:
        self.entries: dict[str, Folder | _File] = {}
        self.modified = time.time_ns()
        self.users = 0
        """How many opened it with a lock, and have not closed it."""
        self.read_counts: list[int] = []
        """Bytes of each read of its files that went through a `MemoryDirectory` of this folder."""

    def at(self, path: str) -> Folder | _File:
        """What is at a path below. FileNotFoundError if there is nothing, NotADirectoryError below a file."""
        found: Folder | _File = self
        for part in filter(None, path.split("/")):
            if not isinstance(found, Folder):
                raise _error(errno.ENOTDIR, path)
            if part not in found.entries:
                raise _error(errno.ENOENT, path)
            found = found.entries[part]
        return found

    def folder(self, path: str, *, make: bool = False) -> Folder:
        """The folder at a path below. `make`: it and those above it are made if they are absent."""
        found = self
        for part in filter(None, path.split("/")):
            if make and part not in found.entries:
                found.put(part, Folder())
            below = found.at(part)
            if not isinstance(below, Folder):
                raise _error(errno.ENOTDIR, path)
            found = below
        return found

    def put(self, name: str, entry: Folder | _File) -> None:
        """Give it an entry."""
        self.entries[name] = entry
        self.modified = time.time_ns()

    def take(self, name: str) -> Folder | _File:
        """Take an entry out of it. FileNotFoundError if there is none."""
        if name not in self.entries:
            raise _error(errno.ENOENT, name)
        self.modified = time.time_ns()
        return self.entries.pop(name)

    def files(self, prefix: str = "") -> Iterator[str]:
        """Paths of all files below."""
        for name, entry in self.entries.items():
            if isinstance(entry, Folder):
                yield from entry.files(f"{prefix}{name}/")
            else:
                yield prefix + name

    def clear(self) -> None:
        """Remove everything below: nobody who still has it open finds a file there."""
        for entry in self.entries.values():
            if isinstance(entry, Folder):
                entry.clear()
        self.entries.clear()


def _error(number: int, path: str) -> OSError:
    return OSError(number, errno.errorcode[number], path)


class MemorySink:
    """A file being written into memory. Readers see nothing of it before `commit`."""

    def __init__(self, publish: Callable[[bytes], None], path: str, size: int) -> None:
        self._publish, self._path, self._data = publish, path, bytearray(size)

    def write(self, buffer: memoryview, nbytes: int, offset: int) -> None:
        if offset + nbytes > len(self._data):
            raise ValueError(f"{self._path}: write past the announced size")
        self._data[offset : offset + nbytes] = buffer[:nbytes]

    def patch(self, data: bytes | memoryview, offset: int) -> None:
        self.write(memoryview(data), len(data), offset)

    def commit(self) -> None:
        self._publish(bytes(self._data))

    def abandon(self) -> None:
        """Nothing to release."""


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
    """A folder that is open, by default a new one that is in no store."""

    def __init__(
        self,
        name: str = "",
        folder: Folder | None = None,
        *,
        lock: bool = False,
        beside: Callable[[str], Folder | _File | None] | None = None,
    ) -> None:
        self.name = name
        self._folder = Folder() if folder is None else folder
        self._beside = beside
        self._locked, self._open = lock, True
        if lock:
            self._folder.users += 1

    @property
    def contents(self) -> MutableMapping[str, bytes]:
        """Path -> bytes of each file, to look at and to change."""
        return _Contents(self._folder)

    @property
    def read_counts(self) -> list[int]:
        """Bytes of each read."""
        return self._folder.read_counts

    def _held(self, path: str) -> Folder:
        if not self._open:
            raise _error(errno.EBADF, path)
        return self._folder

    def create(self, path: str, size: int) -> MemorySink:
        above, _, name = path.rpartition("/")
        with _LOCK:
            folder = self._held(path).folder(above, make=True)
            if name in folder.entries:
                raise _error(errno.EEXIST, path)
            file = _File(b"")
            folder.put(name, file)

        def publish(data: bytes) -> None:
            file.data, file.modified = data, time.time_ns()

        return MemorySink(publish, path, size)

    def make(self, path: str) -> None:
        with _LOCK:
            self._held(path).folder(path, make=True)

    def adopt(self, other: Directory, path: str) -> None:
        assert isinstance(other, MemoryDirectory), "both are directories of one store"
        above, _, name = path.rpartition("/")
        with _LOCK:
            file = other._held(path).folder(above).take(name)
            self._held(path).folder(above, make=True).put(name, file)

    def replace(self, path: str, data: bytes) -> None:
        with _LOCK:
            self._held(path).put(path, _File(data))

    def open(self, path: str) -> MemorySource:
        with _LOCK:
            found = self._held(path).at(path)
        if isinstance(found, Folder):
            raise NotAFileError("not a regular file: it is not read", file=path)
        return MemorySource(found.data, self._folder.read_counts)

    def files(self) -> list[str]:
        with _LOCK:
            return sorted(self._held("").files())

    def sync(self) -> None:
        """Nothing to sync."""

    def free(self) -> int | None:
        return None

    def is_at(self, name: str) -> bool:
        return self._beside is None or self._beside(name) is self._folder

    def close(self) -> None:
        with _LOCK:
            if self._locked:
                self._folder.users -= 1
            self._locked = self._open = False


class _Contents(MutableMapping[str, bytes]):
    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def __getitem__(self, path: str) -> bytes:
        try:
            found = self._folder.at(path)
        except OSError:
            raise KeyError(path) from None
        if isinstance(found, Folder):
            raise KeyError(path)
        return found.data

    def __setitem__(self, path: str, data: bytes) -> None:
        above, _, name = path.rpartition("/")
        self._folder.folder(above, make=True).put(name, _File(data))

    def __delitem__(self, path: str) -> None:
        above, _, name = path.rpartition("/")
        self._folder.folder(above).take(name)

    def __iter__(self) -> Iterator[str]:
        return self._folder.files()

    def __len__(self) -> int:
        return sum(1 for _ in self)


class MemoryStore:
    """A root directory in memory.

    Args:
        path: Its address.
        files: The folder at ``memory://``; stores that share one find each other's directories.
    """

    def __init__(self, path: str = "memory://store", files: Folder | None = None) -> None:
        self.path = path
        self._files = Folder() if files is None else files
        self._root = path.partition("://")[2]

    def __repr__(self) -> str:
        return f"MemoryStore({self.path!r})"

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _find(self, path: str) -> Folder | _File | None:
        try:
            with _LOCK:
                return self._files.at(self._at(path))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _above(self, path: str) -> tuple[Folder, str]:
        """The folder in which a name lies, and the last part of the name."""
        above, _, name = self._at(path).rpartition("/")
        return self._files.folder(above), name

    def prepare(self) -> None:
        with _LOCK:
            self._files.folder(self._root, make=True)

    def names(self, path: str = "") -> list[str]:
        with _LOCK:
            found = self._find(path)
            if found is not None and not isinstance(found, Folder) and not path:
                raise _error(errno.ENOTDIR, self.path)
            return sorted(found.entries) if isinstance(found, Folder) else []

    def has(self, path: str) -> bool:
        return self._find(path) is not None

    def is_directory(self, path: str) -> bool:
        return isinstance(self._find(path), Folder)

    def start_of(self, path: str, nbytes: int, *, links: bool = True) -> bytes:
        with _LOCK:
            found = self._files.at(self._at(path))
        if isinstance(found, Folder):
            raise NotAFileError("not a regular file: it is not read", file=path)
        return found.data[:nbytes]

    def modified(self, path: str) -> int | None:
        found = self._find(path)
        return None if found is None else found.modified

    def open(self, name: str, *, lock: bool = True, links: bool = False) -> MemoryDirectory:
        with _LOCK:
            folder = self._files.folder(self._at(name))
            return MemoryDirectory(name.rpartition("/")[2], folder, lock=lock, beside=self._beside(name))

    def make(self, name: str) -> MemoryDirectory:
        with _LOCK:
            folder, last = self._above(name)
            if last in folder.entries:
                raise _error(errno.EEXIST, name)
            made = Folder()
            folder.put(last, made)
            return MemoryDirectory(last, made, lock=True, beside=self._beside(name))

    def _beside(self, name: str) -> Callable[[str], Folder | _File | None]:
        """What finds the names in the directory in which this one lies."""
        above, separator, _ = name.rpartition("/")
        return lambda other: self._find(f"{above}{separator}{other}")

    def held(self, name: str) -> bool | None:
        found = self._find(name)
        return isinstance(found, Folder) and found.users > 0

    def in_use(self, name: str) -> bool:
        return self.held(name) is True

    def rename(self, old: str, new: str) -> None:
        with _LOCK:
            (source, name), (target, its_name) = self._above(old), self._above(new)
            there = target.entries.get(its_name)
            if name in source.entries and isinstance(there, Folder) and there.entries:
                raise _error(errno.ENOTEMPTY, new)
            target.put(its_name, source.take(name))

    def exchange(self, one: str, other: str) -> bool:
        with _LOCK:
            (first, name), (second, its_name) = self._above(one), self._above(other)
            entry, its_entry = first.at(name), second.at(its_name)
            first.put(name, its_entry)
            second.put(its_name, entry)
        return True

    def remove(self, name: str) -> None:
        with _LOCK:
            folder = self._files.folder(self._at(name))
            above, last = self._above(name)
            above.take(last)
            folder.clear()

    def remove_unused(self, name: str) -> bool:
        with _LOCK:
            unused = not self.in_use(name)
            if unused:
                self.remove(name)
            return unused

    def remove_empty(self, name: str) -> bool:
        with _LOCK:
            empty = not self._files.folder(self._at(name)).entries
            if empty:
                self.remove(name)
            return empty

    def sync(self) -> None:
        """Nothing to sync."""
