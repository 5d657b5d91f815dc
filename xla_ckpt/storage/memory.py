"""Stores in memory: ``memory://name`` is one, as long as the process lives.

For tests and simulations. What is stored there is lost with the process, and ranks of other processes do not see it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


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

    def close(self) -> None:
        """Nothing to release."""


class MemoryDirectory:
    """A directory in memory. A `MemoryStore` hands the same contents out again and again, each time as a new one."""

    def __init__(self, name: str = "", contents: dict[str, bytes] | None = None) -> None:
        self.name = name
        self.contents: dict[str, bytes] = {} if contents is None else contents
        """Path -> bytes of each file."""
        self.read_counts: list[int] = []
        """Bytes of each read."""
        self.modified = time.time_ns()
        self.users = 0
        """How many opened it with a lock, and have not closed it."""
        self._locks: list[MemoryDirectory] = []

    def opened(self, *, lock: bool) -> MemoryDirectory:
        """Another view of the same files, which holds a lock on this one until it is closed."""
        view = MemoryDirectory(self.name, self.contents)
        view.read_counts = self.read_counts
        if lock:
            self.users += 1
            view._locks.append(self)
        return view

    def create(self, path: str, size: int) -> MemorySink:
        if path in self.contents:
            raise FileExistsError(path)
        self.contents[path] = b""

        def publish(data: bytes) -> None:
            self.contents[path] = data

        return MemorySink(publish, path, size)

    def open(self, path: str) -> MemorySource:
        if path not in self.contents:
            raise FileNotFoundError(path)
        return MemorySource(self.contents[path], self.read_counts)

    def files(self) -> list[str]:
        return sorted(self.contents)

    def sync(self) -> None:
        """Nothing to sync."""

    def close(self) -> None:
        for held in self._locks:
            held.users -= 1
        self._locks.clear()


class MemoryStore:
    """A root directory in memory."""

    def __init__(self, path: str = "memory://store") -> None:
        self.path = path
        self.directories: dict[str, MemoryDirectory] = {}
        self._lock = threading.RLock()

    def prepare(self) -> None:
        """It is always there, and can be written."""

    def names(self, path: str = "") -> list[str]:
        start = f"{path}/" if path else ""
        files = (f"{name}/{file}" for name, directory in self.directories.items() for file in directory.files())
        below = [p[len(start) :].partition("/")[0] for p in (*self.directories, *files) if p.startswith(start)]
        return sorted({name for name in below if name})

    def _found(self, path: str) -> MemoryDirectory | bytes | None:
        """The directory at a path, or the bytes of the file; any directory for one that others lie in."""
        if not path:
            return MemoryDirectory()
        if path in self.directories:
            return self.directories[path]
        for name, directory in self.directories.items():
            if path.startswith(f"{name}/") and (data := directory.contents.get(path[len(name) + 1 :])) is not None:
                return data
        return MemoryDirectory(path) if self.names(path) else None

    def has(self, path: str) -> bool:
        return self._found(path) is not None

    def is_directory(self, path: str) -> bool:
        return isinstance(self._found(path), MemoryDirectory)

    def start_of(self, path: str, nbytes: int) -> bytes:
        found = self._found(path)
        if not isinstance(found, bytes):
            raise FileNotFoundError(path)
        return found[:nbytes]

    def modified(self, path: str) -> int | None:
        if not self.has(path):
            return None
        owner = next((d for name, d in self.directories.items() if path == name or path.startswith(f"{name}/")), None)
        return 0 if owner is None else owner.modified

    def open(self, name: str, *, lock: bool = True) -> MemoryDirectory:
        with self._lock:
            if name not in self.directories:
                raise FileNotFoundError(name)
            return self.directories[name].opened(lock=lock)

    def make(self, name: str) -> MemoryDirectory:
        with self._lock:
            if name in self.directories:
                raise FileExistsError(name)
            self.directories[name] = MemoryDirectory(name)
            return self.directories[name].opened(lock=True)

    def in_use(self, name: str) -> bool:
        return name in self.directories and self.directories[name].users > 0

    def rename(self, old: str, new: str) -> None:
        with self._lock:
            if old not in self.directories:
                raise FileNotFoundError(old)
            if new in self.directories:
                raise FileExistsError(new)
            self.directories[new] = self.directories.pop(old)
            self.directories[new].name = new

    def remove(self, name: str) -> None:
        with self._lock:
            if name not in self.directories:
                raise FileNotFoundError(name)
            del self.directories[name]

    def sync(self) -> None:
        """Nothing to sync."""
