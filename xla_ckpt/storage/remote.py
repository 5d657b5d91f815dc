"""Object-store backend: directories as key prefixes, multipart uploads and conditional records.

Objects appear when their upload completes. Small files take one request; large ones are sent in concurrent parts.
Readers can use a view (`snapshot_view`) that caches listings.
"""

from __future__ import annotations

import bisect
import contextlib
import copy
import errno
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from xla_ckpt.core.plan.read_costs import ReadCosts
from xla_ckpt.storage.base import BucketLocation, ReadDirectory
from xla_ckpt.storage.process_state import fork_safe_lock
from xla_ckpt.storage.remote_client import ObjectStoreClient, get_client
from xla_ckpt.storage.schemes import SCHEMES

if TYPE_CHECKING:
    from xla_ckpt.storage.memory import MemoryFiles


class ObjectKeys:
    """Mapping from names in a root to keys of the object store.

    Args:
        path: Address of the root, as users write it.
        key: Key prefix of the root without a trailing slash; empty if the root is the entire bucket.
    """

    def __init__(self, path: str, key: str) -> None:
        self.path = path
        self._key = key

    def resolve_address(self, name: str) -> str:
        """Return the address of a name in the root."""
        return f"{self.path}/{name}"

    def get_key(self, path: str) -> str:
        """Return the key of a file, or of the root itself if `path` is empty.

        >>> ObjectKeys("s3://bucket/run", "run").get_key("a/b"), ObjectKeys("s3://bucket", "").get_key("a")
        ('run/a/b', 'a')
        """
        return "/".join(filter(None, (self._key, path)))

    def get_prefix(self, path: str) -> str:
        """Return the prefix of all keys in a directory of the root.

        >>> ObjectKeys("s3://bucket/run", "run").get_prefix(""), ObjectKeys("s3://bucket", "").get_prefix("")
        ('run/', '')
        """
        key = self.get_key(path)
        return f"{key}/" if key else ""


MIB = 1024 * 1024

MIN_PART_BYTES = 16 * MIB
"""Minimum size (bytes) of a part of a large file."""

MAX_PARTS = 1000
"""Maximum number of parts of a file; larger files have larger parts. S3 allows 10,000."""

CONCURRENT_PARTS = 4
"""Number of parts of one file that are sent concurrently."""

SPOOL_BYTES = 64 * MIB
"""Size (bytes) up to which a file that is not written sequentially is kept in memory; larger ones use a temporary
file.
"""

FIRST_READ_BYTES = 1 * MIB
"""Bytes read by the first request for a file of unknown size, enough for most manifests."""

DELETE_BATCH = 1000
"""Number of keys in one delete request."""

MAX_LISTED = 10_000
"""Maximum number of files of one directory that are listed before falling back to a request per file."""

MAX_LISTED_DEPTH = 2
"""Maximum depth, below the root, of directories at which a listing begins. Deeper ones are parts of a tag."""


