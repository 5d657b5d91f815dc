"""Local (or network) file system: directories, `flock` locks, atomic renames and removal.

`LocalDirectory` works through its file descriptor, so that a rename does not redirect a reader or writer. `LocalStore`
implements `FileSystem`. A lock on the descriptor of a directory marks it as in use; without locks its age decides.
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
from collections.abc import Iterator

from xla_ckpt.core.plan.read_costs import LOCAL_DISK_COSTS
from xla_ckpt.errors import StorageError
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import Directory, Identity, ReadDirectory
from xla_ckpt.storage.local_file import (
    LocalFileReader,
    LocalFileWriter,
    SharedDescriptor,
    check_encodable,
    make_not_a_file_error,
    open_descriptor,
    open_parent_beneath,
    open_regular_file,
)
from xla_ckpt.storage.threads import get_worker_count, run_tasks

logger = get_logger(__name__)

SYNC_THREADS = 8
"""Maximum number of threads that fsync directories, if there are many directories and enough cores."""


class LocalDirectory:
    """A directory, referenced by its file descriptor.

    Args:
        path: Path of the directory, which may be a symbolic link.
        subpath: If given, a path below `path`, on which no link is followed.
        links: True if files in the directory may be symbolic links to other files.
    """

    costs = LOCAL_DISK_COSTS
    streaming = None

    def __init__(self, path: str | os.PathLike[str], *, subpath: str | None = None, links: bool = False) -> None:
        self._descriptor: SharedDescriptor | None = None
        self._lock_owner_pid = 0
        """Id of the process that locked the directory through this descriptor; 0 if it is not locked."""
        self.path = os.path.join(path, subpath) if subpath else os.fspath(path)
        self._may_be_link = not subpath
        self._allow_links = links
        self.name = os.path.basename(self.path)
        self._unsynced = {""}
        flags = os.O_RDONLY | os.O_DIRECTORY | (os.O_NOFOLLOW if subpath else 0)
        with open_parent_beneath(os.fspath(path), subpath or "") as (parent, name):
            self._descriptor = SharedDescriptor(open_descriptor(name, flags, dir_fd=parent))

    def __del__(self) -> None:
        # An exception from a signal handler may discard a directory that was just opened, before the caller can close
        # it. Without this it would stay in use until the process exits.
        self.close()

    @property
    def fd(self) -> int:
        """File descriptor; -1 if closed."""
        return -1 if self._descriptor is None else self._descriptor.fd

    @property
    def identity(self) -> Identity:
        status = os.fstat(self.fd)
        return status.st_dev, status.st_ino

    def create(self, path: str, size: int) -> LocalFileWriter:
        parents = self._make_parents(path.split("/")[:-1])
        sink = LocalFileWriter(self.fd, path, size)
        self._unsynced.update(parents)
        return sink

    def make_directory(self, path: str) -> None:
        paths = self._make_parents(path.split("/"))
        os.close(self._open_subdirectory(path))  # fails if it is a file
        self._unsynced.update(paths)

    def _open_subdirectory(self, path: str) -> int:
        """Return a descriptor of a subdirectory, or of this directory for "."."""
        with open_parent_beneath(self.fd, path) as (parent, name):
            return open_descriptor(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)

    def move_in(self, other: Directory, path: str) -> None:
        assert isinstance(other, LocalDirectory), "both are directories of one store"
        parents = self._make_parents(path.split("/")[:-1])
        # By descriptor: another directory may have this name by now, and must not receive the file.
        with (
            self._explain_links(path),
            open_parent_beneath(other.fd, path) as (its_parent, name),
            open_parent_beneath(self.fd, path) as (parent, _),
        ):
            os.rename(name, name, src_dir_fd=its_parent, dst_dir_fd=parent)
        self._unsynced.update(parents)

    def link(self, source: ReadDirectory, path: str, name: str) -> None:
        assert isinstance(source, LocalDirectory), "both are directories of one store"
        parents = self._make_parents(name.split("/")[:-1])
        with (
            open_parent_beneath(source.fd, path) as (its_parent, old),
            open_parent_beneath(self.fd, name) as (parent, new),
        ):
            os.link(old, new, src_dir_fd=its_parent, dst_dir_fd=parent, follow_symlinks=False)
        self._unsynced.update(parents)

    def _make_parents(self, parts: list[str]) -> list[str]:
        """Create a directory and its parents; return the paths of all of them."""
        paths: list[str] = []
        for part in parts:
            paths.append(f"{paths[-1]}/{part}" if paths else part)
            try:
                with open_parent_beneath(self.fd, paths[-1]) as (parent, name):
                    os.mkdir(name, dir_fd=parent)
            except FileExistsError:
                pass  # another writer of the same save created it first
        return paths

    def write_atomic(self, path: str, data: bytes, *, durable: bool = False) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        fd = open_descriptor(f"{path}.new", flags, 0o666, dir_fd=self.fd)
        try:
            try:
                written = 0
                while written < len(data):  # after a short write, the next one raises the cause
                    written += os.write(fd, data[written:])
                if durable:
                    os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(f"{path}.new", path, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(f"{path}.new", dir_fd=self.fd)
            raise

    def open(self, path: str, size: int | None = None) -> LocalFileReader:
        if self._descriptor is None:
            raise OSError(errno.EBADF, "the directory is closed", self.path)
        with self._explain_links(path):
            return LocalFileReader(self._descriptor, path, links=self._allow_links)

    @contextlib.contextmanager
    def _explain_links(self, path: str) -> Iterator[None]:
        """Convert NotADirectoryError to a `NotAFileError` that names the symbolic link on the way to a file."""
        try:
            yield
        except NotADirectoryError as error:
            parents = path.split("/")[:-1]
            for place in ("/".join(parents[: number + 1]) for number in range(len(parents))):
                with contextlib.suppress(OSError):
                    found = f"{place} is a link to {os.readlink(place, dir_fd=self.fd)}"
                    break
            else:
                raise
            raise make_not_a_file_error(path, found) from error

    def list_files(self) -> list[str]:
        paths = []
        for parent, _, names, _ in os.fwalk(".", dir_fd=self.fd):
            paths += [os.path.normpath(f"{parent}/{name}") for name in names]
        return sorted(paths)

    def list_linked_directories(self) -> list[str]:
        return sorted(
            os.path.normpath(f"{parent}/{name}")
            for parent, names, _, fd in os.fwalk(".", dir_fd=self.fd)
            for name in names
            if stat.S_ISLNK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
        )

    def sync(self) -> None:
        touched, self._unsynced = self._unsynced, {""}  # directories created meanwhile are synced by the next call
        by_depth: dict[int, list[str]] = {}
        for name in touched:
            by_depth.setdefault(len(name.split("/")) if name else 0, []).append(name)
        try:
            for _, names in sorted(by_depth.items(), reverse=True):  # children before parents
                # In parallel: each thread waits for the disk, which commits many directories at once.
                workers = min(get_worker_count(SYNC_THREADS, 3), len(names))
                run_tasks(sorted(names), self._sync_one, workers=workers, buffer_bytes=0, name="xla_ckpt-sync")
        except BaseException:
            self._unsynced |= touched
            raise

    def _sync_one(self, name: str, _: memoryview) -> None:
        fd = self._open_subdirectory(name or ".")
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def get_free_bytes(self) -> int | None:
        try:
            status = os.fstatvfs(self.fd)
        except OSError as error:
            logger.debug("%s does not say how much is free: %s", self.path, error)
            return None
        return status.f_bavail * status.f_frsize if status.f_blocks else None  # some network file systems report 0 of 0

    def is_at(self, name: str) -> bool:
        path = os.path.join(os.path.dirname(self.path), name)
        try:
            return os.path.samestat(os.fstat(self.fd), os.stat(path, follow_symlinks=self._may_be_link))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def lock(self, how: int) -> None:
        """Lock the directory until it is closed, without blocking.

        Raises:
            BlockingIOError: Another descriptor holds a conflicting lock.
            OSError: The file system does not support locks.
        """
        fcntl.flock(self.fd, how | fcntl.LOCK_NB)
        self._lock_owner_pid = os.getpid()

    def close(self) -> None:
        # Readers of files in this directory that are still open share the descriptor.
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and self._lock_owner_pid == os.getpid():
            # A process forked in the meantime, such as a data loader worker, has a copy of the descriptor. It would
            # hold the lock until it exits, and retention would skip the directory.
            try:
                fcntl.flock(descriptor.fd, fcntl.LOCK_UN)
            except OSError as error:
                logger.debug("%s: its lock goes with its last descriptor: %s", self.path, error)


UNLOCKED_IDLE_SECONDS = 3600.0
"""Seconds without a modification after which a directory counts as unused on a file system without locks.

