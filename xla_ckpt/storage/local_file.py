"""Local files: direct I/O (O_DIRECT), page-cache probes, and a limit on open descriptors.

Large files bypass the page cache, which costs more than the disk for large sequential transfers. Paths are resolved
beneath an open directory without following links. Idle files are closed, least recently used first, when the process
runs short of descriptors, and reopened on the next read.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import numpy.typing as npt

from xla_ckpt.errors import ChangedTagError, NotAFileError, UsageError
from xla_ckpt.storage.base import BLOCK_BYTES
from xla_ckpt.storage.process_state import fork_safe_lock, register_fork_reset

IDLE_DIVISOR = 8
"""Fraction of the descriptor limit (1 / `IDLE_DIVISOR`) available to idle files. Each file uses up to three
descriptors: its own, one for direct I/O, and one for a memory mapping.
"""

MIN_IDLE_FILES = 4
"""Number of idle files that stay open regardless of the limit."""

_TOO_MANY = (errno.EMFILE, errno.ENFILE)


class Suspendable(Protocol):
    """A file that can be closed while it is not being read."""

    def suspend(self) -> None:
        """Close the file unless a read has started."""


class IdleFiles:
    """The open files of this process that are not being read, in least recently used order."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._files: OrderedDict[Suspendable, None] = OrderedDict()

    def reset_after_fork(self) -> None:
        """Drop all files in a forked process without closing them: a thread of the parent may hold the lock of one."""
        self._files.clear()

    def add(self, file: Suspendable) -> None:
        """Add a file as the most recently used one."""
        with self._lock:
            self._files[file] = None

    def discard(self, file: Suspendable) -> None:
        """Remove a file that is being read or was closed."""
        with self._lock:
            self._files.pop(file, None)

    def suspend(self, limit: int | None = None) -> bool:
        """Close the least recently used files until at most `limit` are open. Return True if any was closed.

        By default the limit derives from the descriptor limit of the process. The caller must not hold the lock of a
        file.
        """
        limit = _get_idle_limit() if limit is None else limit
        closed = False
        while len(self._files) > limit:
            with self._lock:
                if len(self._files) <= limit:
                    break
                file, _ = self._files.popitem(last=False)
            file.suspend()
            closed = True
        return closed


IDLE_FILES = register_fork_reset(IdleFiles(), IdleFiles.reset_after_fork)


