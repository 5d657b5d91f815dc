"""Files in a dict: the engine's storage in property tests and simulations."""

from __future__ import annotations


class MemorySink:
    """A file being written into memory."""

    def __init__(self, files: dict[str, bytes], path: str, size: int) -> None:
        if path in files:
            raise FileExistsError(path)
        self._files, self._path, self._data = files, path, bytearray(size)
        files[path] = b""

    def write(self, buffer: memoryview, nbytes: int, offset: int) -> None:
        if offset + nbytes > len(self._data):
            raise ValueError(f"{self._path}: write past the announced size")
        self._data[offset : offset + nbytes] = buffer[:nbytes]

    def patch(self, data: bytes | memoryview, offset: int) -> None:
        self.write(memoryview(data), len(data), offset)

    def commit(self) -> None:
        self._files[self._path] = bytes(self._data)

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
    """A directory in memory."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.read_counts: list[int] = []

    def create(self, path: str, size: int) -> MemorySink:
        return MemorySink(self.contents, path, size)

    def open(self, path: str) -> MemorySource:
        if path not in self.contents:
            raise FileNotFoundError(path)
        return MemorySource(self.contents[path], self.read_counts)

    def files(self) -> list[str]:
        return sorted(self.contents)

    def sync(self) -> None:
        """Nothing to sync."""

    def close(self) -> None:
        """Nothing to release."""
