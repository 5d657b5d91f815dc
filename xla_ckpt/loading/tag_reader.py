"""A reader of one open checkpoint: its manifest, files, digests and pickled objects.

The files stay open, so that the reader remains valid even if the tag is replaced or deleted in the meantime.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from xla_ckpt import pickled_objects
from xla_ckpt.core.checksum import EMPTY_DIGEST, BlockTable, compute_digest, to_hex
from xla_ckpt.core.files import safetensors as payload
from xla_ckpt.core.fingerprint import compute_text_fingerprint
from xla_ckpt.core.manifest import manifest_json
from xla_ckpt.core.manifest.manifest import FileRecord, Manifest
from xla_ckpt.errors import (
    ChangedTagError,
    CheckpointError,
    CorruptCheckpointError,
    FormatError,
    annotate_errors,
    wrap_os_errors,
)
from xla_ckpt.features.parity.parity import REPAIR_HINT, has_parity
from xla_ckpt.garbage_collection import pause_gc
from xla_ckpt.storage.base import FileReader, ReadDirectory, read_file
from xla_ckpt.storage.process_state import fork_safe_lock
from xla_ckpt.tags.entry import MANIFEST_FILE

MAX_MANIFEST_BYTES = 1 << 30
"""Maximum size of a manifest that is read, in bytes."""

FREE_OBJECT_BYTES = 1 << 26
MAX_OBJECT_REPEATS = 64
"""Limits of the pickled bytes that one load reads: `FREE_OBJECT_BYTES`, plus `MAX_OBJECT_REPEATS` times the stored
bytes, because a skeleton may refer to one object any number of times."""

DAMAGED_FILE_HINT = "Load another tag, or restore this file from a copy."
"""Hint for a damaged file."""


class ForeignObject(Protocol):
    """Object that another library stored in its own format."""

    problem: str
    """Reason why it is not read without trust, with its type, as far as that is known."""

    kind: str
    """Name of its class, as far as that is known."""

    def load(self, leaf: str, *, trust: bool) -> Any:
        """Load the object.

        Raises:
            UntrustedObjectError: `trust` is False, and loading it may run code. None of its code has run.
        """


class TagReader:
    """Reader of one tag. Thread-safe. Use it as a context manager.

    Raises (on construction):
        CorruptCheckpointError: The manifest is missing or damaged.
        ChangedTagError: The tag has been removed since its directory was opened.
        UnsupportedVersionError: The tag was written by a newer version.
    """

    def __init__(
        self,
        directory: ReadDirectory,
        root: str,
        tag: str,
        manifest: Manifest | None = None,
        foreign_objects: Sequence[ForeignObject] | None = None,
    ) -> None:
        self.directory = directory
        self.root = root
        self.tag = tag
        self.foreign_objects = foreign_objects
        """Objects of a tag that another library wrote, by index in the skeleton; None for tags of this library."""
        self._object_bytes = 0
        """Number of object bytes that were requested."""
        self.damage_hint = DAMAGED_FILE_HINT
        """Hint for a damaged file of a tag without parity."""
        self.mismatch_hint = ""
        """Explanation of why the tag may not fit the objects of a load, and what to load then; empty for a complete
        tag.
        """
        self.unmatched_rules = ""
        """Sentences that name the arrays that the caller's name rules do not cover, if they build a model of other
        arrays.
        """
        self.is_rank_part = False
        """True if the tag is one rank's part of a checkpoint: `mismatch_hint` names the complete one, and conversions
        raise an error."""
        self._lock = fork_safe_lock()
        self._table_lock = fork_safe_lock()
        self._sources: dict[int, FileReader] = {}
        self._tables: dict[int, BlockTable | None] = {}
        self.manifest = manifest if manifest is not None else self._read_manifest()

    def with_manifest(self, manifest: Manifest) -> TagReader:
        """Return a reader of the same open files with other array names or locations. This reader closes the files."""
        reader = copy.copy(self)
        reader.manifest = manifest
        return reader

    def __enter__(self) -> TagReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release all files, and the directory."""
        self.close_files()
        self.directory.close()

    def close_files(self) -> None:
        """Release all files, but not the directory."""
        for source in self._sources.values():
            source.close()
        self._sources.clear()

    def describe_divergence(self, leaves: Iterable[str] | None = None) -> str | None:
        """Describe the arrays that have the bytes of a first replica, and the rule that declared them replicas.

        See `Manifest.describe_divergence`.
        """
        differing = self.manifest.describe_divergence(leaves)
        if differing is None or self.foreign_objects is None:
            return differing
        return (
            f"{differing}. A rule of shardings= (--sharding) makes them replicas, and leaves out what the other ranks "
            "have: if those are other parts of the arrays, the rule is wrong"
        )

    def _read_manifest(self) -> Manifest:
        with annotate_errors(path=self.root, tag=self.tag, file=MANIFEST_FILE), wrap_os_errors("reading the manifest"):
            try:
                data = read_file(self.directory, MANIFEST_FILE, limit=MAX_MANIFEST_BYTES, what="the manifest")
            except (FileNotFoundError, NotADirectoryError):
                raise make_absent_error(self.directory, "the tag has no manifest", hint=self.hint) from None
            try:
                with pause_gc():
                    return manifest_json.parse_manifest(data)
            except CorruptCheckpointError as error:
                error.at(hint=self.hint)
                raise

    @property
    def hint(self) -> str:
        """Hint of errors about a damaged file. The parity is searched for only when the hint is needed."""
        return f"{REPAIR_HINT} {self.damage_hint}" if has_parity(self.directory) else self.damage_hint

    @property
    def version(self) -> str:
        """Fingerprint that distinguishes this tag from later ones of the same name, equal for equal files.

        It is computed from the digests in the manifest. Tags of other libraries may have none.
        """
        known = sorted(
            (f.path, f.size, f.framing_digest) for f in self.manifest.files if f.framing_digest != EMPTY_DIGEST
        )
        return compute_text_fingerprint(repr((self.manifest.header.sequence, known)))

    def get_file_name(self, file: int) -> str:
        """Return the path of a file of the manifest, relative to the tag directory."""
        return self.manifest.files[file].path

    def open_file(self, file: int) -> FileReader:
        """Open a file of the manifest once, and check its size.

        Raises:
            CorruptCheckpointError: The file is missing, or has another size.
            ChangedTagError: The file is missing, because the tag has been removed.
        """
        with self._lock:
            if (source := self._sources.get(file)) is not None:
                return source
            record = self.manifest.files[file]
            with (
                annotate_errors(path=self.root, tag=self.tag, file=record.path),
                wrap_os_errors("opening a payload file"),
            ):
                try:
                    source = self.directory.open(record.path, record.size)
                except (FileNotFoundError, NotADirectoryError):
                    raise self.make_missing_error(file) from None
                if source.size != record.size:
                    source.close()
                    raise CorruptCheckpointError(
                        "a file does not have its size",
                        expected=f"{record.size} bytes",
                        found=source.size,
                        hint=f"It was cut off or replaced. {self.hint}",
                    )
            self._sources[file] = source
            return source

    def make_missing_error(self, file: int) -> CheckpointError:
        """Return the error for a missing file of the manifest."""
        error = make_absent_error(self.directory, "a payload file is missing", hint=self.hint)
        return error.at(path=self.root, tag=self.tag, file=self.get_file_name(file))

    def read_head(self, file: int) -> bytes:
        """Read the bytes of a file that belong to no region, verified with the digest in its record.

        Raises:
            CorruptCheckpointError: The bytes are damaged.
        """
        source = self.open_file(file)
        with annotate_errors(path=self.root, tag=self.tag):
            try:
                return read_verified_head(source, self.manifest.files[file], lambda: self.hint)
            except FileNotFoundError:
                raise self.make_missing_error(file) from None  # a store that did not check the file when it was opened

    def load_object(self, index: int, leaf: str, *, trust: bool) -> Any:
        """Load the object with this index in the skeleton.

        Raises:
            UntrustedObjectError: `trust` is False, and the object is not a plain value. None of its code has run.
            FormatError: The object does not exist.
            CorruptCheckpointError: Its bytes are damaged.
            IncompatibleCheckpointError: It needs a class that this program does not have.
            LoadError: Its own code raised an exception.
        """
        if self.foreign_objects is not None:
            with pickled_objects.wrap_missing_classes():
                return self.foreign_objects[index].load(leaf, trust=trust)
        data = self.read_pickle(index)
        self._object_bytes += len(data)
        most = FREE_OBJECT_BYTES + MAX_OBJECT_REPEATS * sum(
            self.manifest.files[n].size for n in set(self.manifest.object_files)
        )
        if self._object_bytes > most:
            raise FormatError("the skeleton names its objects again and again", leaf=leaf, expected=f"{most} bytes")
        return pickled_objects.load(data, leaf, trust=trust)

    def read_pickle(self, index: int) -> bytes:
        """Read the bytes of the object with this index, verified.

        Raises:
            FormatError: The object does not exist.
            CorruptCheckpointError: The bytes are damaged.
        """
        numbers = self.manifest.object_files
        if not 0 <= index < len(numbers):
            raise FormatError("the skeleton names an object that is not stored", found=index)
        return self.read_head(numbers[index])

    def get_digests(self, file: int, offset: int, nbytes: int) -> tuple[int, ...] | None:
        """Return the digests of the blocks of a stored region; None if there are none (foreign files)."""
        table = self.get_digest_table(file)
        return None if table is None else table.get_digests(offset, nbytes)

    def get_digest_table(self, file: int) -> BlockTable | None:
        """Return the digests of all regions of a file; None if there are none (foreign files)."""
        if file not in self._tables:
            with self._table_lock:  # one thread reads a table, and the others wait for it
                if file not in self._tables:
                    self._tables[file] = self._read_digests(file)
        return self._tables[file]

    def _read_digests(self, file: int) -> BlockTable | None:
        """Read the digests of a file from its record or its header; None for files of other libraries."""
        record = self.manifest.files[file]
        if record.regions:
            return record.build_block_table()
        if self.foreign_objects is None:  # a native payload file of this library
            head = self.read_head(file)
            with annotate_errors(path=self.root, tag=self.tag, file=record.path), pause_gc():
                return payload.parse_block_table(head)
        return None