class KeyListing:
    """Cached parts of the sorted list of all keys below a root, for several queries about the same directories.

    A part begins at the queried directory. Its last page continues into the following directories, so that small
    directories share a request.

    Args:
        client: Client of the bucket.
        prefix: Prefix of all keys of the root.
    """

    def __init__(self, client: ObjectStoreClient | MemoryFiles, prefix: str) -> None:
        self._client, self._prefix = client, prefix
        self._parts: list[tuple[str, str | None, list[str], list[Any]]] = []
        """Ranges of listed keys: (exclusive start, inclusive end or None if unbounded, keys, metadata)."""

        self._listed_directories: set[str] = set()

    def get_files_below(self, key: str) -> Sequence[Any] | None:
        """Return the metadata of all files below a directory, or None if a request is needed."""
        return self._find_range(key, f"{key}/", f"{key}0")  # "0" follows "/"

    def get_file(self, key: str) -> Sequence[Any] | None:
        """Return the metadata of a file in a sequence, an empty sequence if it does not exist, or None if a request
        is needed.
        """
        found = self._find_range(key.rpartition("/")[0], key, f"{key}\0")
        # An empty object may be a directory marker, whose key ends with a slash that obstore strips.
        return None if found is None or any(meta["size"] == 0 for meta in found) else found

    def is_known_absent(self, key: str) -> bool:
        """Return True if the cached listings show that the file does not exist."""
        return self._find_known(key, f"{key}\0") == []

    def _find_range(self, directory: str, first: str, end: str) -> Sequence[Any] | None:
        found = self._find_known(first, end)
        names = directory[len(self._prefix) :].split("/")
        for depth in range(1, 1 + min(MAX_LISTED_DEPTH, len(names))):
            begin = self._prefix + "/".join(names[:depth])
            if found is None and names[0] and begin not in self._listed_directories:
                self._listed_directories.add(begin)
                self._fetch_pages(begin)
                found = self._find_known(first, end)
        return found

    def _fetch_pages(self, directory: str) -> None:
        keys: list[str] = []
        files: list[Any] = []
        is_last = False
        while not is_last and len(keys) < MAX_LISTED and (not keys or keys[-1] < f"{directory}0"):
            last = keys[-1] if keys else directory
            page, is_last = self._client.list_page(self._prefix, last)
            names = [meta["path"] for meta in page]
            if any(one >= two for one, two in itertools.pairwise([last, *names])):
                is_last = False  # some servers do not sort
                break
            keys += names
            files += page
        if keys or is_last:
            self._parts.append((directory, None if is_last else keys[-1], keys, files))

    def _find_known(self, first: str, end: str) -> Sequence[Any] | None:
        for after, last, keys, files in reversed(self._parts):
            if after < first and (last is None or end <= last):
                found: Sequence[Any] = files[bisect.bisect_left(keys, first) : bisect.bisect_left(keys, end)]
                return found
        return None


class RemoteFileReader:
    """A file being read. All bytes come from one version: if the file is replaced meanwhile, reads raise an error.

    Args:
        client: Client of the bucket.
        key: Key of the file.
        size: Size (bytes) if known; otherwise the first use requests it.
        versions: Versions of the files of the directory, by key, from their first responses. Shared by all readers of
            the directory, so that a file that is opened again must have the same version.
    """

    def __init__(
        self, client: ObjectStoreClient | MemoryFiles, key: str, size: int | None, versions: dict[str, str]
    ) -> None:
        self._client, self._key, self._size, self._versions = client, key, size, versions
        self._start = memoryview(b"")
        """Beginning of the file, as far as it was received with its size."""

    @property
    def _version(self) -> str | None:
        return self._versions.get(self._key)

    @_version.setter
    def _version(self, version: str | None) -> None:
        if version is not None and self._versions.setdefault(self._key, version) != version:
            raise OSError(errno.ESTALE, "the file was replaced while its directory was read", self._key)

    @property
    def size(self) -> int:
        """Size of the file (bytes)."""
        if self._size is None:
            self.fetch_start()
        assert self._size is not None, "a file that is there has a size"
        return self._size

    def fetch_start(self) -> None:
        """Request the size, the version, and the beginning of the file, which suffices for small files and headers.

        Raises:
            FileNotFoundError: The file does not exist.
            OSError: The storage failed, or the file was replaced.
        """
        self._start, self._size, self._version = self._client.read(self._key, 0, FIRST_READ_BYTES, None)

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
        """Do nothing: no resource is held."""


class SpooledFileWriter:
    """A file written in any order, spooled locally until `commit` uploads it."""

    def __init__(self, send: Callable[[Any], None], size: int) -> None:
        self._send, self._size = send, size
        self._lock = fork_safe_lock()
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
            self.patch(bytes(1), self._size - 1)  # unwritten bytes at the end are zeros
        self._file.seek(0)
        try:
            self._send(self._file)
        finally:
            self.abort()

    def abort(self) -> None:
        self._file.close()


