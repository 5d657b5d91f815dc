"""Storage protocols (`Store`, `Directory`, `FileReader`, `FileWriter`), small-file I/O and durable renames.

A `Store` is a root directory that contains named directories of files; readers need nothing else. A `FileSystem`
can also rename directories and has locks. An `ObjectStore` has neither: objects are immutable, and only small
records are replaced, with conditional writes. `storage.local`, `storage.remote` and `storage.memory` implement the
protocols; `storage.resolve` opens the store for a path.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from xla_ckpt.core.plan.read_costs import ReadCosts
from xla_ckpt.errors import CorruptCheckpointError, FormatError, NotDurableError

BLOCK_BYTES = 4096
"""Unit of aligned I/O (bytes). Offsets passed to `FileWriter.write` are multiples of it, and so are lengths, except at
the end of a file.
"""


class FileWriter(Protocol):
    """A file being written. Several threads may write different ranges of it concurrently."""

    def write(self, buffer: memoryview, nbytes: int, offset: int) -> None:
        """Write the first `nbytes` bytes of a page-aligned buffer at `offset`, a multiple of `BLOCK_BYTES`.

        The buffer extends at least to the next multiple of `BLOCK_BYTES`. The bytes after `nbytes` may reach the disk,
        but `commit` removes them from the file.
        """

    def patch(self, data: bytes | memoryview, offset: int) -> None:
        """Write at any offset, over earlier writes if necessary. May extend the file."""

    def commit(self) -> None:
        """Set the final size of the file, make it durable, and close it."""

    def abort(self) -> None:
        """Close the file. The owner of the directory removes it."""


class FileReader(Protocol):
    """A file being read. Several threads may read it concurrently."""

    @property
    def size(self) -> int:
        """Size of the file (bytes)."""

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` from `offset` and return the number of bytes read, which is smaller only at the end of the
        file.
        """

    def read_once(self, buffer: memoryview, offset: int, scratch: memoryview) -> int:
        """Read like `read_into`, for large reads that are not repeated soon and need not be cached.

        `scratch` is page-aligned memory of at least two blocks (`BLOCK_BYTES`), which the store may use during the
        call.
        """

    def close(self) -> None:
        """Release the file."""


class ReadDirectory(Protocol):
    """A read-only set of files with relative paths separated by ``/``: a directory, or a view derived from one."""

    @property
    def name(self) -> str:
        """Name of the directory in the store when it was opened."""

    @property
    def costs(self) -> ReadCosts:
        """Read costs of the storage."""

    def open(self, path: str, size: int | None = None) -> FileReader:
        """Open a file for reading.

        Args:
            path: Path of the file.
            size: Expected size (bytes). If given, an object store skips the request for the size, and a missing or
                truncated file raises an error at the first read instead.

        Raises:
            FileNotFoundError: The file does not exist.
        """

    def list_files(self) -> list[str]:
        """Return the paths of all files, sorted."""

    def is_at(self, name: str) -> bool:
        """Return True if `name` still refers to this directory, in the place where it was opened."""

    def close(self) -> None:
        """Release the directory and the lock acquired when it was opened."""


class Directory(ReadDirectory, Protocol):
    """A directory of files. The object refers to the same directory after a rename."""

    @property
    def streaming(self) -> StreamingDirectory | None:
        """This directory, if it can write files sequentially without buffering them in memory or on disk; otherwise
        None.
        """

    def create(self, path: str, size: int) -> FileWriter:
        """Create a file that will contain `size` bytes, and its parent directories. The file must not exist."""

    def make_directory(self, path: str) -> None:
        """Create a subdirectory and its parents unless they exist. `sync` makes them durable, even if they stay empty.

        A no-op in stores without directories.
        """

    def link(self, source: ReadDirectory, path: str, name: str) -> None:
        """Link or copy a finished file of another directory of the store into this one, under an unused name.

        The store does it without sending the bytes, and without copying them if it can. Removing one of the two files
        does not affect the other. `sync` makes the name durable.

        Raises:
            OSError: The storage does not support this, or failed.
        """

    def sync(self) -> None:
        """Make the names of all files and directories created through this object durable."""

    def get_free_bytes(self) -> int | None:
        """Return the number of bytes that this process may still write, or None if unknown."""


