"""Local files: direct I/O (O_DIRECT), page-cache probes, and a limit on open descriptors.

Large files bypass the page cache, which on these paths costs more than the disk. Paths are resolved beneath an open
directory without following links. Idle files are closed, least recently used first, when the process runs short of
descriptors, and reopened on the next read.
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
"""One part in so many of the descriptors that the process may have is for files that nobody reads at the moment. Each
takes up to three: one more reads around the page cache, and one belongs to a mapping."""

MIN_IDLE_FILES = 4
"""So many files stay open whatever the limit is."""

_TOO_MANY = (errno.EMFILE, errno.ENFILE)


class Suspendable(Protocol):
    """A file that can be closed while nobody reads it."""

    def suspend(self) -> None:
        """Close it, unless somebody has begun to read it."""


class IdleFiles:
    """The files of this process that are open and that nobody reads."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._files: OrderedDict[Suspendable, None] = OrderedDict()

    def reset_after_fork(self) -> None:
        """Forget all of them in a forked process. They stay open: a thread of the parent may hold the lock of one."""
        self._files.clear()

    def add(self, file: Suspendable) -> None:
        """Keep a file that nobody reads any more, as the one that was read last."""
        with self._lock:
            self._files[file] = None

    def discard(self, file: Suspendable) -> None:
        """Leave a file alone: it is being read, or closed."""
        with self._lock:
            self._files.pop(file, None)

    def suspend(self, limit: int | None = None) -> bool:
        """Close those that were read longest ago until there are `limit`; whether any was closed.

        By default so many stay open as the limit of the process allows. No lock of a file may be held.
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
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # each time: a program may lower it
    return max(soft // IDLE_DIVISOR, MIN_IDLE_FILES) if soft != resource.RLIM_INFINITY else 1 << 20


def open_descriptor(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    """As `os.open`, which makes room for it where this process has too many files open."""
    try:
        return os.open(path, flags | os.O_CLOEXEC, mode, dir_fd=dir_fd)
    except OSError as error:
        if error.errno not in _TOO_MANY or not IDLE_FILES.suspend(0):
            raise
    return os.open(path, flags | os.O_CLOEXEC, mode, dir_fd=dir_fd)


class SharedDescriptor:
    """A descriptor that several objects share. The last one that forgets it closes it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


DIRECT_IO_MIN_BYTES = 1 << 20
"""Files from this size on are written around the page cache, and read around it if they are not in it."""

CACHE_PROBE_BYTES = 256 * 1024
"""What is looked at of a range to know whether it is in the page cache: to ask about each page takes as long as half of
the copy out of it, and the kernel takes in and gives up neighbours together."""

CACHED_READS_VARIABLE = "XLA_CKPT_CACHED_READS"
"""Environment variable: ``1`` has all reads go through the page cache.

That is better where many processes of a machine load the same files and are not one job.
"""

_libc = ctypes.CDLL(None, use_errno=True)


def check_encodable(path: str) -> None:
    """Refuse a path that the operating system cannot be given.

    Raises:
        UsageError: It has characters that the encoding of the file system lacks, or the character NUL.
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
    """Yield a descriptor of the directory in which a path ends, and the last name of the path, for calls with dir_fd=.

    No link on the way is followed, so that nothing outside of the directory is reached; what a caller does with the
    last name must not follow one either.

    Args:
        directory: The descriptor or the path of the directory in which the path begins; "" is the directory itself.
        path: Names with ``/``.

    Raises:
        NotADirectoryError: A link, or a file, is on the way.
        UsageError: The path has characters that the encoding of the file system lacks, or the character NUL.
        OSError: The storage refused; FileNotFoundError if a directory is not there.
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
        while opened:  # each is forgotten first: an interrupted close would be done again, to another file by then
            os.close(opened.pop())


def _allocate(fd: int, size: int) -> None:
    """Reserve the blocks of a file where the file system can: a full disk is found out before anything is written.

    (Not `os.posix_fallocate`, which writes every block by hand where the file system cannot.)
    """
    if size and hasattr(_libc, "fallocate"):
        failed = _libc.fallocate(fd, 0, ctypes.c_longlong(0), ctypes.c_longlong(size))
        code = ctypes.get_errno() if failed else 0
        if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise OSError(code, os.strerror(code))