class RemoteDirectory:
    """The files with a common key prefix.

    Args:
        client: Client of the bucket.
        prefix: Key prefix, with a trailing slash unless it is empty.
        name: Name of the directory, as its user knows it.
    """

    def __init__(self, client: ObjectStoreClient | MemoryFiles, prefix: str, name: str) -> None:
        self._client, self._prefix, self.name = client, prefix, name
        self._open = True
        self._versions: dict[str, str] = {}

    @property
    def costs(self) -> ReadCosts:
        return self._client.costs

    @property
    def streaming(self) -> RemoteDirectory:
        return self

    def _get_key(self, path: str) -> str:
        if not self._open:
            raise OSError(errno.EBADF, "the directory is closed", path)
        return self._prefix + path

    def create(self, path: str, size: int) -> SpooledFileWriter:
        key = self._get_key(path)
        return SpooledFileWriter(
            lambda file: self._client.send(key, file, compute_part_bytes(size), CONCURRENT_PARTS), size
        )

    def stream(self, path: str, size: int, chunks: Iterator[memoryview]) -> None:
        # Copy each chunk, because a part may still be in flight while the next chunk is written to the same memory.
        parts = map(bytes, chunks)
        if size <= MIN_PART_BYTES:
            self._client.send(self._get_key(path), b"".join(parts), compute_part_bytes(size), 1)
        else:
            self._client.send(self._get_key(path), parts, compute_part_bytes(size), CONCURRENT_PARTS)

    def make_directory(self, path: str) -> None:
        """Do nothing: a directory exists as soon as it contains a file."""

    def open(self, path: str, size: int | None = None) -> RemoteFileReader:
        source = RemoteFileReader(self._client, self._get_key(path), size, self._versions)
        if size is None:
            source.fetch_start()
        return source

    def link(self, source: ReadDirectory, path: str, name: str) -> None:
        assert isinstance(source, RemoteDirectory), "both are directories of one store"
        self._client.copy(source._get_key(path), self._get_key(name))

    def list_files(self) -> list[str]:
        return [key[len(self._prefix) :] for key in self._client.list_keys(self._get_key(""))]

    def sync(self) -> None:
        """Do nothing: uploaded files are durable."""

    def get_free_bytes(self) -> int | None:
        return None

    def is_at(self, name: str) -> bool:
        return name == self.name and self._client.is_any_below(self._prefix)

    def close(self) -> None:
        self._open = False


