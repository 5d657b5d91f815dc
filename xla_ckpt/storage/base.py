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
"""Unit of aligned I/O (bytes): offsets and, but for the end of a file, lengths of `FileWriter.write` are multiples of
it."""


class FileWriter(Protocol):
    """A file being written. Several threads may write different ranges of it at once."""

    def write(self, buffer: memoryview, nbytes: int, offset: int) -> None:
        """Write the first `nbytes` bytes of a page-aligned buffer at `offset`, a multiple of `BLOCK_BYTES`.

        The buffer reaches at least to the next multiple of `BLOCK_BYTES`; what lies behind `nbytes` may reach the disk,
        but not the file that `commit` leaves.
        """

    def patch(self, data: bytes | memoryview, offset: int) -> None:
        """Write anywhere, after anything that `write` wrote there. It may reach beyond the end of the file."""

    def commit(self) -> None:
        """Give the file its size, make it durable, and close it."""

    def abort(self) -> None:
        """Close the file; whoever owns the directory removes it."""


class FileReader(Protocol):
    """A file being read. Several threads may read it at once."""

    @property
    def size(self) -> int:
        """Bytes in the file."""

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill `buffer` from `offset` on; the number of bytes read is smaller only where the file ends."""

    def read_once(self, buffer: memoryview, offset: int, scratch: memoryview) -> int:
        """As `read_into`, for many bytes that will not be asked for again soon: they need not be kept in a cache.

        `scratch` is page-aligned memory of at least two `BLOCK_BYTES`s, for the storage's own use during the call.
        """

    def close(self) -> None:
        """Release the file."""


class ReadDirectory(Protocol):
    """Files that are read, named by relative paths with ``/``: those of a directory, or what is made of them."""

    @property
    def name(self) -> str:
        """The name of the directory in the store when it was opened."""

    @property
    def costs(self) -> ReadCosts:
        """What reading costs there."""

    def open(self, path: str, size: int | None = None) -> FileReader:
        """Open a file for reading. FileNotFoundError if there is none.

        Args:
            path: Which file.
            size: How many bytes it should have. An object store does not ask, then, and finds out at the first read
                that there is no such file, or that it ends before.
        """

    def list_files(self) -> list[str]:
        """Paths of all files, sorted."""

    def is_at(self, name: str) -> bool:
        """Whether the directory has this name now, in the place where it was opened: its own, unless it was moved."""

    def close(self) -> None:
        """Release the directory, and the lock that it was opened with."""


class Directory(ReadDirectory, Protocol):
    """A directory of files. It stays the same one if it is renamed."""

    @property
    def streaming(self) -> StreamingDirectory | None:
        """The same, if files that are written in the order of their bytes need no memory and no disk besides."""

    def create(self, path: str, size: int) -> FileWriter:
        """Begin a new file that will have `size` bytes; its parents are made. It must not exist."""

    def make_directory(self, path: str) -> None:
        """Make a directory below, and its parents, unless it is there. It may stay empty; `sync` makes it durable.

        A store that has no directories of its own, only names of files, has nothing to do.
        """

    def link(self, source: ReadDirectory, path: str, name: str) -> None:
        """Have a finished file of another directory of the store here, too, under a name that no file has yet.

        Its bytes are not sent, and where the storage can they are not copied either. Each of the two stays if the other
        one is removed. `sync` makes the name durable.

        Raises:
            OSError: The storage cannot do that, or refused.
        """

    def sync(self) -> None:
        """Make the names of all files and directories that were made through this object durable."""

    def get_free_bytes(self) -> int | None:
        """Bytes that this process may still write there; None where nobody can say."""


class StreamingDirectory(Directory, Protocol):
    """A directory whose files are written in the order of their bytes."""

    def stream(self, path: str, size: int, chunks: Iterator[memoryview]) -> None:
        """Write a file that will have `size` bytes. It appears whole when the last chunk is there.

        What an iterator raises is raised here, and nothing is left. A chunk is not used any more when the next one is
        asked for.
        """


class FileSystemDirectory(Directory, Protocol):
    """A directory of a file system. A lock can be kept on it as long as it is open."""

    @property
    def fd(self) -> int:
        """Its descriptor, for another process that works on it."""

    def list_linked_directories(self) -> list[str]:
        """Paths of links to directories in it, sorted: `list_files` has nothing of what lies there, and nothing opens
        it.
        """

    @property
    def identity(self) -> Identity:
        """Its number: what `FileSystem.identity` returns for the name that it has."""

    def move_in(self, other: Directory, path: str) -> None:
        """Take a finished file out of another directory of the store, in one step; one of that path here is replaced.

        Its parents are made. Who reads the old file keeps it.
        """

    def write_atomic(self, path: str, data: bytes, *, durable: bool = False) -> None:
        """Have a small file with these bytes, in one step: a reader finds them, or what was there before.

        With `durable`, so it is after a loss of power, too. Otherwise that may leave an empty file, or none.
        """


class Store(Protocol):
    """A root directory, as readers need it. Names are those of the directories in it; ``name/path`` is a path below one
    of them, and ``""`` the root directory itself, whose path may be a link. No other link to a directory is followed:
    it is no directory.

    Methods raise OSError where the storage refuses, and FileNotFoundError for a name that is not there, unless they
    say otherwise.
    """

    @property
    def path(self) -> str:
        """What users call it."""

    @property
    def file_system(self) -> FileSystem | None:
        """The same, if it can rename directories."""

    @property
    def object_store(self) -> ObjectStore | None:
        """The same, if it replaces records on a condition. A store is one of the two."""

    def snapshot_view(self) -> Store:
        """The same root for one call of a reader, who asks many things about one state of it.

        An object store, where each question is a request, then reads its records and the names in the root once, and
        lists the files of directories that are asked about. Who waits for a change looks anew. A file system is never
        looked at as a whole: it returns itself.
        """

    def resolve_address(self, name: str) -> str:
        """What a name stands for, in full and with links followed: equal ones mean the same directory."""

    def prepare(self) -> bool:
        """Make the root directory if it is absent, and find out whether it can be written; whether it was absent.

        Raises:
            StorageError: A file has its name, or lies on the way to it.
            PermissionError: It cannot.
            OSError: Likewise, because of the storage: it is read-only, for instance.
        """

    def list_names(self, path: str = "") -> list[str]:
        """What lies in it, or at a path below it, sorted; nothing where there is no such directory."""

    def has(self, path: str) -> bool:
        """Whether there is a file or directory of this name, or at this path below a name."""

    def is_directory(self, path: str) -> bool:
        """Whether there is a directory of this name, or at this path below a name."""

    def read_start(self, path: str, nbytes: int, *, links: bool = True) -> bytes:
        """The first bytes of a file below a name, `nbytes` at most. `list_segments` says that it may be a link."""

    def get_modified_time(self, path: str) -> int | None:
        """Time of the last change (ns since 1970) of what has this name or path; None if there is nothing."""

    def open(self, name: str, *, lock: bool = True, links: bool = False) -> Directory:
        """Open a directory. With `lock`, nobody who asks `is_in_use` takes it for unused until it is closed.

        `list_segments` says that files in it may be links to files elsewhere, as caches of other programs have them.
        Tags have none: what a link points to is neither durable nor gone with the tag.
        """


Identity = tuple[int, int]
"""What a directory of a file system is known by, whatever its name: its device and its number there."""


class FileSystem(Store, Protocol):
    """A root directory of a file system: names change in one step, and locks say who uses what."""

    def make_directory(self, name: str) -> FileSystemDirectory:
        """Make a directory, locked as being written until it is closed or the process ends. It must not exist."""

    def open(self, name: str, *, lock: bool = True, links: bool = False) -> FileSystemDirectory:
        """As `Store.open`."""

    def get_identity(self, name: str) -> Identity | None:
        """What has this name now; None if nothing has."""

    def get_lock_state(self, name: str) -> bool | None:
        """Whether somebody has this directory open with a lock; None where nobody can tell."""

    def is_in_use(self, name: str) -> bool:
        """Whether somebody reads or writes this directory right now, or, where locks fail, may do so."""

    def rename(self, old: str, new: str) -> None:
        """Give a directory another name, in one step that a reader sees wholly or not at all.

        Also a file below a directory, which moves into the root directory, or back; one of that name is replaced.
        """

    def exchange(self, one: str, other: str) -> bool:
        """Have two directories exchange their names, in one step: a reader finds a whole directory under each of them.

        False, and nothing is changed, where the storage cannot do that.
        """

    def remove(self, name: str) -> None:
        """Remove a directory with all that is in it."""

    def remove_unused(self, name: str) -> bool:
        """Remove a directory unless somebody uses it, as `is_in_use` says; whether it was removed.

        Raises:
            FileNotFoundError: There is none, or somebody else has removed it meanwhile.
            OSError: The storage refused.
        """

    def remove_empty(self, name: str) -> bool:
        """Remove a directory if nothing is in it, in one step; whether that was so."""

    def sync(self) -> None:
        """Make the names in it durable."""


class VersionConflict(Exception):  # noqa: N818  # no error: who meets it reads the record anew, and decides again
    """A record is another one than the writer has read."""


@dataclass(frozen=True, slots=True)
class BucketLocation:
    """Where a directory lies, for a library that reads buckets itself."""

    scheme: str
    """``s3``, for instance; ``memory``, which no other library reads."""

    bucket: str
    prefix: str
    """How the names of its files begin."""

    endpoint: str | None = None
    """The address of the server, if the environment says one."""

    region: str | None = None
    """That of the bucket, if the environment says one."""

    tensorstore_driver: str = ""
    """What tensorstore calls such buckets; empty if it does not read them."""


class ObjectStore(Store, Protocol):
    """A root of objects: a file appears whole when its `FileWriter` is committed, and stays as it is until it is
    deleted. Nobody else writes one of its name. A directory is the common beginning of names of files. Only records are
    replaced.

    Where a method raises OSError, what it does may be done all the same: answers get lost.
    """

    def get_directory(self, name: str) -> StreamingDirectory:
        """The directory of this name, without asking whether there is one: its files are about to be written, perhaps
        by several processes, or a record says that they are there.
        """

    def locate_in_bucket(self, name: str) -> BucketLocation:
        """Where the directory of this name lies."""

    def check_conditional_writes(self) -> None:
        """Find out whether records are replaced only on their condition.

        Raises:
            UsageError: They are not: two jobs would overwrite what the other one has committed.
        """

    def remove(self, name: str) -> None:
        """Delete the file of this name and all files below it, if there are any."""

    def read_record(self, name: str) -> tuple[bytes, str] | None:
        """A small file that may be replaced, and its version; None if there is none."""

    def write_record(self, name: str, data: bytes, version: str | None) -> str:
        """Replace a record if it has this version; make it if `version` is None, and there is none.

        Returns:
            The version that it has now.

        Raises:
            Changed: It has another version.
        """


def open_unlocked(store: Store, name: str) -> Directory:
    """A directory of a store, which is not marked as being read. An object store is not asked whether it is there."""
    return store.open(name, lock=False) if store.object_store is None else store.object_store.get_directory(name)


def open_without_links(store: Store, name: str, *, lock: bool = True) -> Directory:
    """Open a directory whose files are found by their names: what lies behind a link in it would be missing, unseen.

    Raises:
        CorruptCheckpointError: A directory in it is a link.
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
    """All bytes of a small file.

    Args:
        directory: Where it is.
        path: Its path there.
        limit: Bytes that it may have, if others have written it.
        what: What an error calls it.

    Raises:
        FileNotFoundError: There is none.
        FormatError: It is larger than the limit.
        OSError: The storage refused.
    """
    with contextlib.closing(directory.open(path)) as source:
        if limit is not None and source.size > limit:
            raise FormatError(f"{what} is too large", file=path, expected=f"at most {limit} bytes", found=source.size)
        data = bytearray(source.size)
        got = source.read_into(memoryview(data), 0)
        return bytes(memoryview(data)[:got])