class LocalFileWriter:
    """A file being written, through O_DIRECT or the page cache."""

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
            self.direct = False  # tmpfs and others have no direct I/O: the page cache it is

    direct = False
    """Whether writes go around the page cache."""

    def write(self, buffer: memoryview, nbytes: int, offset: int) -> None:
        while nbytes > 0:
            wanted = -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES if self.direct else nbytes
            try:
                done = os.pwrite(self._fd, buffer[:wanted], offset)
            except OSError as error:
                if error.errno == errno.EINVAL and self.direct:  # refused only now: some network file systems do
                    self._set_direct(False)
                    continue
                raise
            if done % BLOCK_BYTES and done < nbytes:  # a short write off the grid cannot go on with O_DIRECT
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
    """A descriptor that reads a file, and the status of the file. All files of checkpoints are opened here.

    With `list_segments` it may be a link to a file elsewhere. No link on the way to it is followed.

    Raises:
        NotAFileError: It is a pipe, a device, a directory or a link.
        OSError: The storage refused; FileNotFoundError if there is none, NotADirectoryError as `open_parent_beneath`.
    """
    # A pipe would block the opening until somebody writes to it.
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
    """The error for what a checkpoint cannot have in the place of a file."""
    return NotAFileError(
        "not a regular file: it is not read",
        file=path,
        found=kind,
        hint="A checkpoint has no such thing. Restore the file from a copy, or load another tag.",
    )


class LocalFileReader:
    """A file being read. It need not stay open between two reads: see `xla_ckpt.storage.local_file`."""

    def __init__(self, directory: SharedDescriptor, path: str, *, links: bool = False) -> None:
        self._directory: SharedDescriptor | None = directory
        """Where it is opened again; None when it is closed."""
        self._path = path
        self._links = links
        self._lock = threading.Lock()
        self._readers = 0
        self._fd = -1
        """Its descriptor; -1 while it is not open."""
        self._direct_fd: int | None = None
        """Descriptor for reads around the page cache; -1 where there is none."""
        self._pages: npt.NDArray[np.uint8] | None = None
        self._fd, status = open_regular_file(directory.fd, path, links=links)
        self._version = _get_file_version(status)
        self.size = status.st_size
        IDLE_FILES.add(self)
        IDLE_FILES.suspend()

    @contextmanager
    def _hold_open(self) -> Iterator[int]:
        """Its descriptor, which stays open meanwhile.

        Raises:
            ChangedTagError: It is another file than it was.
            FileNotFoundError: It is gone.
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
        """Close the file until it is read again, unless somebody reads it."""
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
            # Both ends of what is wanted may lie inside of a block, which is read whole.
            at = offset + done
            skip = at % BLOCK_BYTES
            wanted = min(step, -(-(skip + len(buffer) - done) // BLOCK_BYTES) * BLOCK_BYTES)
            try:
                got = os.preadv(fd, [scratch[:wanted]], at - skip) - skip
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                got = 0  # blocks of another size than ours, or a file system that refuses only now
            if got <= 0:
                return done + self.read_into(buffer[done:], at)
            got = min(got, len(buffer) - done)
            np.copyto(target[done : done + got], np.frombuffer(scratch, np.uint8)[skip : skip + got])
            done += got
        return done

    def _is_mostly_cached(self, offset: int, nbytes: int) -> bool:
        """Whether more than half of the beginning of a range of the file lies in the page cache."""
        # Not by a read with RWF_NOWAIT: it begins to read ahead, and the disk would read everything twice.
        assert self._pages is not None
        first = offset // mmap.PAGESIZE
        last = -(-min(offset + min(nbytes, CACHE_PROBE_BYTES), self.size) // mmap.PAGESIZE)
        cached = (ctypes.c_ubyte * max(last - first, 0))()
        begin = self._pages.ctypes.data + first * mmap.PAGESIZE
        if _libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(len(cached) * mmap.PAGESIZE), cached):
            return True  # unknown: a read through the page cache is never wrong
        return int(np.count_nonzero(np.frombuffer(memoryview(cached), np.uint8) & 1)) * 2 > len(cached)

    def _get_direct_fd(self) -> int:
        """A descriptor of the same file that goes around the page cache; -1 where that is impossible or unwanted."""
        with self._lock:
            if self._direct_fd is None:
                self._direct_fd = -1
                if self.size >= DIRECT_IO_MIN_BYTES and os.environ.get(CACHED_READS_VARIABLE, "0") != "1":
                    self._open_direct()
            return self._direct_fd

    def _open_direct(self) -> None:
        try:
            # Nothing is read through the mapping: it is what the system is asked about.
            self._pages = np.frombuffer(mmap.mmap(self._fd, self.size, prot=mmap.PROT_READ), np.uint8)
            # Not by its name, which another file may have by now.
            self._direct_fd = open_descriptor(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_DIRECT)
        except (OSError, ValueError, AttributeError):
            self._pages = None  # tmpfs and others have no direct I/O, some systems no /proc

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
    """What tells a file from one that took its name later: a number is given anew when its file is gone."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