class StreamingDirectory(Directory, Protocol):
    """A directory whose files are written sequentially."""

    def stream(self, path: str, size: int, chunks: Iterator[memoryview]) -> None:
        """Write a file of `size` bytes from `chunks`. It appears atomically after the last chunk.

        An exception raised by the iterator is propagated, and no file remains. A chunk is not accessed after the next
        one is requested.
        """


class FileSystemDirectory(Directory, Protocol):
    """A directory of a file system. It can remain locked while it is open."""

    @property
    def fd(self) -> int:
        """File descriptor, which can be passed to another process."""

    def list_linked_directories(self) -> list[str]:
        """Return the paths of symbolic links to directories, sorted.

        `list_files` does not include files behind such links, and they cannot be opened.
        """

    @property
    def identity(self) -> Identity:
        """Identity of the directory, as `FileSystem.get_identity` returns for its name."""

    def move_in(self, other: Directory, path: str) -> None:
        """Move a finished file here from another directory of the store, atomically, replacing a file with the same
        path.

        Parent directories are created. Open readers of the replaced file keep reading the old contents.
        """

    def write_atomic(self, path: str, data: bytes, *, durable: bool = False) -> None:
        """Write a small file atomically: a reader sees either the old contents or the new contents.

        With `durable=True` this also holds after a power loss. Otherwise a power loss may leave an empty file or no
        file.
        """


class Store(Protocol):
    """A root directory, as readers use it.

    Names refer to directories in the root, ``name/path`` to a path below one of them, and ``""`` to the root itself,
    whose path may be a symbolic link. Other links to directories are not followed and do not count as directories.

    Unless documented otherwise, methods raise OSError if the storage fails and FileNotFoundError if a name does not
    exist.
    """

    @property
    def path(self) -> str:
        """Path or address of the root, as users write it."""

    @property
    def file_system(self) -> FileSystem | None:
        """This store, if it can rename directories; otherwise None."""

    @property
    def object_store(self) -> ObjectStore | None:
        """This store, if it has conditional writes; otherwise None. Exactly one of `file_system` and `object_store` is
        set.
        """

    def snapshot_view(self) -> Store:
        """Return a view of this root for one read operation, which needs a consistent state.

        For an object store, where each query is a request, the view reads the records and the names in the root once
        and caches listings of directories. Do not use a view to wait for changes. A file system returns itself.
        """

    def resolve_address(self, name: str) -> str:
        """Return the full path or address of a name with links resolved. Equal results mean the same directory."""

    def prepare(self) -> bool:
        """Create the root directory if it is missing, and check that it is writable.

        Returns:
            True if the directory did not exist.

        Raises:
            StorageError: The path, or a parent of it, is a file.
            PermissionError: The directory is not writable.
            OSError: The storage failed, for example because it is read-only.
        """

    def list_names(self, path: str = "") -> list[str]:
        """Return the sorted names in the root, or in a directory below it. Empty if the directory does not exist."""

    def has(self, path: str) -> bool:
        """Return True if a file or directory with this name or path exists."""

    def is_directory(self, path: str) -> bool:
        """Return True if a directory with this name or path exists."""

    def read_start(self, path: str, nbytes: int, *, links: bool = True) -> bytes:
        """Return up to the first `nbytes` bytes of a file. With `links=True` the file may be a symbolic link."""

    def get_modified_time(self, path: str) -> int | None:
        """Return the modification time of a name or path (ns since the epoch), or None if it does not exist."""

    def open(self, name: str, *, lock: bool = True, links: bool = False) -> Directory:
        """Open a directory. With `lock=True`, `is_in_use` returns True for it until it is closed.

        With `links=True`, files in it may be symbolic links to other files, as in the caches of other programs.
        Checkpoints contain no links, because a link's target is neither made durable nor deleted with the checkpoint.
        """


