"""An open tag: its manifest, its files, and their digests, whatever happens to its name meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from xla_ckpt.engine import pickles
from xla_ckpt.engine.garbage_collection import collector_paused
from xla_ckpt.engine.parity_check import REPAIR, has_parity
from xla_ckpt.errors import (
    ChangedTagError,
    CheckpointError,
    CorruptCheckpointError,
    FormatError,
    naming,
    storage_errors,
)
from xla_ckpt.files import safetensors as payload
from xla_ckpt.fingerprint import text_fingerprint
from xla_ckpt.manifest import manifest_json
from xla_ckpt.manifest.digest import NO_DIGEST, BlockTable, digest, to_hex
from xla_ckpt.manifest.records import FileRecord, Manifest
from xla_ckpt.storage.base import ReadDirectory, Source
from xla_ckpt.storage.process_state import process_lock
from xla_ckpt.storage.small_files import read_whole
from xla_ckpt.tags.entry import MANIFEST

MAX_MANIFEST = 1 << 30
"""A larger manifest is not read."""

FEW_OBJECT_BYTES = 1 << 26
OBJECT_SHARING = 64
"""So many bytes of pickled objects are read in one load, and so many times the bytes that there are: a skeleton may
name one object as often as it likes."""

DAMAGED = "Load another tag, or restore this file from a copy."
"""What to do about a file that is not as it was saved."""


class ForeignObject(Protocol):
    """An object that another library stored its own way."""

    problem: str
    """Why it is not read without trust: what it is, as far as that is known."""

    kind: str
    """The name of its class, as far as that is known."""

    def load(self, leaf: str, *, trust: bool) -> Any:
        """The object.

        Raises:
            UntrustedObjectError: `trust` is False, and loading it may run code. Nothing of it has run.
        """


class TagReader:
    """Reads one tag. Safe for several threads. Use as a context manager.

    Raises (on construction):
        CorruptCheckpointError: The manifest is missing or damaged.
        ChangedTagError: The tag has been removed since its directory was opened.
        UnsupportedVersionError: A newer version wrote it.
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
        """The objects of a tag that another library wrote, by their index in the skeleton; None in tags of ours."""
        self._given = 0
        """Bytes of objects that were asked for."""
        self.advice = DAMAGED
        """What to do about a file that is not as it was saved, if the tag has no parity."""
        self.misfit = ""
        """Why it may not fit the objects of a load, and what to load then; empty for a whole checkpoint."""
        self.without_rule = ""
        """Which arrays the caller's rules of names are not for, if they make a model of others, as sentences say it."""
        self.is_part = False
        """Whether one rank alone has it of a checkpoint: `misfit` names all of that, and conversions refuse it."""
        self._lock = process_lock()
        self._reading = process_lock()
        self._sources: dict[int, Source] = {}
        self._tables: dict[int, BlockTable | None] = {}
        self.manifest = manifest if manifest is not None else self._read_manifest()

    def with_manifest(self, manifest: Manifest) -> TagReader:
        """The same open files, whose arrays have other names or other places in them. This reader closes them."""
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

    def divergence(self, leaves: Iterable[str] | None = None) -> str | None:
        """Which arrays have the bytes of a first replica (see `Manifest.divergence`), and who called them replicas."""
        differing = self.manifest.divergence(leaves)
        if differing is None or self.foreign_objects is None:
            return differing
        return (
            f"{differing}. A rule of shardings= (--sharding) makes them replicas, and leaves out what the other ranks "
            "have: if those are other parts of the arrays, the rule is wrong"
        )

    def _read_manifest(self) -> Manifest:
        with naming(path=self.root, tag=self.tag, file=MANIFEST), storage_errors("reading the manifest"):
            try:
                data = read_whole(self.directory, MANIFEST, limit=MAX_MANIFEST, what="the manifest")
            except (FileNotFoundError, NotADirectoryError):
                raise absent(self.directory, "the tag has no manifest", hint=self.hint) from None
            try:
                with collector_paused():
                    return manifest_json.parse(data)
            except CorruptCheckpointError as error:
                error.at(hint=self.hint)
                raise

    @property
    def hint(self) -> str:
        """What errors say about a file that is not as it was saved. The parity is looked for only now."""
        return f"{REPAIR} {self.advice}" if has_parity(self.directory) else self.advice

    @property
    def version(self) -> str:
        """Tells this tag from one that took its name later: the same on all ranks that have opened the same files.

        It is made of the digests that the manifest has. Where another library wrote the tag, there may be none.
        """
        known = sorted((f.path, f.size, f.digest) for f in self.manifest.files if f.digest != NO_DIGEST)
        return text_fingerprint(repr((self.manifest.head.sequence, known)))

    def file_name(self, file: int) -> str:
        """Path of a file of the manifest, relative to the tag directory."""
        return self.manifest.files[file].path

    def source(self, file: int) -> Source:
        """A file of the manifest, opened once and checked for its size.

        Raises:
            CorruptCheckpointError: It is missing, or has another size.
            ChangedTagError: It is missing, since the tag has been removed.
        """
        with self._lock:
            if (source := self._sources.get(file)) is not None:
                return source
            record = self.manifest.files[file]
            with naming(path=self.root, tag=self.tag, file=record.path), storage_errors("opening a payload file"):
                try:
                    source = self.directory.open(record.path, record.size)
                except (FileNotFoundError, NotADirectoryError):
                    raise self.missing(file) from None
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

    def missing(self, file: int) -> CheckpointError:
        """The error for a file of the manifest that is not there."""
        error = absent(self.directory, "a payload file is missing", hint=self.hint)
        return error.at(path=self.root, tag=self.tag, file=self.file_name(file))

    def head(self, file: int) -> bytes:
        """The bytes of a file that no region holds, verified: its record has their digest.

        Raises:
            CorruptCheckpointError: They are damaged.
        """
        source = self.source(file)
        with naming(path=self.root, tag=self.tag):
            try:
                return head_of(source, self.manifest.files[file], lambda: self.hint)
            except FileNotFoundError:
                raise self.missing(file) from None  # a store that was not asked for it when it was opened

    def object(self, index: int, leaf: str, *, trust: bool) -> Any:
        """The object of this number in the skeleton.

        Raises:
            UntrustedObjectError: `trust` is False, and it is no plain value. Nothing of it has run.
            FormatError: There is no such object.
            CorruptCheckpointError: Its bytes are damaged.
            IncompatibleCheckpointError: It needs a class that this program does not have.
            LoadError: Its own code raised an exception.
        """
        if self.foreign_objects is not None:
            with pickles.naming_missing():
                return self.foreign_objects[index].load(leaf, trust=trust)
        data = self.pickled(index)
        self._given += len(data)
        most = FEW_OBJECT_BYTES + OBJECT_SHARING * sum(self.manifest.files[n].size for n in set(self.manifest.objects))
        if self._given > most:
            raise FormatError("the skeleton names its objects again and again", leaf=leaf, expected=f"{most} bytes")
        return pickles.load(data, leaf, trust=trust)

    def pickled(self, index: int) -> bytes:
        """The bytes of the object of this number, verified.

        Raises:
            FormatError: There is no such object.
            CorruptCheckpointError: They are damaged.
        """
        numbers = self.manifest.objects
        if not 0 <= index < len(numbers):
            raise FormatError("the skeleton names an object that is not stored", found=index)
        return self.head(numbers[index])

    def digests(self, file: int, offset: int, nbytes: int) -> tuple[int, ...] | None:
        """Digests of the blocks of a stored region; None where there are none (foreign files)."""
        table = self.digest_table(file)
        return None if table is None else table.of(offset, nbytes)

    def digest_table(self, file: int) -> BlockTable | None:
        """The digests of all regions of a file; None where there are none (foreign files)."""
        if file not in self._tables:
            with self._reading:  # one thread reads a table, and the others wait for it
                if file not in self._tables:
                    self._tables[file] = self._read_digests(file)
        return self._tables[file]

    def _read_digests(self, file: int) -> BlockTable | None:
        """The digests of a file: in its record, in its own header, or nowhere: other libraries' files have none."""
        record = self.manifest.files[file]
        if record.regions:
            return record.block_table()
        if self.foreign_objects is None:  # a payload file of ours, in the native layout
            head = self.head(file)
            with naming(path=self.root, tag=self.tag, file=record.path), collector_paused():
                return payload.parse_header(head)
        return None