def compute_part_bytes(size: int) -> int:
    """Return the part size (bytes) for a file of `size` bytes.

    >>> compute_part_bytes(1000), compute_part_bytes(100 * 2**30) // MIB
    (16777216, 103)
    """
    return max(MIN_PART_BYTES, -(-size // (MAX_PARTS * MIB)) * MIB)


class RemoteStore(ObjectKeys):
    """A root in a bucket.

    Args:
        path: Address of the root, such as ``s3://bucket/runs/7b``.
        files: In-memory files that replace a bucket, for ``memory://``.

    Raises:
        UsageError: obstore is not installed, or the address contains no bucket name.
    """

    file_system = None

    def __init__(self, path: str, files: MemoryFiles | None = None) -> None:
        scheme, _, location = path.partition("://")
        bucket, _, key = location.partition("/") if files is None else ("", "", location)
        super().__init__(path, key)
        self._cache: dict[str, Any] | None = None
        """Cached records and names of a view, by name ("" for the names in the root); None outside a view."""
        self._listing: KeyListing | None = None
        """Cached listings of a view; None outside a view."""

        self._client: ObjectStoreClient | MemoryFiles = get_client(scheme, bucket) if files is None else files
        self._bucket = scheme, bucket

    def __repr__(self) -> str:
        return f"RemoteStore({self.path!r})"

    @property
    def object_store(self) -> RemoteStore:
        return self

    def snapshot_view(self) -> RemoteStore:
        seen = copy.copy(self)
        seen._clear_cache()
        return seen

    def _clear_cache(self) -> None:
        self._cache, self._listing = {}, KeyListing(self._client, self.get_prefix(""))

    def _read_cached(self, name: str, read: Callable[[], Any]) -> Any:
        """Return `read()`; in a view, return the result of its first call."""
        if self._cache is None:
            return read()
        if name not in self._cache:
            self._cache[name] = read()
        return self._cache[name]

    def locate_in_bucket(self, name: str) -> BucketLocation:
        scheme, bucket = self._bucket
        known = SCHEMES.get(scheme)
        about = {} if known is None else {**known.get_server_options(), "tensorstore_driver": known.tensorstore_driver}
        return BucketLocation(scheme, bucket, self.get_prefix(name), **about)

    def prepare(self) -> bool:
        """Return False: the first save checks the store on its own thread (see `check_conditional_writes`)."""
        return False

    def check_conditional_writes(self) -> None:
        """Check that the store enforces conditional writes of records.

        Raises:
            UsageError: Conditional writes are ignored, so two jobs would overwrite each other's commits.
            OSError: The storage failed.
        """
        self._client.check_conditional_writes(self.get_prefix(""))

    def list_names(self, path: str = "") -> list[str]:
        if path:
            start = len(self.get_prefix(path))
            metas = self._get_listed(path)
            if metas is None:
                return self._client.list_names(self.get_prefix(path))
            return sorted({meta["path"][start:].partition("/")[0] for meta in metas})
        names: list[str] = self._read_cached("", lambda: self._client.list_names(self.get_prefix("")))
        return list(names)

    def _get_listed(self, path: str) -> Sequence[Any] | None:
        """Return the metadata of all files below a directory from the cached listing, or None if a request is
        needed.
        """
        return None if self._listing is None or not path else self._listing.get_files_below(self.get_key(path))

    def _get_metadata(self, path: str) -> Any:
        """Return the metadata of a file.

        Raises:
            FileNotFoundError: The file does not exist.
        """
        key = self.get_key(path)
        found = None if self._listing is None else self._listing.get_file(key)
        if found is None:
            return self._client.get_metadata(key)
        if not found:
            raise FileNotFoundError(errno.ENOENT, "there is no such file", key)
        return found[0]

    def has(self, path: str) -> bool:
        if self._get_listed(path):
            return True
        if self.get_key(path):
            with contextlib.suppress(FileNotFoundError):
                self._get_metadata(path)
                return True
        return self.is_directory(path)

    def is_directory(self, path: str) -> bool:
        metas = self._get_listed(path)
        return self._client.is_any_below(self.get_prefix(path)) if metas is None else bool(metas)

    def read_start(self, path: str, nbytes: int, *, links: bool = True) -> bytes:
        key = self.get_key(path)
        if self._listing is not None and self._listing.is_known_absent(key):
            raise FileNotFoundError(errno.ENOENT, "there is no such file", key)
        return bytes(self._client.read(key, 0, nbytes, None)[0])

    def get_modified_time(self, path: str) -> int | None:
        try:
            metas: Sequence[Any] = [self._get_metadata(path)]
        except FileNotFoundError:
            listed = self._get_listed(path)
            metas = self._client.list_metadata(self.get_prefix(path)) if listed is None else listed
        return max((int(meta["last_modified"].timestamp() * 1e9) for meta in metas), default=None)

    def open(self, name: str, *, lock: bool = True, links: bool = False) -> RemoteDirectory:
        if not self.is_directory(name):
            raise FileNotFoundError(errno.ENOENT, "there is no such directory", name)
        return self.get_directory(name)

    def get_directory(self, name: str) -> RemoteDirectory:
        return RemoteDirectory(self._client, self.get_prefix(name), name)

    def remove(self, name: str) -> None:
        # A store without batch deletes stops at the first missing key, so only existing keys are passed.
        keys = self._client.list_keys(self.get_prefix(name)) or [self.get_key(name)]
        for at in range(0, len(keys), DELETE_BATCH):
            self._client.delete(keys[at : at + DELETE_BATCH])

    def read_record(self, name: str) -> tuple[bytes, str] | None:
        record: tuple[bytes, str] | None = self._read_cached(name, lambda: self._read_record(name))
        return record

    def _read_record(self, name: str) -> tuple[bytes, str] | None:
        try:
            data, version = self._client.read_version(self.get_key(name))
        except FileNotFoundError:
            return None
        return data, json.dumps(version)

    def write_record(self, name: str, data: bytes, version: str | None) -> str:
        # S3 assigns equal versions to equal bytes, so every record contains a unique value.
        if self._cache is not None:
            self._clear_cache()  # the cached record is outdated
        return json.dumps(
            self._client.put_if_match(self.get_key(name), data, None if version is None else json.loads(version))
        )