Identity = tuple[int, int]
"""Device and inode number of a directory, which identify it independently of its name."""


class FileSystem(Store, Protocol):
    """A root directory of a file system, with atomic renames, and locks that mark directories as in use."""

    def make_directory(self, name: str) -> FileSystemDirectory:
        """Create a directory, locked for writing until it is closed or the process exits. It must not exist."""

    def open(self, name: str, *, lock: bool = True, links: bool = False) -> FileSystemDirectory:
        """Open a directory, as `Store.open` does."""

    def get_identity(self, name: str) -> Identity | None:
        """Return the identity of the directory with this name, or None if it does not exist."""

    def get_lock_state(self, name: str) -> bool | None:
        """Return True if a process holds a lock on this directory, or None if unknown."""

    def is_in_use(self, name: str) -> bool:
        """Return True if a process reads or writes this directory, or may do so where locks are unsupported."""

    def rename(self, old: str, new: str) -> None:
        """Rename a directory atomically.

        Also moves a file from a directory to the root or back, replacing a file with the new name.
        """

    def exchange(self, one: str, other: str) -> bool:
        """Exchange the names of two directories atomically, so that readers always find a complete directory under
        both.

        Returns False without changes if the file system does not support it.
        """

    def remove(self, name: str) -> None:
        """Remove a directory and its contents."""

    def remove_unused(self, name: str) -> bool:
        """Remove a directory unless `is_in_use` returns True for it.

        Returns:
            True if the directory was removed.

        Raises:
            FileNotFoundError: The directory does not exist, or another program has removed it in the meantime.
            OSError: The storage failed.
        """

    def remove_empty(self, name: str) -> bool:
        """Remove a directory if it is empty, atomically. Return True if it was removed."""

    def sync(self) -> None:
        """Make the names in the root durable."""


class VersionConflict(Exception):  # noqa: N818  # no error: the writer reads the record again and retries
    """The version of a record is not the one that the writer has read."""


@dataclass(frozen=True, slots=True)
class BucketLocation:
    """Location of a directory in a bucket, for libraries that read buckets themselves."""

    scheme: str
    """For example ``s3``; or ``memory``, which other libraries cannot read."""

    bucket: str
    prefix: str
    """Prefix of the keys of all files."""

    endpoint: str | None = None
    """Address of the server, if set in the environment."""

    region: str | None = None
    """Region of the bucket, if set in the environment."""

    tensorstore_driver: str = ""
    """Name of the tensorstore driver for such buckets; empty if tensorstore does not support them."""


class ObjectStore(Store, Protocol):
    """A root in an object store.

    A file appears atomically when its `FileWriter` is committed, and is immutable until it is deleted. No two writers
    use the same name. A directory is a common prefix of keys. Only records are replaced.

    If a method raises OSError, the operation may still have succeeded, because responses can be lost.
    """

    def get_directory(self, name: str) -> StreamingDirectory:
        """Return the directory with this name without checking that it exists.

        Used before its files are written, possibly by several processes, or if a record lists its files.
        """

    def locate_in_bucket(self, name: str) -> BucketLocation:
        """Return the location of the directory with this name."""

    def check_conditional_writes(self) -> None:
        """Check that the store enforces conditional writes.

        Raises:
            UsageError: Conditional writes are ignored, so two jobs would overwrite each other's commits.
            OSError: The storage failed.
        """

    def remove(self, name: str) -> None:
        """Delete the file with this name and all files below it, if they exist."""

    def read_record(self, name: str) -> tuple[bytes, str] | None:
        """Return the contents and the version of a replaceable small file, or None if it does not exist."""

    def write_record(self, name: str, data: bytes, version: str | None) -> str:
        """Replace a record if its version is `version`; with None, create it if it does not exist.

        Returns:
            The new version.

        Raises:
            VersionConflict: The record has a different version.
        """


