"""What the engine asks of a place that keeps bytes. Two backends: `local` for directories, `memory` for tests."""

from __future__ import annotations

from typing import Protocol

BLOCK = 4096
"""Unit of aligned I/O (bytes): offsets and, but for the end of a file, lengths of `Sink.write` are multiples of it."""


class Sink(Protocol):
    """A file being written. Several threads may write different ranges of it at once."""

    def write(self, buffer: memoryview, nbytes: int, offset: int) -> None:
        """Write the first `nbytes` bytes of a page-aligned buffer at `offset`, a multiple of `BLOCK`.

        The buffer reaches at least to the next multiple of `BLOCK`; what lies behind `nbytes` may reach the disk, but
        not the file that `commit` leaves.
        """

    def patch(self, data: bytes | memoryview, offset: int) -> None:
        """Write anywhere, after anything that `write` wrote there."""

    def commit(self) -> None:
        """Give the file its size, make it durable, and close it."""

    def abandon(self) -> None:
        """Close the file; whoever owns the directory removes it."""


class Source(Protocol):
    """A file being read. Several threads may read it at once."""

    @property
    def size(self) -> int:
        """Bytes in the file."""

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` from `offset` on; the number of bytes read is smaller only where the file ends."""

    def close(self) -> None:
        """Release the file."""


class Directory(Protocol):
    """A directory of files, named by relative paths with ``/``. It stays the same one if it is renamed."""

    def create(self, path: str, size: int) -> Sink:
        """Begin a new file that will have `size` bytes; its parents are made. It must not exist."""

    def open(self, path: str) -> Source:
        """Open a file for reading. FileNotFoundError if there is none."""

    def files(self) -> list[str]:
        """Paths of all files below, sorted."""

    def sync(self) -> None:
        """Make the names of all files that were created through this object durable."""

    def close(self) -> None:
        """Release the directory."""