def get_file_size(directory: ReadDirectory, path: str) -> int:
    """Bytes in a file.

    Raises:
        FileNotFoundError: There is none.
        OSError: The storage refused.
    """
    source = directory.open(path)
    source.close()
    return source.size


def write_file(directory: Directory, path: str, data: bytes | memoryview) -> None:
    """Write a whole file durably, at once. Large `data` begins at a page.

    Raises:
        OSError: The storage refused.
    """
    sink = directory.create(path, len(data))
    try:
        sink.write(memoryview(data), len(data), 0)
        sink.commit()
    except BaseException:
        sink.abort()
        raise


def rename_durably(store: FileSystem, old: str, new: str) -> None:
    """Give a directory, or a file, another name that outlasts a loss of power; if not, it keeps the old one.

    Raises:
        OSError: The storage refused; it has the old name.
        NotDurableError: It has the new name; the storage refused to make that durable, and to undo it.
    """
    store.rename(old, new)
    sync_or_undo(store, new, lambda: store.rename(new, old))


def sync_or_undo(store: FileSystem, name: str, undo: Callable[[], object]) -> None:
    """Make a name that was just given outlast a loss of power; if that is refused, take it back.

    Raises:
        OSError: The storage refused; it is undone.
        NotDurableError: The storage refused to undo it, too.
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
    """The error for a name that the storage neither makes durable nor takes back."""
    return NotDurableError(
        f"{name} is in place and complete, but the storage refused to make its name durable",
        path=store.path,
        found=refused.strerror or str(refused),
        hint="A loss of power may bring back what was there before. Save again where the storage works.",
    )
