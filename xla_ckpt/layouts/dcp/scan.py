"""Opening a directory of DCP's: scanned into a `Manifest`, without a byte of its tensors being needed.

`.metadata` says which zip of which file holds which chunk, and the zips say where in them the elements lie. With the
digests that this library writes beside `.metadata`, the zips of tensors are not even looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from xla_ckpt.dtypes import DType
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import CorruptCheckpointError, UntrustedObjectError, naming
from xla_ckpt.layouts.dcp.files import DcpFiles, check_unchanged
from xla_ckpt.layouts.dcp.metadata import METADATA, Contents, DcpTensor, KeyPath, Span
from xla_ckpt.layouts.dcp.shards import sharded_arrays
from xla_ckpt.layouts.dcp.tags import safetensors_shards
from xla_ckpt.layouts.parameter_numbers import with_names
from xla_ckpt.layouts.scanned import directory_to_scan, flattened, is_scanned_array, scanned_manifest
from xla_ckpt.layouts.torch_save.ahead import Ahead
from xla_ckpt.layouts.torch_save.strided import composite_of, record_at, shards_at
from xla_ckpt.layouts.torch_save.zip_reader import TensorAt
from xla_ckpt.layouts.training_state import training_state
from xla_ckpt.layouts.untrusted import UntrustedObject, whole_file_on_trust
from xla_ckpt.manifest.arrays import ArrayRecord, array_record
from xla_ckpt.manifest.records import Manifest
from xla_ckpt.manifest.shards import Shard
from xla_ckpt.plan.hints import Hints
from xla_ckpt.sharding.box import Box
from xla_ckpt.storage.base import Store
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tree.nested import nested

_OF_RANK = re.compile(r"__(\d+)_\d+\.distcp")
"""A file of tensors; the number is that of the rank which wrote it."""

Values = Sequence[tuple[KeyPath, Any]]
"""(path, value) of all that is stored."""

_PLAIN = frozenset({int, float, str, bool, type(None)})


def open_dcp(store: Store, entry: TagEntry, hints: Hints) -> TagReader:
    """A reader of a directory of DCP's, for the restore engine.

    Raises:
        CorruptCheckpointError: Files are missing, damaged, or do not add up.
        UntrustedObjectError: `.metadata` names a class that is none of torch's. Nothing has run.
        UnsupportedStateError: A tensor is stored in a way that cannot be described.
    """
    with directory_to_scan(store, entry.tag, lambda: store.open(entry.directory)) as directory:
        files = DcpFiles(directory)
        values: Values
        if METADATA not in files.names and safetensors_shards(files.names):
            values = sharded_arrays(files, hints)
        else:
            values = _stored_values(files)
        manifest, objects = _manifest_of(files, values, entry, hints)
        reader = TagReader(files.compared(directory, files.names), store.path, entry.tag, manifest, objects)
        if files.digested:
            reader.advice = files.saved_over
        return reader


@dataclass(frozen=True, slots=True)
class SpanOf:
    """What a span holds: a chunk of a tensor, or with no box a value."""

    key: str
    span: Span
    dtype: DType | None = None
    box: Box | None = None


def existing_contents(files: DcpFiles) -> Contents:
    """What the metadata of a directory say.

    Raises:
        CorruptCheckpointError: There are none, or they are damaged, or the digests contradict them.
    """
    contents = files.contents()
    if contents is None:
        raise CorruptCheckpointError(
            "a file is missing",
            file=METADATA,
            hint="The save has not ended: DCP writes this file last, and nothing can be loaded without it.",
        )
    return contents


def _stored_values(files: DcpFiles) -> Values:
    """(path, value) of all that is stored: an `ArrayRecord` or `UnknownArray` for a tensor, else the value itself.

    In values there may be records, too. A value that is not read without trust is an `UntrustedObject`.

    Raises:
        CheckpointError: See `open_dcp`.
    """
    contents = existing_contents(files)
    values: dict[str, Any] = dict(contents.undescribed)
    shards: dict[str, list[Shard]] = {key: [] for key in contents.tensors}
    for name, spans in sorted(spans_by_file(contents).items()):
        with closing(files.open(name)) as source:
            number = files.number(name, source.size)
            ahead = Ahead(source, name)
            for item in spans:
                with naming(leaf=item.key):
                    if item.box is None:
                        values[item.key] = _value(files, ahead, item.span)
                    else:
                        shards[item.key] += _chunk(files, ahead, item, number)
    for key, tensor in contents.tensors.items():
        values[key] = _record(key, tensor, shards[key])
    return [(path, values[key]) for key, path in contents.paths.items()]


def spans_by_file(contents: Contents) -> dict[str, list[SpanOf]]:
    """What is stored in each file, in file order.

    Raises:
        UnsupportedStateError: An extension has changed some of it.
    """
    files: dict[str, list[SpanOf]] = {}
    for item in _spans(contents):
        with naming(leaf=item.key):
            check_unchanged(item.span)
        files.setdefault(item.span.file, []).append(item)
    for spans in files.values():
        spans.sort(key=lambda item: item.span.offset)
    return files


def _spans(contents: Contents) -> Iterator[SpanOf]:
    for key, span in contents.objects.items():
        yield SpanOf(key, span)
    for key, tensor in contents.tensors.items():
        for chunk in tensor.chunks:
            if chunk.at is not None:
                yield SpanOf(key, chunk.at, tensor.dtype, chunk.box)


def _record(key: str, tensor: DcpTensor, shards: list[Shard]) -> ArrayRecord:
    with naming(leaf=key, file=METADATA):
        return array_record(tensor.dtype, tensor.shape, shards)


def _chunk(files: DcpFiles, ahead: Ahead, item: SpanOf, number: int) -> Iterator[Shard]:
    """Where the elements of a chunk lie.

    Raises:
        CorruptCheckpointError: Its zip is none, or holds something else.
    """
    assert item.box is not None
    assert item.dtype is not None
    if item.box.size or not files.digested:  # digests know only of bytes
        yield from shards_at(files.tensor_at(ahead, item.span, item.dtype, item.box), item.box, number)


def _value(files: DcpFiles, ahead: Ahead, span: Span) -> Any:
    """A value that is no tensor, with a record for each tensor in it.

    Raises:
        CorruptCheckpointError: It is damaged, or its zip is none.
    """
    files.check_value(ahead, span)

    def record(at: TensorAt) -> ArrayRecord:
        return record_at(at, files.number_inside(at.file))

    try:
        value = files.zipped(ahead, span, record, composite_of)
    except UntrustedObjectError as error:
        return _on_trust(files, span, error.problem)
    if type(value) in _PLAIN:
        return value
    flat = flattened(value)
    if flat.objects:
        return _on_trust(files, span, f"a {type(flat.objects[0][1]).__name__} is neither array nor plain value")
    return value


def _on_trust(files: DcpFiles, span: Span, problem: str) -> UntrustedObject:
    def data() -> bytes:
        with closing(files.directory.open(span.file)) as source:
            return bytes(Ahead(source, span.file, 0).take(span.offset, span.nbytes))

    return whole_file_on_trust(span.file, problem, data)


def _manifest_of(
    files: DcpFiles, values: Values, entry: TagEntry, hints: Hints
) -> tuple[Manifest, list[UntrustedObject]]:
    """The manifest of a directory, and the objects that its skeleton numbers."""
    parts = training_state(nested(values), hints, is_scanned_array)
    parts, _ = with_names(parts, hints, guess=False)
    ranks = {match[1] for record in files.records if (match := _OF_RANK.fullmatch(record.path))}
    return scanned_manifest(entry.tag, flattened(parts), files.records, created=entry.created, world=len(ranks) or 1)