def _get_idle_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # read on each call, because the program may lower it
    return max(soft // IDLE_DIVISOR, MIN_IDLE_FILES) if soft != resource.RLIM_INFINITY else 1 << 20


def open_descriptor(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    """Open a descriptor like `os.open`; if this process has too many open files, close idle ones and retry.

    Raises:
        OSError: The file cannot be opened.
    """
    try:
        return os.open(path, flags | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    except OSError as error:
        if error.errno not in _TOO_MANY or not IDLE_FILES.suspend(0):
            raise
    return os.open(path, flags | os.O_CLOEXEC, mode, dir_fd=dir_fd)


class SharedDescriptor:
    """A descriptor shared by several objects, closed when the last reference is dropped."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


DIRECT_IO_MIN_BYTES = 1 << 20
"""Size (bytes) from which files are written with direct I/O, and read with it unless they are cached."""

CACHE_PROBE_BYTES = 256 * 1024
"""Bytes of a range that are probed to find out if it is in the page cache.

Probing every page takes half as long as copying it, and the kernel loads and evicts neighboring pages together.
"""

CACHED_READS_VARIABLE = "XLA_CKPT_CACHED_READS"
"""Environment variable: ``1`` makes all reads use the page cache.

This is faster if many processes of a machine that are not one job load the same files.
"""

_libc = ctypes.CDLL(None, use_errno=True)


def check_encodable(path: str) -> None:
    """Raise an error for a path that cannot be passed to the operating system.

    Raises:
        UsageError: The path contains NUL, or characters that the file system encoding does not support.
    """
    if "\0" in path:
        raise UsageError("a name contains the character NUL", expected="a name without it", found=ascii(path))
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        raise UsageError(
            "a name has characters that the encoding of the file system lacks",
            expected=f"characters that {error.encoding} has",
            found=ascii(path),
            hint="Start Python with PYTHONUTF8=1, or in a UTF-8 locale such as LC_ALL=C.UTF-8.",
        ) from error


_TRAVERSE_FLAGS = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW


@contextmanager
def open_parent_beneath(directory: int | str, path: str) -> Iterator[tuple[int | None, str]]:
    """Yield a descriptor of the parent directory of a path, and the last name of the path, for calls with `dir_fd=`.

    No symbolic link on the way is followed, so that nothing outside the directory is reached. The caller must not
    follow a link at the last name either.

    Args:
        directory: Descriptor or path of the directory at which the path begins; "" is the directory itself.
        path: Names separated by ``/``.

    Raises:
        NotADirectoryError: A component is a link or a file.
        UsageError: The path contains NUL, or characters that the file system encoding does not support.
        OSError: The storage failed; FileNotFoundError if a directory does not exist.
    """
    check_encodable(path)
    *parents, name = path.split("/")
    start = None
    if isinstance(directory, int):
        start = directory
    elif parents:
        parents[0] = os.path.join(directory, parents[0])
    else:
        name = os.path.join(directory, name) if name else directory
    opened: list[int] = []
    try:
        for parent in parents:
            opened.append(open_descriptor(parent, _TRAVERSE_FLAGS, dir_fd=opened[-1] if opened else start))
        yield opened[-1] if opened else start, name
    finally:
        while opened:  # pop first: repeating an interrupted close could close a different file
            os.close(opened.pop())


def _allocate(fd: int, size: int) -> None:
    """Reserve the blocks of a file if the file system can, so that a full disk is detected before anything is written.

    `os.posix_fallocate` is not used, because it writes every block if the file system does not support it.
    """
    if size and hasattr(_libc, "fallocate"):
        failed = _libc.fallocate(fd, 0, ctypes.c_longlong(0), ctypes.c_longlong(size))
        code = ctypes.get_errno() if failed else 0
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise OSError(code, os.strerror(code))


class LocalFileWriter:
    """A file being written, with O_DIRECT or through the page cache."""

    def __init__(self, directory: int, path: str, size: int) -> None:
        self._size = size
        with open_parent_beneath(directory, path) as (parent, name):
            self._fd = open_descriptor(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666, dir_fd=parent)
        try:
            _allocate(self._fd, size)
        except OSError:
            os.close(self._fd)
            raise
        if size >= DIRECT_IO_MIN_BYTES:
            self._set_direct(True)

    def _set_direct(self, on: bool) -> None:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        self.direct = on
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
        except OSError:
            self.direct = False  # tmpfs and others do not support direct I/O

    direct = False
    """True if writes bypass the page cache."""

    def write(self, buffer: memoryview, nbytes: int, offset: int) -> None:
        while nbytes > 0:
            wanted = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES if self.direct else nbytes
            try:
                done = os.pwrite(self._fd, buffer[:wanted], offset)
            except OSError as error:
                if error.errno == errno.EINVAL and self.direct:  # some network file systems only fail here
                    self._set_direct(False)
                    continue
                raise
            if done % BLOCK_BYTES and done < nbytes:  # after an unaligned short write, O_DIRECT cannot continue
                self._set_direct(False)
            buffer, nbytes, offset = buffer[done:], nbytes - done, offset + done

    def patch(self, data: bytes | memoryview, offset: int) -> None:
        if self.direct:
            self._set_direct(False)
        self.write(memoryview(data), len(data), offset)
        self._size = max(self._size, offset + len(data))

    def commit(self) -> None:
        try:
            os.ftruncate(self._fd, self._size)
            os.fsync(self._fd)
        finally:
            self.abort()

    def abort(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def open_regular_file(directory: int | str, path: str, *, links: bool = False) -> tuple[int, os.stat_result]:
    """Open a regular file for reading; return its descriptor and its status. All files of checkpoints are opened here.

    With `links=True` the file may be a symbolic link. Links to parent directories are never followed.

    Raises:
        NotAFileError: The path is a pipe, a device, a directory or a link.
        OSError: The storage failed; FileNotFoundError if the file does not exist, NotADirectoryError as in
            `open_parent_beneath`.
    """
    # Without O_NONBLOCK, opening a pipe would block until a process writes to it.
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)
    with open_parent_beneath(directory, path) as (parent, name):
        try:
            fd = open_descriptor(name, flags, dir_fd=parent)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise make_not_a_file_error(path, "a link") from error
            raise
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise make_not_a_file_error(path, "a directory" if stat.S_ISDIR(status.st_mode) else "a pipe or a device")
    return fd, status


def make_not_a_file_error(path: str, kind: str) -> NotAFileError:
    """Return the error for an object that is not a regular file."""
    return NotAFileError(
        "not a regular file: it is not read",
        file=path,
        found=kind,
        hint="A checkpoint has no such thing. Restore the file from a copy, or load another tag.",
    )


class LocalFileReader:
    """A file being read, which may be closed between reads: see `xla_ckpt.storage.local_file`."""

    def __init__(self, directory: SharedDescriptor, path: str, *, links: bool = False) -> None:
        self._directory: SharedDescriptor | None = directory
        """Directory used to reopen the file; None if the reader is closed."""
        self._path = path
        self._links = links
        self._lock = threading.Lock()
        self._readers = 0
        self._fd = -1
        """Descriptor of the file; -1 while it is suspended."""
        self._direct_fd: int | None = None
        """Descriptor for direct I/O; None if not opened yet, -1 if unavailable."""
        self._pages: npt.NDArray[np.uint8] | None = None
        self._fd, status = open_regular_file(directory.fd, path, links=links)
        self._version = _get_file_version(status)
        self.size = status.st_size
        IDLE_FILES.add(self)
        IDLE_FILES.suspend()

    @contextmanager
    def _hold_open(self) -> Iterator[int]:
        """Yield the descriptor of the file and keep it open within the context.

        Raises:
            ChangedTagError: The file was replaced while it was suspended.
            FileNotFoundError: The file was deleted while it was suspended.
        """
        with self._lock:
            if self._fd < 0:
                self._reopen()
            self._readers += 1
            IDLE_FILES.discard(self)
        try:
            yield self._fd
        finally:
            with self._lock:
                self._readers -= 1
                if not self._readers and self._fd >= 0:
                    IDLE_FILES.add(self)
            IDLE_FILES.suspend()

    def _reopen(self) -> None:
        if self._directory is None:
            raise OSError(errno.EBADF, "the file is closed", self._path)
        fd, status = open_regular_file(self._directory.fd, self._path, links=self._links)
        if _get_file_version(status) != self._version:
            os.close(fd)
            raise ChangedTagError(
                "a file was replaced while it was being read", file=self._path, hint="Load it again, or another one."
            )
        self._fd = fd

    def suspend(self) -> None:
        """Close the file until the next read, unless it is being read."""
        with self._lock:
            if not self._readers:
                self._release()

    def read_into(self, buffer: memoryview, offset: int) -> int:
        done = 0
        with self._hold_open() as fd:
            while done < len(buffer):
                got = os.preadv(fd, [buffer[done:]], offset + done)
                if got == 0:
                    break
                done += got
        return done

    def read_once(self, buffer: memoryview, offset: int, scratch: memoryview) -> int:
        with self._hold_open():
            return self._read_once(buffer, offset, scratch)

    def _read_once(self, buffer: memoryview, offset: int, scratch: memoryview) -> int:
        fd = self._get_direct_fd()
        if fd < 0 or self._is_mostly_cached(offset, len(buffer)):
            return self.read_into(buffer, offset)
        target = np.frombuffer(buffer, np.uint8)
        step = len(scratch) // BLOCK_BYTES * BLOCK_BYTES
        done = 0
        while done < len(buffer):
            # The range may begin and end within a block, and complete blocks are read.
            at = offset + done
            skip = at % BLOCK_BYTES
            wanted = min(step, -(-(skip + len(buffer) - done) // BLOCK_BYTES) * BLOCK_BYTES)
            try:
                got = os.preadv(fd, [scratch[:wanted]], at - skip) - skip
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                got = 0  # a different block size, or a file system that only fails here
            if got <= 0:
                return done + self.read_into(buffer[done:], at)
            got = min(got, len(buffer) - done)
            np.copyto(target[done : done + got], np.frombuffer(scratch, np.uint8)[skip : skip + got])
            done += got
        return done

    def _is_mostly_cached(self, offset: int, nbytes: int) -> bool:
        """Return True if more than half of the beginning of a range is in the page cache."""
        # Not with RWF_NOWAIT reads: they trigger readahead, so the disk would read everything twice.
        assert self._pages is not None
        first = offset // mmap.PAGESIZE
        last = -(-min(offset + min(nbytes, CACHE_PROBE_BYTES), self.size) // mmap.PAGESIZE)
        cached = (ctypes.c_ubyte * max(last - first, 0))()
        begin = self._pages.ctypes.data + first * mmap.PAGESIZE
        if _libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(len(cached) * mmap.PAGESIZE), cached):
            return True  # unknown: a read through the page cache always works
        return int(np.count_nonzero(np.frombuffer(memoryview(cached), np.uint8) & 1)) * 2 > len(cached)

    def _get_direct_fd(self) -> int:
        """Return a descriptor of the file for direct I/O, or -1 if that is impossible or disabled."""
        with self._lock:
            if self._direct_fd is None:
                self._direct_fd = -1
                if self.size >= DIRECT_IO_MIN_BYTES and os.environ.get(CACHED_READS_VARIABLE, "0") != "1":
                    self._open_direct()
            return self._direct_fd

    def _open_direct(self) -> None:
        try:
            # The mapping is only passed to mincore, never read.
            self._pages = np.frombuffer(mmap.mmap(self._fd, self.size, prot=mmap.PROT_READ), np.uint8)
            # Not by name, which may refer to another file by now.
            self._direct_fd = open_descriptor(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_DIRECT)
        except (OSError, ValueError, AttributeError):
            self._pages = None  # tmpfs and others lack direct I/O, some systems lack /proc

    def close(self) -> None:
        IDLE_FILES.discard(self)
        with self._lock:
            self._directory = None
            self._release()

    def _release(self) -> None:
        fds, self._fd, self._direct_fd, self._pages = (self._fd, self._direct_fd), -1, None, None
        for fd in fds:
            if fd is not None and fd >= 0:
                os.close(fd)


def _get_file_version(status: os.stat_result) -> tuple[int, ...]:
    """Return values that distinguish a file from a later one with its name, since inode numbers are reused."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
