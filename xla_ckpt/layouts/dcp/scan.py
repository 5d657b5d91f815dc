"""Opening a directory of DCP's: scanned into a `Manifest`, without a byte of its tensors being needed.

`.metadata` says which zip of which file holds which chunk, and the zips say where in them the elements lie. With the
digests that this library writes beside `.metadata`, the zips of tensors are not even looked at.
"""

from __future__ import annotations

import io
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from xla_ckpt.dtypes import DType
from xla_ckpt.engine.tag_reader import TagReader, head_of
from xla_ckpt.errors import (
    CorruptCheckpointError,
    FormatError,
    UnsupportedStateError,
    UntrustedObjectError,
    naming,
    storage_errors,
)
from xla_ckpt.layouts.dcp import digests, strided
from xla_ckpt.layouts.dcp.digests import DIGESTS, MAX_DIGESTS
from xla_ckpt.layouts.dcp.metadata import MAX_METADATA, METADATA, Contents, Span, StoredTensor, merged, parse
from xla_ckpt.layouts.dcp.names import nested, training_state
from xla_ckpt.layouts.dcp.shards import sharded_arrays
from xla_ckpt.layouts.dcp.tags import ranks_metadata, safetensors_shards
from xla_ckpt.layouts.numbered import named
from xla_ckpt.layouts.torch_save.zip_reader import Ahead, TensorAt, Zip
from xla_ckpt.manifest.digest import BlockDigester, BlockTable, digest
from xla_ckpt.manifest.records import ArrayRecord, FileRecord, Head, Manifest, Shard, UnknownArray, array_record
from xla_ckpt.plan.hints import Hints
from xla_ckpt.sharding.box import Box
from xla_ckpt.storage.base import Directory, Source, Store
from xla_ckpt.tags.directory import TagEntry
from xla_ckpt.tree.codec import ValueCodec
from xla_ckpt.tree.flatten import flatten

SAVED_OVER = (
    f"The directory is damaged, or another program has saved over it. If one has, remove {DIGESTS}: then it is read "
    "without digests."
)
"""What to do about digests that contradict what they lie beside."""

_NOTHING = digest(b"")

_RANK = re.compile(r"__(\d+)_\d+\.distcp")

Values = Sequence[tuple[tuple[str | int, ...], Any]]
"""(path, value) of all that is stored."""

_PLAIN = frozenset({int, float, str, bool, type(None)})


def open_scanned(store: Store, found: TagEntry, hints: Hints, codec: ValueCodec) -> TagReader:
    """A reader of a directory of DCP's, for the restore engine.

    Raises:
        CorruptCheckpointError: Files are missing, damaged, or do not add up.
        UntrustedObjectError: `.metadata` names a class that is none of torch's. Nothing has run.
        UnsupportedStateError: A tensor is stored in a way that cannot be described.
    """
    with storage_errors("opening a directory", path=store.path, tag=found.tag):
        directory = store.open(found.directory)
    try:
        with naming(path=store.path, tag=found.tag), storage_errors("reading a directory"):
            files = Files(directory)
            values: Values
            if METADATA not in files.names and safetensors_shards(files.names):
                values = sharded_arrays(files, hints)
            else:
                values = stored_values(files, codec)
            manifest, objects = manifest_of(files, values, found, hints, codec)
            reader = TagReader(directory, store.path, found.tag, manifest, objects)
            if files.digested:
                reader.advice = SAVED_OVER
            return reader
    except BaseException:
        directory.close()  # nobody else will
        raise


