"""Roots in object stores: S3, Google Cloud Storage and Azure, through obstore.

A file of a few parts is one request; larger ones go up in parts, several of them at once, in the order of their bytes.
Nothing of a file can be seen before its last byte is there. A record is replaced with a conditional request.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from xla_ckpt.plan.costs import Costs
from xla_ckpt.storage.addresses import Addresses
from xla_ckpt.storage.base import InBucket, ReadDirectory
from xla_ckpt.storage.process_state import process_lock
from xla_ckpt.storage.remote_client import Client, client_of
from xla_ckpt.storage.schemes import SCHEMES

if TYPE_CHECKING:
    from xla_ckpt.storage.memory import MemoryFiles

MIB = 1024 * 1024

PART_BYTES = 16 * MIB
"""Bytes of a part of a large file, at least."""

MAX_PARTS = 1000
"""Parts of a file, at most: parts grow with it. S3 takes 10,000."""

PARTS_AT_ONCE = 4
"""Parts of one file that are on their way at a time."""

SPOOL_BYTES = 64 * MIB
"""A file that is not written in the order of its bytes is kept in memory up to this size, then in a temporary file."""

START_BYTES = 1 * MIB
"""Bytes that are read at once of a file whose size is not known: all of most manifests."""

DELETED_AT_ONCE = 1000
"""Names in one request that deletes files."""


class RemoteSource:
    """A file being read. All of its bytes are those of one version: a file that was replaced meanwhile is refused.

    Args:
        client: The bucket.
        key: Its full name there.
        size: Its bytes, where the caller knows them; else the first use asks for them.
        versions: By full name, those that files of its directory had in the first answer: one that is opened again is
            the same file.
    """

    def __init__(self, client: Client | MemoryFiles, key: str, size: int | None, versions: dict[str, str]) -> None:
        self._client, self._key, self._size, self._versions = client, key, size, versions
        self._start = memoryview(b"")
        """The beginning of the file, as far as it came with its size."""

    @property
    def _version(self) -> str | None:
        return self._versions.get(self._key)

    @_version.setter
    def _version(self, version: str | None) -> None:
        if version is not None and self._versions.setdefault(self._key, version) != version:
            raise OSError(errno.ESTALE, "the file was replaced while its directory was read", self._key)

    @property
    def size(self) -> int:
        """Bytes in the file."""
        if self._size is None:
            self.look()
        assert self._size is not None, "a file that is there has a size"
        return self._size

    def look(self) -> None:
        """Ask for its size and version. FileNotFoundError if there is none.

        The answer has the beginning of the file, too: who does not know the size reads a small file, or a header.
        """
        self._start, self._size, self._version = self._client.read(self._key, 0, START_BYTES, None)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        wanted = len(buffer) if self._size is None else min(len(buffer), self._size - offset)
        if wanted <= 0:
            return 0
        if offset + wanted <= len(self._start):
            buffer[:wanted] = self._start[offset : offset + wanted]
            return wanted
        data, _, version = self._client.read(self._key, offset, wanted, self._version)
        self._version = self._version or version
        buffer[: len(data)] = data
        return len(data)

    def read_once(self, buffer: memoryview, offset: int, scratch: memoryview) -> int:
        return self.read_into(buffer, offset)

    def close(self) -> None:
        """Nothing to release."""


class SpooledSink:
    """A file whose bytes come in any order: kept here until `commit` sends it."""

    def __init__(self, send: Callable[[Any], None], size: int) -> None:
        self._send, self._size = send, size
        self._lock = process_lock()
        self._file = tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES)  # noqa: SIM115  # closed by commit or abandon

    def write(self, buffer: memoryview, nbytes: int, offset: int) -> None:
        if offset + nbytes > self._size:
            raise ValueError("write past the announced size")
        self.patch(buffer[:nbytes], offset)

    def patch(self, data: bytes | memoryview, offset: int) -> None:
        with self._lock:
            self._size = max(self._size, offset + len(data))
            self._file.seek(offset)
            self._file.write(data)

    def commit(self) -> None:
        if self._file.seek(0, 2) < self._size:
            self.patch(bytes(1), self._size - 1)  # nobody has written its last bytes, which are zeros then
        self._file.seek(0)
        try:
            self._send(self._file)
        finally:
            self.abandon()

    def abandon(self) -> None:
        self._file.close()


class RemoteDirectory:
    """The files whose names begin alike.

    Args:
        client: The bucket.
        prefix: The beginning of their names, with a slash at its end unless it is empty.
        name: What its user calls it.
    """

    def __init__(self, client: Client | MemoryFiles, prefix: str, name: str) -> None:
        self._client, self._prefix, self.name = client, prefix, name
        self._open = True
        self._versions: dict[str, str] = {}

    @property
    def costs(self) -> Costs:
        return self._client.costs

    @property
    def streaming(self) -> RemoteDirectory:
        return self

    def _key(self, path: str) -> str:
        if not self._open:
            raise OSError(errno.EBADF, "the directory is closed", path)
        return self._prefix + path

    def create(self, path: str, size: int) -> SpooledSink:
        key = self._key(path)
        return SpooledSink(lambda file: self._client.send(key, file, part_bytes(size), PARTS_AT_ONCE), size)

    def stream(self, path: str, size: int, chunks: Iterator[memoryview]) -> None:
        # A part may be on its way while the next chunk is made in the memory of this one: so each is copied.
        parts = map(bytes, chunks)
        if size <= PART_BYTES:
            self._client.send(self._key(path), b"".join(parts), part_bytes(size), 1)
        else:
            self._client.send(self._key(path), parts, part_bytes(size), PARTS_AT_ONCE)

    def make(self, path: str) -> None:
        """Nothing: a directory is there when a file is."""

    def open(self, path: str, size: int | None = None) -> RemoteSource:
        source = RemoteSource(self._client, self._key(path), size, self._versions)
        if size is None:
            source.look()
        return source

    def link(self, source: ReadDirectory, path: str, name: str) -> None:
        assert isinstance(source, RemoteDirectory), "both are directories of one store"
        self._client.copy(source._key(path), self._key(name))

    def files(self) -> list[str]:
        return [key[len(self._prefix) :] for key in self._client.below(self._key(""))]

    def sync(self) -> None:
        """Nothing: what was sent is durable."""

    def free(self) -> int | None:
        return None

    def is_at(self, name: str) -> bool:
        return name == self.name and self._client.is_any_below(self._prefix)

    def close(self) -> None:
        self._open = False


def part_bytes(size: int) -> int:
    """Bytes of the parts of a file.

    >>> part_bytes(1000), part_bytes(100 * 2**30) // MIB
    (16777216, 103)
    """
    return max(PART_BYTES, -(-size // (MAX_PARTS * MIB)) * MIB)


class RemoteStore(Addresses):
    """A root in a bucket.

    Args:
        path: Its address, such as ``s3://bucket/runs/7b``.
        files: What keeps its files, if it is in memory.

    Raises:
        UsageError: obstore is not installed, or the address names no bucket.
    """

    file_system = None

    def __init__(self, path: str, files: MemoryFiles | None = None) -> None:
        scheme, _, location = path.partition("://")
        bucket, _, key = location.partition("/") if files is None else ("", "", location)
        super().__init__(path, key)
        self._seen: dict[str, Any] | None = None
        """What was read of records and of the names in the root, by its name; None where nothing is kept."""
        self._client: Client | MemoryFiles = client_of(scheme, bucket) if files is None else files
        self._bucket = scheme, bucket

    def __repr__(self) -> str:
        return f"RemoteStore({self.path!r})"

    @property
    def object_store(self) -> RemoteStore:
        return self

    def look(self) -> RemoteStore:
        seen = copy.copy(self)
        seen._seen = {}
        return seen

    def _once(self, name: str, read: Callable[[], Any]) -> Any:
        """What `read` gives; that of its first call, in a look."""
        if self._seen is None:
            return read()
        if name not in self._seen:
            self._seen[name] = read()
        return self._seen[name]

    def in_bucket(self, name: str) -> InBucket:
        scheme, bucket = self._bucket
        known = SCHEMES.get(scheme)
        about = {} if known is None else {**known.server(), "tensorstore_driver": known.tensorstore_driver}
        return InBucket(scheme, bucket, self.below(name), **about)

    def prepare(self) -> bool:
        """Nothing: the first save finds out, on its own thread, what the store does (see `check_conditions`)."""
        return False

    def check_conditions(self) -> None:
        """Find out whether the store replaces a record only on its condition.

        Raises:
            UsageError: It does not: two jobs would overwrite what the other one has committed.
            OSError: It refused.
        """
        self._client.check_conditions(self.below(""))

    def names(self, path: str = "") -> list[str]:
        if path:
            return self._client.names_below(self.below(path))
        names: list[str] = self._once("", lambda: self._client.names_below(self.below("")))
        return list(names)

    def has(self, path: str) -> bool:
        if key := self.key(path):
            with contextlib.suppress(FileNotFoundError):
                self._client.head(key)
                return True
        return self.is_directory(path)

    def is_directory(self, path: str) -> bool:
        return self._client.is_any_below(self.below(path))

    def start_of(self, path: str, nbytes: int, *, links: bool = True) -> bytes:
        return bytes(self._client.read(self.key(path), 0, nbytes, None)[0])

    def modified(self, path: str) -> int | None:
        try:
            metas: Sequence[Any] = [self._client.head(self.key(path))]
        except FileNotFoundError:
            metas = list(self._client.metas_below(self.below(path)))
        return max((int(meta["last_modified"].timestamp() * 1e9) for meta in metas), default=None)

    def open(self, name: str, *, lock: bool = True, links: bool = False) -> RemoteDirectory:
        if not self.is_directory(name):
            raise FileNotFoundError(errno.ENOENT, "there is no such directory", name)
        return self.fill(name)

    def fill(self, name: str) -> RemoteDirectory:
        return RemoteDirectory(self._client, self.below(name), name)

    def remove(self, name: str) -> None:
        # A store without a request for many files ends at the first that is not there: only such names are told as are.
        keys = self._client.below(self.below(name)) or [self.key(name)]
        for at in range(0, len(keys), DELETED_AT_ONCE):
            self._client.delete(keys[at : at + DELETED_AT_ONCE])

    def read_record(self, name: str) -> tuple[bytes, str] | None:
        record: tuple[bytes, str] | None = self._once(name, lambda: self._record(name))
        return record

    def _record(self, name: str) -> tuple[bytes, str] | None:
        try:
            data, version = self._client.read_version(self.key(name))
        except FileNotFoundError:
            return None
        return data, json.dumps(version)

    def write_record(self, name: str, data: bytes, version: str | None) -> str:
        # S3 calls equal bytes an equal version, so every record has something in it that no other one has.
        if self._seen is not None:
            self._seen.clear()  # it is another one then, or was before
        return json.dumps(self._client.write_if(self.key(name), data, None if version is None else json.loads(version)))