A running save writes, or waits for other ranks for at most its timeout (half an hour by default). The other half hour
allows for clock skew. Loads seldom take that long.
"""

REOPEN_ATTEMPTS = 8
"""Maximum number of times that a directory is opened again because it was moved before it was locked.

Bounded because a file system with unstable inode numbers would repeat this forever.
"""

LOCK_ATTEMPTS = 50
"""Number of attempts to lock a directory, one millisecond apart."""

REMOVE_ATTEMPTS = 3
"""Number of attempts to remove a directory that another process still writes to."""

_libc = ctypes.CDLL(None, use_errno=True)

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
"""Arguments of Linux's `renameat2`, which the Python standard library does not expose."""


class LocalStore:
    """A root directory of a file system. Locks are `flock` locks on the directories in it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"LocalStore({self.path!r})"

    @property
    def file_system(self) -> LocalStore:
        """This store."""
        return self

    object_store = None

    def get_identity(self, name: str) -> Identity | None:
        try:
            status = self._stat(name)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_dev, status.st_ino

    def snapshot_view(self) -> LocalStore:
        """Return this store."""
        return self

    def resolve_address(self, name: str) -> str:
        return os.path.realpath(self._get_path(name))

    def _get_path(self, path: str) -> str:
        check_encodable(path)
        return os.path.join(self.path, path) if path else self.path

    def _stat(self, path: str) -> os.stat_result:
        """Return the status of a path, following a link only for the root itself."""
        with open_parent_beneath(self.path, path) as (parent, name):
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
        for parent in new:  # otherwise a power loss could remove the new directories with all durable data in them
            LocalStore(parent).sync()
        if not os.access(self.path, os.W_OK | os.X_OK):
            if os.statvfs(self.path).f_flag & os.ST_RDONLY:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), self.path)
            raise PermissionError(errno.EACCES, "no permission to write there", self.path)
        return bool(new)

    def list_names(self, path: str = "") -> list[str]:
        try:
            if not path:
                return sorted(os.listdir(self.path))
            with contextlib.closing(LocalDirectory(self.path, subpath=path)) as directory:
                return sorted(os.listdir(directory.fd))
        except FileNotFoundError:
            return []
        except OSError as error:
            # A file or a link is located where a checkpoint may have a directory.
            if not path or error.errno not in (errno.ENOTDIR, errno.ELOOP, errno.EINVAL):
                raise
            return []

    def has(self, path: str) -> bool:
        if not path:
            return os.path.lexists(self.path)
        try:
            self._stat(path)
        except (OSError, ValueError):
            return False
        return True

    def is_directory(self, path: str) -> bool:
        try:
            return stat.S_ISDIR(self._stat(path).st_mode)
        except (OSError, ValueError):
            return False

    def read_start(self, path: str, nbytes: int, *, links: bool = True) -> bytes:
        fd, status = open_regular_file(self.path, path, links=links)
        try:
            return os.pread(fd, min(nbytes, status.st_size), 0)
        finally:
            os.close(fd)

    def get_modified_time(self, path: str) -> int | None:
        try:
            with open_parent_beneath(self.path, path) as (parent, name):
                return os.stat(name, dir_fd=parent).st_mtime_ns
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # ELOOP: a link to itself
                return None
            raise

    def open(self, name: str, *, lock: bool = True, links: bool = False, write: bool = False) -> LocalDirectory:
        if not lock:
            return LocalDirectory(self.path, subpath=name, links=links)
        directory = self._open_locked(name, links, write)
        for _ in range(REOPEN_ATTEMPTS):
            if directory.is_at(directory.name):
                break
            # It was moved between open and lock, perhaps to be removed by a process that did not see the lock.
            directory.close()
            directory = self._open_locked(name, links, write)
        return directory

    def _open_locked(self, name: str, links: bool, write: bool) -> LocalDirectory:
        directory = LocalDirectory(self.path, subpath=name, links=links)
        _lock_with_retries(directory, fcntl.LOCK_EX if write else fcntl.LOCK_SH)
        return directory

    def make_directory(self, name: str) -> LocalDirectory:
        # Between mkdir and lock, a job that cleans up may remove the directory as unused.
        while True:
            with open_parent_beneath(self.path, name) as (parent, last):
                os.mkdir(last, dir_fd=parent)
            try:
                directory = LocalDirectory(self.path, subpath=name)
            except FileNotFoundError:
                continue
            _lock_with_retries(directory, fcntl.LOCK_EX)
            if directory.is_at(directory.name):
                return directory
            directory.close()

    def get_lock_state(self, name: str) -> bool | None:
        locked = self._is_locked(name)
        return None if isinstance(locked, OSError) else locked

    def is_in_use(self, name: str) -> bool:
        locked = self._is_locked(name)
        return locked if isinstance(locked, bool) else self._may_be_in_use(name, locked)

    def _is_locked(self, name: str) -> bool | OSError:
        """Return True if a process has locked a directory, or the error that prevents the check."""
        try:
            directory = LocalDirectory(self.path, subpath=name)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            return error
        try:
            directory.lock(fcntl.LOCK_EX)
        except BlockingIOError:
            return True
        except OSError as error:  # ENOTSUP, ENOLCK, ENOSYS: not every file system supports locks
            return error
        finally:
            directory.close()
        return False

    def _may_be_in_use(self, name: str, error: OSError) -> bool:
        """Return True if a directory whose lock state is unknown because of `error` was modified recently."""
        _warn_lock_unknown(self._get_path(name), error)
        return _is_recently_modified(self._get_path(name))

    def rename(self, old: str, new: str) -> None:
        with (
            open_parent_beneath(self.path, old) as (parent, name),
            open_parent_beneath(self.path, new) as (new_parent, new_name),
        ):
            os.rename(name, new_name, src_dir_fd=parent, dst_dir_fd=new_parent)

    def exchange(self, one: str, other: str) -> bool:
        if not hasattr(_libc, "renameat2"):
            return False
        paths = [os.fsencode(self._get_path(name)) for name in (one, other)]
        if _libc.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
            return True
        code = ctypes.get_errno()
        if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):  # unsupported by the kernel or the file system
            return False
        raise OSError(code, os.strerror(code), self._get_path(one), None, self._get_path(other))

    def remove(self, name: str) -> None:
        with (
            open_parent_beneath(self.path, name) as (parent, last),
            contextlib.closing(LocalDirectory(self.path, subpath=name)) as directory,
        ):
            for left in reversed(range(REMOVE_ATTEMPTS)):
                try:
                    shutil.rmtree(last, dir_fd=parent)
                    return
                except OSError as error:
                    # Another process that has the directory open, such as one whose lease was taken over, may write to
                    # it meanwhile: then there is a new file, or a listed file has been renamed.
                    gone_on = error.errno in (errno.ENOENT, errno.ENOTEMPTY) and directory.is_at(directory.name)
                    if not gone_on or not left:
                        raise

    def remove_unused(self, name: str) -> bool:
        with contextlib.closing(LocalDirectory(self.path, subpath=name)) as directory:
            try:
                # Hold the lock until the directory is removed. Removal is by name: without the lock, another program
                # could remove it first and create a new directory with that name.
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
            with open_parent_beneath(self.path, name) as (parent, last):
                os.rmdir(last, dir_fd=parent)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return False
        return True

    def sync(self) -> None:
        with contextlib.closing(LocalDirectory(self.path)) as directory:
            directory.sync()


def _lock_with_retries(directory: LocalDirectory, how: int) -> None:
    for _ in range(LOCK_ATTEMPTS):
        try:
            directory.lock(how)
        except BlockingIOError:
            # `is_in_use` holds the lock for an instant. Without another attempt the directory would stay unmarked, and
            # could be removed while it is written or read.
            time.sleep(0.001)
        except OSError as error:
            # Without locks, `is_in_use` uses the age of a directory.
            logger.debug("%s is not marked as being in use: %s", directory.path, error)
            return
        else:
            return
    logger.debug("%s is not marked as being in use: somebody else has marked it", directory.path)


def _is_recently_modified(path: str) -> bool:
    """Return True if anything in a directory was modified in the last `UNLOCKED_IDLE_SECONDS` seconds."""

    def fail(error: OSError) -> None:
        raise error

    since = time.time() - UNLOCKED_IDLE_SECONDS
    try:
        places = (os.path.join(at, name) for at, _, files in os.walk(path, onerror=fail) for name in ("", *files))
        return any(os.lstat(place).st_mtime > since for place in places)
    except OSError as error:
        # A file that has vanished in the meantime means that another process is active there.
        logger.debug("%s is left alone: %s", path, error)
        return True


_WARNED_ERRNOS: set[int | None] = set()
"""Error numbers that `_warn_lock_unknown` has already logged."""


def _warn_lock_unknown(path: str, error: OSError) -> None:
    if error.errno not in _WARNED_ERRNOS:
        _WARNED_ERRNOS.add(error.errno)
        logger.warning(
            "cannot find out whether %s is in use (%s): this and others like it are left alone until nothing in them "
            "has changed for %g minutes, also if num_kept_ckpts would delete them",
            path,
            error.strerror or error,
            UNLOCKED_IDLE_SECONDS / 60,
        )