@contextmanager
def borrow_reader(directory: ReadDirectory, root: str, tag: str, manifest: Manifest) -> Iterator[TagReader]:
    """Yield a reader of a tag whose directory is closed by the caller."""
    reader = TagReader(directory, root, tag, manifest)
    try:
        yield reader
    finally:
        reader.close_files()


def make_absent_error(directory: ReadDirectory, problem: str, **facts: Any) -> CheckpointError:
    """Return the error for a missing file of a checkpoint directory, which may have been removed meanwhile.

    Without locks, another job that removes the directory cannot detect readers.
    """
    if not directory.is_at(directory.name):
        return ChangedTagError(
            "it was replaced or removed while it was being read",
            hint="Load it again, or another one.",
            **{k: v for k, v in facts.items() if k != "hint"},
        )
    return CorruptCheckpointError(problem, **facts)


def read_verified_head(source: FileReader, record: FileRecord, hint: Callable[[], str]) -> bytes:
    """Read the bytes of a file that belong to no region, and compare them with the digest in its record.

    Raises:
        CorruptCheckpointError: The bytes differ from the saved bytes; `hint` returns the hint of the error.
    """
    try:
        data = bytearray(record.framing_bytes)
    except MemoryError as error:
        raise CorruptCheckpointError(
            "there is not enough memory for the header of a file",
            file=record.path,
            found=f"{record.framing_bytes} bytes",
        ) from error
    at = 0
    for offset, nbytes in record.framing_ranges:
        source.read_into(memoryview(data)[at : at + nbytes], offset)
        at += nbytes
    if (actual := compute_digest(data)) != record.framing_digest:
        raise CorruptCheckpointError(
            "the header of a file is damaged",
            file=record.path,
            expected=f"digest {to_hex(record.framing_digest)}",
            found=to_hex(actual),
            hint=hint(),
        )
    return bytes(data)
