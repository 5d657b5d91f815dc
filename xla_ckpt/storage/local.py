"""Root directories of the local (or a network) file system: names, and who uses the directories in them.

A lock on the descriptor of a directory says that it is in use.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import stat
import time

from xla_ckpt.errors import StorageError
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import Identity
from xla_ckpt.storage.local_directory import LocalDirectory
from xla_ckpt.storage.local_file import beneath, check_encodable, open_regular

logger = get_logger(__name__)

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

REMOVALS = 3
"""How often it is tried to remove a directory that somebody still writes to."""

_libc = ctypes.CDLL(None, use_errno=True)

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
"""Arguments of Linux's `renameat2`, which python has no function for."""


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
            status = self._status(name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_dev, status.st_ino

    def look(self) -> LocalStore:
        """Itself."""
        return self

    def address(self, name: str) -> str:
        return os.path.realpath(self._at(name))

    def _at(self, path: str) -> str:
        check_encodable(path)
        return os.path.join(self.path, path) if path else self.path

    def _status(self, path: str) -> os.stat_result:
        """What has a path, which may be a link if it is the root itself."""
        with beneath(self.path, path) as (parent, name):
            return os.stat(name, dir_fd=parent, follow_symlinks=not path)

    def prepare(self) -> bool:
        new, above = [], self.path
        while not os.path.isdir(above) and os.path.dirname(above) != above:
            above = os.path.dirname(above)
            new.append(above)
        try:
            os.makedirs(self.path, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            hint = "A file has this name, or lies on the way to it: pass the path of a directory."
            raise StorageError.of(error, "making the root directory", path=self.path, hint=hint) from error
        for parent in new:  # a loss of power would take the new directories, with all that is durable in them
            LocalStore(parent).sync()
        if not os.access(self.path, os.W_OK | os.X_OK):
            if os.statvfs(self.path).f_flag & os.ST_RDONLY:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), self.path)
            raise PermissionError(errno.EACCES, "no permission to write there", self.path)
        return bool(new)

    def names(self, path: str = "") -> list[str]:
        try:
            if not path:
                return sorted(os.listdir(self.path))
            with contextlib.closing(LocalDirectory(self.path, inside=path)) as directory:
                return sorted(os.listdir(directory.fd))
        except FileNotFoundError:
            return []
        except OSError as error:
            # A file, or a link, lies where a directory of a checkpoint may lie.
            if not path or error.errno not in (errno.ENOTDIR, errno.ELOOP, errno.EINVAL):
                raise
            return []

    def has(self, path: str) -> bool:
        if not path:
            return os.path.lexists(self.path)
        try:
            self._status(path)
        except (OSError, ValueError):
            return False
        return True

    def is_directory(self, path: str) -> bool:
        try:
            return stat.S_ISDIR(self._status(path).st_mode)
        except (OSError, ValueError):
            return False

    def start_of(self, path: str, nbytes: int, *, links: bool = True) -> bytes:
        fd, status = open_regular(self.path, path, links=links)
        try:
            return os.pread(fd, min(nbytes, status.st_size), 0)
        finally:
            os.close(fd)

    def modified(self, path: str) -> int | None:
        try:
            with beneath(self.path, path) as (parent, name):
                return os.stat(name, dir_fd=parent).st_mtime_ns
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # a link that leads to itself is no file
                return None
            raise

    def open(self, name: str, *, lock: bool = True, links: bool = False, write: bool = False) -> LocalDirectory:
        if not lock:
            return LocalDirectory(self.path, inside=name, links=links)
        directory = self._locked(name, links, write)
        for _ in range(OPENINGS):
            if directory.is_at(directory.name):
                break
            # Between its opening and its lock it was moved, perhaps to be removed, and nobody saw that it is read.
            directory.close()
            directory = self._locked(name, links, write)
        return directory

    def _locked(self, name: str, links: bool, write: bool) -> LocalDirectory:
        directory = LocalDirectory(self.path, inside=name, links=links)
        _mark(directory, fcntl.LOCK_EX if write else fcntl.LOCK_SH)
        return directory

    def make(self, name: str) -> LocalDirectory:
        # Between its making and its lock, a job that cleans up may take the directory for one that nobody uses.
        while True:
            with beneath(self.path, name) as (parent, last):
                os.mkdir(last, dir_fd=parent)
            try:
                directory = LocalDirectory(self.path, inside=name)
            except FileNotFoundError:
                continue
            _mark(directory, fcntl.LOCK_EX)
            if directory.is_at(directory.name):
                return directory
            directory.close()

    def held(self, name: str) -> bool | None:
        locked = self._is_locked(name)
        return None if isinstance(locked, OSError) else locked

    def in_use(self, name: str) -> bool:
        locked = self._is_locked(name)
        return locked if isinstance(locked, bool) else self._may_be_in_use(name, locked)

    def _is_locked(self, name: str) -> bool | OSError:
        """Whether somebody has marked a directory as being read or written; or why that cannot be found out."""
        try:
            directory = LocalDirectory(self.path, inside=name)
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

    def _may_be_in_use(self, name: str, error: OSError) -> bool:
        """Whether somebody may use a directory, where that error is all that its lock says."""
        _doubt(self._at(name), error)
        return _is_young(self._at(name))

    def rename(self, old: str, new: str) -> None:
        with beneath(self.path, old) as (parent, name), beneath(self.path, new) as (new_parent, new_name):
            os.rename(name, new_name, src_dir_fd=parent, dst_dir_fd=new_parent)

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
        with (
            beneath(self.path, name) as (parent, last),
            contextlib.closing(LocalDirectory(self.path, inside=name)) as directory,
        ):
            for left in reversed(range(REMOVALS)):
                try:
                    shutil.rmtree(last, dir_fd=parent)
                    return
                except OSError as error:
                    # Another process that has the directory open, such as one whose lease was taken over, may write to
                    # it meanwhile: then a file is new, or one that was listed has another name.
                    gone_on = error.errno in (errno.ENOENT, errno.ENOTEMPTY) and directory.is_at(directory.name)
                    if not gone_on or not left:
                        raise

    def remove_unused(self, name: str) -> bool:
        with contextlib.closing(LocalDirectory(self.path, inside=name)) as directory:
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
        return True

    def remove_empty(self, name: str) -> bool:
        try:
            with beneath(self.path, name) as (parent, last):
                os.rmdir(last, dir_fd=parent)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return False
        return True

    def sync(self) -> None:
        with contextlib.closing(LocalDirectory(self.path)) as directory:
            directory.sync()


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