class Files:
    """The files of a directory: by name, and by number for a manifest."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.names = frozenset(directory.files())
        self.records: list[FileRecord] = []
        self.digested: Mapping[str, FileRecord] = {}
        """The records of the digests beside `.metadata`, by path; empty where there are none."""
        self._numbers: dict[str, int] = {}
        self._starts: dict[str, list[int]] = {}
        self._tables: dict[str, BlockTable] = {}

    def contents(self) -> Contents:
        """What `.metadata` says, compared with the digests where there are any.

        Raises:
            CorruptCheckpointError: It is missing or damaged, or the digests contradict it.
        """
        if METADATA not in self.names and (of_ranks := ranks_metadata(self.names)):
            return merged([self._parsed(name) for name in of_ranks])
        if DIGESTS in self.names:
            held = digests.parse(self.small(DIGESTS, MAX_DIGESTS))
            self.digested = {r.path: r for r in held.files}
        return self._parsed(METADATA)

    def _parsed(self, name: str) -> Contents:
        data = self.small(name, MAX_METADATA)
        record = digests.record_of(name, data)
        if self.digested and self.digested[name] != record:
            raise CorruptCheckpointError(
                f"{name} is not the one that {DIGESTS} was written for", file=name, hint=SAVED_OVER
            )
        self.add(record)
        return parse(data, name)

    def small(self, name: str, limit: int) -> bytes:
        """All of a small file.

        Raises:
            CorruptCheckpointError: It is missing, or larger than `limit` bytes.
        """
        with closing(self.open(name)) as source:
            if source.size > limit:
                raise FormatError(
                    "the file is too large", file=name, expected=f"at most {limit} bytes", found=source.size
                )
            data = bytearray(source.size)
            return bytes(data[: source.read_into(memoryview(data), 0)])

    def open(self, name: str) -> Source:
        """A file for reading.

        Raises:
            CorruptCheckpointError: There is none.
        """
        try:
            return self.directory.open(name)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            hint = "The save has not ended: DCP writes this file last." if name == METADATA else None
            raise CorruptCheckpointError("a file is missing", file=name, hint=hint) from None

    def number(self, name: str, size: int) -> int:
        """The number of a file in the manifest.

        Raises:
            CorruptCheckpointError: The digests do not know it, or say that it has another size.
        """
        if name not in self._numbers:
            held = self.digested.get(name)
            if self.digested and (held is None or held.size != size):
                raise CorruptCheckpointError(
                    f"a file is not as {DIGESTS} says",
                    file=name,
                    expected="no such file" if held is None else f"{held.size} bytes",
                    found=f"{size} bytes",
                    hint=SAVED_OVER,
                )
            self.add(held or FileRecord(path=name, size=size, head=0, digest=_NOTHING))
        return self._numbers[name]

    def add(self, record: FileRecord) -> int:
        """The number of a further file."""
        self._numbers[record.path] = len(self.records)
        self.records.append(record)
        return self._numbers[record.path]

    def region_in(self, span: Span, nbytes: int) -> int:
        """Offset of the region of so many bytes that lies in a span, as the digests say.

        Raises:
            CorruptCheckpointError: There is none.
        """
        regions = self.digested[span.file].regions
        if span.file not in self._starts:
            self._starts[span.file] = [offset for offset, _ in regions]
        at = bisect_left(self._starts[span.file], span.offset)
        offset, size = regions[at] if at < len(regions) else (0, 0)
        if size != nbytes or offset + size > span.offset + span.nbytes:
            raise CorruptCheckpointError(
                f"{DIGESTS} has no digests of a chunk",
                file=span.file,
                expected=f"{nbytes} bytes within {span.offset} to {span.offset + span.nbytes}",
                hint=SAVED_OVER,
            )
        return offset

    def number_inside(self, name: str) -> int:
        """The number of a file for arrays inside of its values.

        The digests are those of whole values, and have been compared with all of them when this is called. Arrays in
        them are read later without any.
        """
        number = self._numbers[name]
        if self.records[number].regions:
            self.records[number] = FileRecord(path=name, size=self.records[number].size, head=0, digest=_NOTHING)
        return number

    def check_value(self, held: Ahead, span: Span) -> None:
        """Compare a value with its digests, where its file has some for it.

        Raises:
            CorruptCheckpointError: It is not what was saved.
        """
        record = self.digested.get(span.file)
        if record is None or not record.regions:  # then `check_head` has read all of the file
            return
        last = bisect_left(record.regions, (span.offset + span.nbytes, 0)) - 1  # that begins before its end
        if last < 0 or sum(record.regions[last]) <= span.offset:
            return  # it lies between regions, and `check_head` has read that
        if span.file not in self._tables:
            self._tables[span.file] = BlockTable.of_regions(record.regions, record.digests)
        expected = self._tables[span.file].of(span.offset, span.nbytes)
        data = held.take(span.offset, span.nbytes)
        found = BlockDigester(span.nbytes)
        found.update(memoryview(data))
        if tuple(found.digests) != expected:
            raise CorruptCheckpointError("a value is damaged", file=span.file, hint=SAVED_OVER)

    def check_head(self, name: str, source: Source) -> None:
        """Compare the bytes of a file that are in no region with their digest, where there is one.

        Raises:
            CorruptCheckpointError: They are not what was saved.
        """
        if name in self.digested:
            head_of(source, self.digested[name], SAVED_OVER)


class Pickled:
    """Stands for a value whose pickle names classes that are not read without trust."""

    def __init__(self, directory: Directory, span: Span, error: UntrustedObjectError) -> None:
        self.directory = directory
        self.span = span
        self.error = error

    def load(self, leaf: str, *, trust: bool) -> Any:
        """The object.

        Raises:
            UntrustedObjectError: `trust` is False. Nothing of it has run.
        """
        if not trust:
            raise UntrustedObjectError(
                self.error.problem,
                leaf=leaf,
                file=self.span.file,
                hint="Pass trust_pickle=True if you trust whoever wrote this file.",
            )
        with closing(self.directory.open(self.span.file)) as source:
            data = bytearray(self.span.nbytes)
            source.read_into(memoryview(data), self.span.offset)
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


@dataclass(frozen=True, slots=True)
class Item:
    """What a span holds: a chunk of a tensor, or with no box a value."""

    key: str
    span: Span
    dtype: DType | None = None
    box: Box | None = None


def stored_values(files: Files, codec: ValueCodec) -> Values:
    """(path, value) of all that is stored: an `ArrayRecord` or `UnknownArray` for a tensor, else the value itself.

    In values there may be further records. A value that is not read without trust is `Pickled`.

    Raises:
        CheckpointError: See `open_scanned`.
    """
    contents = files.contents()
    values: dict[str, Any] = dict(contents.undescribed)
    shards: dict[str, list[Shard]] = {key: [] for key in contents.tensors}
    for name, items in sorted(items_by_file(contents).items()):
        with closing(files.open(name)) as source:
            number = files.number(name, source.size)
            if any(item.box is None for item in items):
                files.check_head(name, source)
            held = Ahead(source, name)
            for item in items:
                with naming(leaf=item.key):
                    if item.box is None:
                        values[item.key] = _value(files, held, item, codec)
                    else:
                        shards[item.key] += _chunk(files, held, item, number)
    for key, tensor in contents.tensors.items():
        values[key] = _record(key, tensor, shards[key])
    return [(path, values[key]) for key, path in contents.paths.items()]


def items_by_file(contents: Contents) -> dict[str, list[Item]]:
    """What is stored in each file, in file order.

    Raises:
        UnsupportedStateError: An extension has changed some of it.
    """
    found: dict[str, list[Item]] = {}
    for item in _items(contents):
        if item.span.transforms:
            raise UnsupportedStateError(
                f"an extension of DCP has changed what is stored: {', '.join(item.span.transforms)}",
                leaf=item.key,
                file=item.span.file,
                hint="Load the directory with torch.distributed.checkpoint, and save it anew without _extensions=.",
            )
        found.setdefault(item.span.file, []).append(item)
    for items in found.values():
        items.sort(key=lambda item: item.span.offset)
    return found


def _items(contents: Contents) -> Iterator[Item]:
    for key, span in contents.objects.items():
        yield Item(key, span)
    for key, tensor in contents.tensors.items():
        for chunk in tensor.chunks:
            if chunk.at is not None:
                yield Item(key, chunk.at, tensor.dtype, chunk.box)


def _record(key: str, tensor: StoredTensor, shards: list[Shard]) -> ArrayRecord:
    with naming(leaf=key, file=METADATA):
        return array_record(tensor.dtype, tensor.shape, shards)


def _chunk(files: Files, held: Ahead, item: Item, number: int) -> Iterator[Shard]:
    """Where the elements of a chunk lie.

    Raises:
        CorruptCheckpointError: Its zip is none, or holds something else.
    """
    assert item.box is not None
    assert item.dtype is not None
    if files.digested:
        if item.box.size:
            yield Shard(item.box, number, files.region_in(item.span, item.box.size * item.dtype.itemsize))
        return
    if item.span.nbytes and bytes(held.take(item.span.offset, 9)[8:]) == b"{":
        raise UnsupportedStateError(
            "this FileSystemWriter has written tensors as safetensors, which DCP itself does not read back: .metadata "
            "gives all of a file one place",
            file=item.span.file,
            hint="Save with the default serialization_format, or with HuggingFaceStorageWriter.",
        )
    found = Zip(held, item.span.offset, item.span.nbytes).value(strided=True)
    if not isinstance(found, TensorAt) or (found.dtype, found.shape) != (item.dtype, item.box.shape):
        raise CorruptCheckpointError(
            f"a chunk is not what {METADATA} says",
            file=item.span.file,
            expected=f"{item.dtype.name} {list(item.box.shape)} at {list(item.box.start)}",
            found=f"{found.dtype.name} {list(found.shape)}" if isinstance(found, TensorAt) else type(found).__name__,
        )
    yield from shards_of(found, item.box, number)


def shards_of(at: TensorAt, box: Box, number: int) -> Iterator[Shard]:
    """A tensor of a zip as shards: one, unless it is not in C order."""
    if at.strides is None:
        yield Shard(box, number, at.offset)
        return
    with naming(file=at.file):
        for part, first in strided.boxes(at.shape, at.strides, box.start):
            yield Shard(part, number, at.offset + first * at.dtype.itemsize)


def _value(files: Files, held: Ahead, item: Item, codec: ValueCodec) -> Any:
    """A value that is no tensor, with a record for each tensor in it.

    Raises:
        CorruptCheckpointError: It is damaged, or its zip is none.
    """
    files.check_value(held, item.span)
    try:
        value = Zip(held, item.span.offset, item.span.nbytes).value(strided=True)
    except UntrustedObjectError as error:
        return Pickled(files.directory, item.span, error)
    if type(value) in _PLAIN:
        return value
    flat = flatten(value, _kind, codec)
    if flat.objects:
        kind = type(flat.objects[0][1]).__name__
        refused = UntrustedObjectError(f"a {kind} is neither array nor plain value")
        return Pickled(files.directory, item.span, refused)
    return value


def _kind(value: Any) -> str | None:
    return "torch" if isinstance(value, ArrayRecord | UnknownArray | TensorAt) else None


def _shape(value: Any) -> tuple[int, ...] | None:
    return value.shape if isinstance(value, ArrayRecord | UnknownArray | TensorAt) else None


def manifest_of(
    files: Files,
    values: Values,
    found: TagEntry,
    hints: Hints,
    codec: ValueCodec,
) -> tuple[Manifest, list[Pickled]]:
    """The manifest of a directory, and the objects that its skeleton numbers."""
    parts = training_state(nested(values), hints, lambda value: _kind(value) is not None)
    parts, _ = named(parts, hints, _shape, guess=False)
    flat = flatten(parts, _kind, codec)
    arrays: dict[str, ArrayRecord] = {}
    for leaf, value in flat.arrays.items():
        if isinstance(value, TensorAt):
            with naming(leaf=leaf, file=value.file):
                shards = shards_of(value, Box.whole(value.shape), files.number_inside(value.file))
                arrays[leaf] = array_record(value.dtype, value.shape, shards)
        elif isinstance(value, ArrayRecord):
            arrays[leaf] = value
    ranks = {match[1] for record in files.records if (match := _RANK.fullmatch(record.path))}
    manifest = Manifest(
        head=Head(tag=found.tag, sequence=0, pinned=False, created=found.created),
        skeleton=flat.skeleton,
        arrays=arrays,
        files=tuple(files.records),
        world=len(ranks) or 1,
        unknown={leaf: value for leaf, value in flat.arrays.items() if isinstance(value, UnknownArray)},
    )
    return manifest, [value for _, value in flat.objects]