def open_unlocked(store: Store, name: str) -> Directory:
    """Open a directory of a store without locking it. In an object store, its existence is not checked."""
    return store.open(name, lock=False) if store.object_store is None else store.object_store.get_directory(name)


def open_without_links(store: Store, name: str, *, lock: bool = True) -> Directory:
    """Open a directory after checking that it contains no symbolic links to directories, whose files would be missing.

    Raises:
        CorruptCheckpointError: A subdirectory is a symbolic link.
        OSError: As `Store.open`.
    """
    if store.file_system is None:
        return store.open(name, lock=lock)
    directory = store.file_system.open(name, lock=lock)
    if links := directory.list_linked_directories():
        directory.close()
        raise CorruptCheckpointError(
            "a directory of the checkpoint is a link, which is not followed",
            path=store.path,
            file=links[0],
            expected="directories alone",
            found=f"{len(links)} links",
            hint="Put the directory itself in the place of the link; or remove a link that is no part of it.",
        )
    return directory


def read_file(directory: ReadDirectory, path: str, *, limit: int | None = None, what: str = "the file") -> bytes:
    """Return the contents of a small file.

    Args:
        directory: Directory that contains it.
        path: Path of the file in the directory.
        limit: Maximum size (bytes), for files that other programs may have written.
        what: Description of the file for error messages.

    Raises:
        FileNotFoundError: The file does not exist.
        FormatError: The file is larger than `limit`.
        OSError: The storage failed.
    """
    with contextlib.closing(directory.open(path)) as source:
        if limit is not None and source.size > limit:
            raise FormatError(f"{what} is too large", file=path, expected=f"at most {limit} bytes", found=source.size)
        data = bytearray(source.size)
        got = source.read_into(memoryview(data), 0)
        return bytes(memoryview(data)[:got])


def get_file_size(directory: ReadDirectory, path: str) -> int:
    """Return the size of a file (bytes).

    Raises:
        FileNotFoundError: The file does not exist.
        OSError: The storage failed.
    """
    source = directory.open(path)
    source.close()
    return source.size


def write_file(directory: Directory, path: str, data: bytes | memoryview) -> None:
    """Write a complete file durably. Large `data` must be page-aligned.

    Raises:
        OSError: The storage failed.
    """
    sink = directory.create(path, len(data))
    try:
        sink.write(memoryview(data), len(data), 0)
        sink.commit()
    except BaseException:
        sink.abort()
        raise


def rename_durably(store: FileSystem, old: str, new: str) -> None:
    """Rename a directory or a file durably. If that fails, restore the old name.

    Raises:
        OSError: The storage failed; the old name is restored.
        NotDurableError: The new name is in place, but the storage failed both to make it durable and to undo the
            rename.
    """
    store.rename(old, new)
    sync_or_undo(store, new, lambda: store.rename(new, old))


def sync_or_undo(store: FileSystem, name: str, undo: Callable[[], object]) -> None:
    """Make a new name durable; if that fails, call `undo`.

    Raises:
        OSError: The storage failed; the change is undone.
        NotDurableError: The storage also failed to undo the change.
    """
    try:
        store.sync()
    except OSError as refused:
        try:
            undo()
        except OSError as error:
            raise make_not_durable_error(store, name, refused) from error
        raise


def make_not_durable_error(store: Store, name: str, refused: OSError) -> NotDurableError:
    """Return the error for a name that the storage could neither make durable nor undo."""
    return NotDurableError(
        f"{name} is in place and complete, but the storage refused to make its name durable",
        path=store.path,
        found=refused.strerror or str(refused),
        hint="A loss of power may bring back what was there before. Save again where the storage works.",
    )
