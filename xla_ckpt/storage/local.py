"""Directories of the local (or a network) file system.

Everything goes through the descriptor of the directory, so that a writer or reader keeps *its* directory when a
rename puts another one in its place. Large files are written with O_DIRECT where the file system allows it: on this
path the page cache costs more than the disk.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Iterable

from xla_ckpt.storage.base import BLOCK

DIRECT_BYTES = 1 << 20
"""Files from this size on are written around the page cache."""

_libc = ctypes.CDLL(None, use_errno=True)


def _allocate(fd: int, size: int) -> None:
    """Reserve the blocks of a file where the file system can: a full disk is found out before anything is written.

    (Not `os.posix_fallocate`, which writes every block by hand where the file system cannot.)
    """
    if size and hasattr(_libc, "fallocate"):
        failed = _libc.fallocate(fd, 0, ctypes.c_longlong(0), ctypes.c_longlong(size))
        code = ctypes.get_errno() if failed else 0
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise OSError(code, os.strerror(code))


class LocalSink:
    """A file being written, through O_DIRECT or the page cache."""

    def __init__(self, directory: int, path: str, size: int) -> None:
        self._size = size
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(path, flags, 0o666, dir_fd=directory)
        try:
            _allocate(self._fd, size)
        except OSError:
            os.close(self._fd)
            raise
        if size >= DIRECT_BYTES:
            self._set_direct(True)

    def _set_direct(self, on: bool) -> None:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        self.direct = on
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
        except OSError:
            self.direct = False  # tmpfs and others have no direct I/O: the page cache it is

    direct = False
    """Whether writes go around the page cache."""

    def write(self, buffer: memoryview, nbytes: int, offset: int) -> None:
        while nbytes > 0:
            wanted = -(-nbytes // BLOCK) * BLOCK if self.direct else nbytes
            try:
                done = os.pwrite(self._fd, buffer[:wanted], offset)
            except OSError as error:
                if error.errno == errno.EINVAL and self.direct:  # refused only now: some network file systems do
                    self._set_direct(False)
                    continue
                raise
            if done % BLOCK and done < nbytes:  # a short write off the grid cannot go on with O_DIRECT
                self._set_direct(False)
            buffer, nbytes, offset = buffer[done:], nbytes - done, offset + done

    def patch(self, data: bytes | memoryview, offset: int) -> None:
        if self.direct:
            self._set_direct(False)
        self.write(memoryview(data), len(data), offset)

    def commit(self) -> None:
        try:
            os.ftruncate(self._fd, self._size)
            os.fsync(self._fd)
        finally:
            self.abandon()

    def abandon(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class LocalSource:
    """A file being read."""

    def __init__(self, directory: int, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=directory)
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise OSError(errno.EINVAL, "not a regular file", path)
        self.size = status.st_size

    def read_into(self, buffer: memoryview, offset: int) -> int:
        done = 0
        while done < len(buffer):
            got = os.preadv(self._fd, [buffer[done:]], offset + done)
            if got == 0:
                break
            done += got
        return done

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class LocalDirectory:
    """A directory, held by its descriptor."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._touched = {""}

    @property
    def fd(self) -> int:
        """The descriptor."""
        return self._fd

    def create(self, path: str, size: int) -> LocalSink:
        parent = ""
        for part in path.split("/")[:-1]:
            self._touched.add(parent)
            parent = f"{parent}/{part}" if parent else part
            try:
                os.mkdir(parent, dir_fd=self._fd)
            except FileExistsError:
                pass  # another writer of the same save was here first
        self._touched.add(parent)
        return LocalSink(self._fd, path, size)

    def open(self, path: str) -> LocalSource:
        return LocalSource(self._fd, path)

    def files(self) -> list[str]:
        found = []
        for parent, _, names, _ in os.fwalk(".", dir_fd=self._fd):
            found += [os.path.normpath(f"{parent}/{name}") for name in names]
        return sorted(found)

    def sync(self) -> None:
        for name in sorted(self._touched, reverse=True):  # children before parents
            fd = os.open(name or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def write_small(directory: LocalDirectory, path: str, data: bytes) -> None:
    """Write a whole small file durably."""
    sink = directory.create(path, len(data))
    try:
        sink.write(memoryview(data), len(data), 0)
        sink.commit()
    except BaseException:
        sink.abandon()
        raise


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    directory = LocalDirectory(path)
    try:
        directory.sync()
    finally:
        directory.close()


def sync_files(directory: str, names: Iterable[str]) -> None:
    """Make the contents of some files of a directory durable."""
    for name in names:
        fd = os.open(os.path.join(directory, name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
