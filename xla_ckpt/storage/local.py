"""Directories of the local (or a network) file system.

Everything goes through the descriptor of the directory, so that a writer or reader keeps *its* directory when a
rename puts another one in its place. A lock on that descriptor says that it is in use.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import shutil
import time

from xla_ckpt.plan.costs import DISK
from xla_ckpt.storage.base import Directory, Identity, ReadDirectory
from xla_ckpt.storage.local_file import LocalSink, LocalSource, open_regular

logger = logging.getLogger(__name__)

UNLOCKED_AGE = 3600.0
"""Seconds without a change after which a directory counts as unused, where the file system has no locks.

A save that is alive writes, or waits for other ranks, and that for no longer than its timeout: half an hour unless the
caller says otherwise. As much again is left for clocks that differ. A load seldom takes so long.
"""

OPENINGS = 8
"""How often a directory is opened again that was moved when it got its lock.

A file system whose numbers of files change would have it opened for ever.
"""

MARKS = 50
"""How often it is tried to mark a directory as being in use, a millisecond apart."""

_libc = ctypes.CDLL(None, use_errno=True)

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
"""Arguments of Linux's `renameat2`, which python has no function for."""


class LocalDirectory:
    """A directory, held by its descriptor."""

    costs = DISK
    streaming = None

    def __init__(self, path: str | os.PathLike[str], *, links: bool = False) -> None:
        self._fd = -1
        self._locked_by = 0
        """Which process has locked it with this descriptor; 0 if none has."""
        self.path = os.fspath(path)
        self._links = links
        self.name = os.path.basename(self.path)
        self._touched = {""}
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __del__(self) -> None:
        # What a signal handler raises may take a directory from who has just opened it, before anybody can close it: it
        # would be in use as long as the process runs.
        self.close()

    @property
    def fd(self) -> int:
        """The descriptor."""
        return self._fd

    def create(self, path: str, size: int) -> LocalSink:
        parents = self._make(path.split("/")[:-1])
        sink = LocalSink(self._fd, path, size)
        self._touched.update(parents)
        return sink

    def make(self, path: str) -> None:
        paths = self._make(path.split("/"))
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd))  # a file is no directory
        self._touched.update(paths)

    def adopt(self, other: Directory, path: str) -> None:
        assert isinstance(other, LocalDirectory), "both are directories of one store"
        parents = self._make(path.split("/")[:-1])
        # By descriptors: another directory may have the name of this one by now, and must not get the file.
        os.rename(path, path, src_dir_fd=other.fd, dst_dir_fd=self._fd)
        self._touched.update(parents)

    def link(self, source: ReadDirectory, path: str, name: str) -> None:
        assert isinstance(source, LocalDirectory), "both are directories of one store"
        parents = self._make(name.split("/")[:-1])
        os.link(path, name, src_dir_fd=source.fd, dst_dir_fd=self._fd, follow_symlinks=False)
        self._touched.update(parents)

    def _make(self, parts: list[str]) -> list[str]:
        """Make a directory and its parents; the paths of all of them."""
        paths: list[str] = []
        for part in parts:
            paths.append(f"{paths[-1]}/{part}" if paths else part)
            try:
                os.mkdir(paths[-1], dir_fd=self._fd)
            except FileExistsError:
                pass  # another writer of the same save was here first
        return paths

    def replace(self, path: str, data: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(f"{path}.new", flags, 0o666, dir_fd=self._fd)
        try:
            written = os.write(fd, data)
        finally:
            os.close(fd)
        if written < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        os.rename(f"{path}.new", path, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def open(self, path: str, size: int | None = None) -> LocalSource:
        return LocalSource(self._fd, path, links=self._links)

    def files(self) -> list[str]:
        paths = []
        for parent, _, names, _ in os.fwalk(".", dir_fd=self._fd):
            paths += [os.path.normpath(f"{parent}/{name}") for name in names]
        return sorted(paths)

    def sync(self) -> None:
        for name in sorted(self._touched, reverse=True):  # children before parents
            fd = os.open(name or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._fd)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def free(self) -> int | None:
        try:
            status = os.fstatvfs(self._fd)
        except OSError as error:
            logger.debug("%s does not say how much is free: %s", self.path, error)
            return None
        return status.f_bavail * status.f_frsize if status.f_blocks else None  # some network file systems say 0 of 0

    def is_at(self, name: str) -> bool:
        return is_at(self, os.path.join(os.path.dirname(self.path), name))

    def lock(self, how: int) -> None:
        """Lock it until it is closed; raises `BlockingIOError` where somebody else has."""
        fcntl.flock(self._fd, how | fcntl.LOCK_NB)
        self._locked_by = os.getpid()

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            try:
                if self._locked_by == os.getpid():
                    # A process that was forked meanwhile, such as a data loader's worker, has a copy of the descriptor.
                    # It would keep the lock as long as it runs, and retention would leave the directory alone.
                    fcntl.flock(fd, fcntl.LOCK_UN)
            except OSError as error:
                logger.debug("%s: its lock goes with its last descriptor: %s", self.path, error)
            finally:
                os.close(fd)


class LocalStore:
    """A root directory of a file system. Locks are `flock`s on the directories in it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"LocalStore({self.path!r})"

    @property
    def file_system(self) -> LocalStore:
        """Itself."""
        return self

    object_store = None

    def identity(self, name: str) -> Identity | None:
        try:
            status = os.stat(self._at(name), follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_dev, status.st_ino

    def look(self) -> LocalStore:
        """Itself."""
        return self

    def address(self, name: str) -> str:
        return os.path.realpath(self._at(name))

    def _at(self, path: str) -> str:
        return os.path.join(self.path, path) if path else self.path

    def prepare(self) -> None:
        new, above = [], self.path
        while not os.path.isdir(above) and os.path.dirname(above) != above:
            above = os.path.dirname(above)
            new.append(above)
        os.makedirs(self.path, exist_ok=True)
        for parent in new:  # a loss of power would take the new directories, with all that is durable in them
            LocalStore(parent).sync()
        if not os.access(self.path, os.W_OK | os.X_OK):
            if os.statvfs(self.path).f_flag & os.ST_RDONLY:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), self.path)
            raise PermissionError(errno.EACCES, "no permission to write there", self.path)

    def names(self, path: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self._at(path)))
        except FileNotFoundError:
            return []
        except OSError as error:
            # A file, or a link that leads to itself, lies where a directory of a checkpoint may lie.
            if not path or error.errno not in (errno.ENOTDIR, errno.ELOOP, errno.EINVAL):
                raise
            return []

    def has(self, path: str) -> bool:
        return os.path.lexists(self._at(path))

    def is_directory(self, path: str) -> bool:
        return os.path.isdir(self._at(path))

    def start_of(self, path: str, nbytes: int, *, links: bool = True) -> bytes:
        fd, size = open_regular(self._at(path), links=links)
        try:
            return os.pread(fd, min(nbytes, size), 0)
        finally:
            os.close(fd)

    def modified(self, path: str) -> int | None:
        try:
            return os.stat(self._at(path)).st_mtime_ns
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # a link that leads to itself is no file
                return None
            raise

    def open(self, name: str, *, lock: bool = True, links: bool = False, write: bool = False) -> LocalDirectory:
        if not lock:
            return LocalDirectory(self._at(name), links=links)
        directory = self._locked(name, links, write)
        for _ in range(OPENINGS):
            if directory.is_at(directory.name):
                break
            # Between its opening and its lock it was moved, perhaps to be removed, and nobody saw that it is read.
            directory.close()
            directory = self._locked(name, links, write)
        return directory

    def _locked(self, name: str, links: bool, write: bool) -> LocalDirectory:
        directory = LocalDirectory(self._at(name), links=links)
        _mark(directory, fcntl.LOCK_EX if write else fcntl.LOCK_SH)
        return directory

    def make(self, name: str) -> LocalDirectory:
        # Between its making and its lock, a job that cleans up may take the directory for one that nobody uses.
        while True:
            os.mkdir(self._at(name))
            try:
                directory = LocalDirectory(self._at(name))
            except FileNotFoundError:
                continue
            _mark(directory, fcntl.LOCK_EX)
            if directory.is_at(directory.name):
                return directory
            directory.close()

    def held(self, name: str) -> bool | None:
        locked = _is_locked(self._at(name))
        return None if isinstance(locked, OSError) else locked

    def in_use(self, name: str) -> bool:
        locked = _is_locked(self._at(name))
        return locked if isinstance(locked, bool) else self._may_be_in_use(name, locked)

    def _may_be_in_use(self, name: str, error: OSError) -> bool:
        """Whether somebody may use a directory, where that error is all that its lock says."""
        _doubt(self._at(name), error)
        return _is_young(self._at(name))

    def rename(self, old: str, new: str) -> None:
        os.rename(self._at(old), self._at(new))

    def exchange(self, one: str, other: str) -> bool:
        if not hasattr(_libc, "renameat2"):
            return False
        paths = [os.fsencode(self._at(name)) for name in (one, other)]
        if _libc.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
            return True
        code = ctypes.get_errno()
        if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):  # the kernel or the file system cannot
            return False
        raise OSError(code, os.strerror(code), self._at(one), None, self._at(other))

    def remove(self, name: str) -> None:
        shutil.rmtree(self._at(name))

    def remove_unused(self, name: str) -> bool:
        directory = LocalDirectory(self._at(name))
        try:
            try:
                # Kept until it is removed: what is removed goes by its name, and without the lock another program could
                # remove it first and fill a new directory of that name.
                directory.lock(fcntl.LOCK_EX)
            except BlockingIOError:
                return False
            except OSError as error:
                if self._may_be_in_use(name, error):
                    return False
            if not directory.is_at(directory.name):
                raise FileNotFoundError(errno.ENOENT, "another program removed it", directory.path)
            self.remove(name)
        finally:
            directory.close()
        return True

    def remove_empty(self, name: str) -> bool:
        try:
            os.rmdir(self._at(name))
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return False
        return True

    def sync(self) -> None:
        directory = LocalDirectory(self.path)
        try:
            directory.sync()
        finally:
            directory.close()


def is_at(directory: LocalDirectory, path: str) -> bool:
    """Whether a directory that was opened is the one that lies at a path."""
    try:
        return os.path.samestat(os.fstat(directory.fd), os.stat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _mark(directory: LocalDirectory, how: int) -> None:
    for _ in range(MARKS):
        try:
            directory.lock(how)
        except BlockingIOError:
            # Who asks whether a directory is in use holds it for that instant. Without another try it would be unmarked
            # from then on, and be removed while it is written or read.
            time.sleep(0.001)
        except OSError as error:
            # Where there are no locks, `in_use` goes by the age of a directory.
            logger.debug("%s is not marked as being in use: %s", directory.path, error)
            return
        else:
            return
    logger.debug("%s is not marked as being in use: somebody else has marked it", directory.path)


def _is_locked(path: str) -> bool | OSError:
    """Whether somebody has marked a directory as being read or written; or why that cannot be found out."""
    try:
        directory = LocalDirectory(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        return error
    try:
        directory.lock(fcntl.LOCK_EX)
    except BlockingIOError:
        return True
    except OSError as error:  # ENOTSUP, ENOLCK, ENOSYS: not every file system has locks
        return error
    finally:
        directory.close()
    return False


def _is_young(path: str) -> bool:
    """Whether something in a directory has changed in the last `UNLOCKED_AGE` seconds."""

    def fail(error: OSError) -> None:
        raise error

    since = time.time() - UNLOCKED_AGE
    try:
        places = (os.path.join(at, name) for at, _, files in os.walk(path, onerror=fail) for name in ("", *files))
        return any(os.lstat(place).st_mtime > since for place in places)
    except OSError as error:
        # A file that has vanished meanwhile means that somebody is at work there.
        logger.debug("%s is left alone: %s", path, error)
        return True


_DOUBTED: set[int | None] = set()
"""Numbers of the errors that `_doubt` has told of."""


def _doubt(path: str, error: OSError) -> None:
    if error.errno not in _DOUBTED:
        _DOUBTED.add(error.errno)
        logger.warning(
            "cannot find out whether %s is in use (%s): this and others like it are left alone until nothing in them "
            "has changed for %g minutes, also if num_kept_ckpts would delete them",
            path,
            error.strerror or error,
            UNLOCKED_AGE / 60,
        )