@contextmanager
def reader_within(directory: ReadDirectory, root: str, tag: str, manifest: Manifest) -> Iterator[TagReader]:
    """A reader of a tag whose directory somebody else closes."""
    reader = TagReader(directory, root, tag, manifest)
    try:
        yield reader
    finally:
        reader.close_files()


def absent(directory: ReadDirectory, problem: str, **facts: Any) -> CheckpointError:
    """The error for a file that is not in a directory of a checkpoint, which may have been removed meanwhile.

    Where there are no locks, another job does not see that somebody reads what it removes.
    """
    if not directory.is_at(directory.name):
        return ChangedTagError(
            "it was replaced or removed while it was being read",
            hint="Load it again, or another one.",
            **{k: v for k, v in facts.items() if k != "hint"},
        )
    return CorruptCheckpointError(problem, **facts)


def head_of(source: Source, record: FileRecord, hint: Callable[[], str]) -> bytes:
    """The bytes of a file that no region holds, compared with the digest in its record.

    Raises:
        CorruptCheckpointError: They are not what was saved; `hint` says what to do.
    """
    try:
        data = bytearray(record.head)
    except MemoryError as error:
        raise CorruptCheckpointError(
            "there is not enough memory for the header of a file", file=record.path, found=f"{record.head} bytes"
        ) from error
    at = 0
    for offset, nbytes in record.gaps:
        source.read_into(memoryview(data)[at : at + nbytes], offset)
        at += nbytes
    if (actual := digest(data)) != record.digest:
        raise CorruptCheckpointError(
            "the header of a file is damaged",
            file=record.path,
            expected=f"digest {to_hex(record.digest)}",
            found=to_hex(actual),
            hint=hint(),
        )
    return bytes(data)
