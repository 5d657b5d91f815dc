"""A directory of the local (or a network) file system.

Everything goes through its descriptor, so that a writer or reader keeps *its* directory when a rename puts another one
in its place.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator

from xla_ckpt.logs import get_logger
from xla_ckpt.plan.costs import DISK
from xla_ckpt.storage.base import Directory, Identity, ReadDirectory
from xla_ckpt.storage.local_file import LocalSink, LocalSource, beneath, no_file
from xla_ckpt.storage.open_files import Descriptor, open_descriptor
from xla_ckpt.storage.pool import threads, work_off

logger = get_logger(__name__)

SYNCERS = 8
"""Threads that make directories durable, if there are many of them, and the machine has the cores."""


class LocalDirectory:
    """A directory, held by its descriptor.

    Args:
        path: Its path, which may be a link.
        inside: If given, a path below that one, on which no link is followed.
        links: Whether files in it may be links to files elsewhere.
    """

    costs = DISK
    streaming = None

    def __init__(self, path: str | os.PathLike[str], *, inside: str | None = None, links: bool = False) -> None:
        self._descriptor: Descriptor | None = None
        self._locked_by = 0
        """Which process has locked it with this descriptor; 0 if none has."""
        self.path = os.path.join(path, inside) if inside else os.fspath(path)
        self._may_be_link = not inside
        self._links = links
        self.name = os.path.basename(self.path)
        self._touched = {""}
        flags = os.O_RDONLY | os.O_DIRECTORY | (os.O_NOFOLLOW if inside else 0)
        with beneath(os.fspath(path), inside or "") as (parent, name):
            self._descriptor = Descriptor(open_descriptor(name, flags, dir_fd=parent))

    def __del__(self) -> None:
        # What a signal handler raises may take a directory from who has just opened it, before anybody can close it: it
        # would be in use as long as the process runs.
        self.close()

    @property
    def fd(self) -> int:
        """The descriptor; -1 when it is closed."""
        return -1 if self._descriptor is None else self._descriptor.fd

    @property
    def identity(self) -> Identity:
        status = os.fstat(self.fd)
        return status.st_dev, status.st_ino

    def create(self, path: str, size: int) -> LocalSink:
        parents = self._make(path.split("/")[:-1])
        sink = LocalSink(self.fd, path, size)
        self._touched.update(parents)
        return sink

    def make(self, path: str) -> None:
        paths = self._make(path.split("/"))
        os.close(self._directory_at(path))  # a file is no directory
        self._touched.update(paths)

    def _directory_at(self, path: str) -> int:
        """A descriptor of a directory below, or of this one for "."."""
        with beneath(self.fd, path) as (parent, name):
            return open_descriptor(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)

    def adopt(self, other: Directory, path: str) -> None:
        assert isinstance(other, LocalDirectory), "both are directories of one store"
        parents = self._make(path.split("/")[:-1])
        # By descriptors: another directory may have the name of this one by now, and must not get the file.
        with (
            self._naming_links(path),
            beneath(other.fd, path) as (its_parent, name),
            beneath(self.fd, path) as (parent, _),
        ):
            os.rename(name, name, src_dir_fd=its_parent, dst_dir_fd=parent)
        self._touched.update(parents)

    def link(self, source: ReadDirectory, path: str, name: str) -> None:
        assert isinstance(source, LocalDirectory), "both are directories of one store"
        parents = self._make(name.split("/")[:-1])
        with beneath(source.fd, path) as (its_parent, old), beneath(self.fd, name) as (parent, new):
            os.link(old, new, src_dir_fd=its_parent, dst_dir_fd=parent, follow_symlinks=False)
        self._touched.update(parents)

    def _make(self, parts: list[str]) -> list[str]:
        """Make a directory and its parents; the paths of all of them."""
        paths: list[str] = []
        for part in parts:
            paths.append(f"{paths[-1]}/{part}" if paths else part)
            try:
                with beneath(self.fd, paths[-1]) as (parent, name):
                    os.mkdir(name, dir_fd=parent)
            except FileExistsError:
                pass  # another writer of the same save was here first
        return paths

    def replace(self, path: str, data: bytes, *, durable: bool = False) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        fd = open_descriptor(f"{path}.new", flags, 0o666, dir_fd=self.fd)
        try:
            try:
                written = 0
                while written < len(data):  # of a short write the next one says why
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

    def open(self, path: str, size: int | None = None) -> LocalSource:
        if self._descriptor is None:
            raise OSError(errno.EBADF, "the directory is closed", self.path)
        with self._naming_links(path):
            return LocalSource(self._descriptor, path, links=self._links)

    @contextlib.contextmanager
    def _naming_links(self, path: str) -> Iterator[None]:
        """Raise a `NotAFileError` that names the link where one is on the way to a file."""
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
            raise no_file(path, found) from error

    def files(self) -> list[str]:
        paths = []
        for parent, _, names, _ in os.fwalk(".", dir_fd=self.fd):
            paths += [os.path.normpath(f"{parent}/{name}") for name in names]
        return sorted(paths)

    def linked_directories(self) -> list[str]:
        return sorted(
            os.path.normpath(f"{parent}/{name}")
            for parent, names, _, fd in os.fwalk(".", dir_fd=self.fd)
            for name in names
            if stat.S_ISLNK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
        )

    def sync(self) -> None:
        touched, self._touched = self._touched, {""}  # what is made meanwhile is for the next call
        by_depth: dict[int, list[str]] = {}
        for name in touched:
            by_depth.setdefault(len(name.split("/")) if name else 0, []).append(name)
        try:
            for _, names in sorted(by_depth.items(), reverse=True):  # children before parents
                # Several at a time: each waits for the disk, which makes many of them durable in one go.
                workers = min(threads(SYNCERS, 3), len(names))
                work_off(sorted(names), self._sync_one, workers=workers, buffer_bytes=0, name="xla_ckpt-sync")
        except BaseException:
            self._touched |= touched
            raise

    def _sync_one(self, name: str, _: memoryview) -> None:
        fd = self._directory_at(name or ".")
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def free(self) -> int | None:
        try:
            status = os.fstatvfs(self.fd)
        except OSError as error:
            logger.debug("%s does not say how much is free: %s", self.path, error)
            return None
        return status.f_bavail * status.f_frsize if status.f_blocks else None  # some network file systems say 0 of 0

    def is_at(self, name: str) -> bool:
        path = os.path.join(os.path.dirname(self.path), name)
        try:
            return os.path.samestat(os.fstat(self.fd), os.stat(path, follow_symlinks=self._may_be_link))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def lock(self, how: int) -> None:
        """Lock it until it is closed; raises `BlockingIOError` where somebody else has."""
        fcntl.flock(self.fd, how | fcntl.LOCK_NB)
        self._locked_by = os.getpid()

    def close(self) -> None:
        # Files that were opened in it, and are not closed yet, share the descriptor.
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and self._locked_by == os.getpid():
            # A process that was forked meanwhile, such as a data loader's worker, has a copy of the descriptor.
            # It would keep the lock as long as it runs, and retention would leave the directory alone.
            try:
                fcntl.flock(descriptor.fd, fcntl.LOCK_UN)
            except OSError as error:
                logger.debug("%s: its lock goes with its last descriptor: %s", self.path, error)
