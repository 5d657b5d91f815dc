"""Open and verify DCP directories: scan them into a `Manifest` without reading tensors.

`.metadata` maps each chunk to a zip in a file, and the zips locate the elements. Directories of
HuggingFaceStorageWriter contain safetensors files of each rank and no `.metadata`: no file records the shapes of the
arrays, so an array ends where its last part does, unless the model of the program is larger. Verification checks all
bytes against our digests if there are any, otherwise the records of zips against their CRC-32s.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.files.safetensors import parse_saved_offsets
from xla_ckpt.core.manifest.arrays import ArrayRecord, Shard, create_array_record
from xla_ckpt.core.manifest.manifest import Manifest, UnreadableArray
from xla_ckpt.core.plan.hints import LoadHints
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.tree.nested import build_nested
from xla_ckpt.core.tree.state_dict import match_parameter_names
from xla_ckpt.errors import CorruptCheckpointError, FormatError, UntrustedObjectError, annotate_errors, wrap_os_errors
from xla_ckpt.formats.dcp.files import DcpFiles, check_no_transforms
from xla_ckpt.formats.dcp.metadata import (
    MANAGER_METADATA_FILE,
    METADATA_FILE,
    SHARD_NAME,
    DcpContents,
    DcpTensor,
    KeyPath,
    StorageSpan,
    list_safetensors_shards,
)
from xla_ckpt.formats.digests import DIGESTS
from xla_ckpt.formats.hugging_face.layout import (
    describe_unknown_dtype,
    find_quantized_weights,
    scan_safetensors_file,
)
from xla_ckpt.formats.numbered_parameters import name_parameters
from xla_ckpt.formats.scan import (
    UntrustedObject,
    build_scanned_manifest,
    check_files,
    flatten_state,
    is_scanned_array,
    open_for_scan,
    start_verify_report,
    wrap_untrusted_file,
)
from xla_ckpt.formats.state_dict_search import build_training_state
from xla_ckpt.formats.torch_save.stored_tensors import iterate_shards, make_array_record, make_composite
from xla_ckpt.formats.torch_save.zip_reader import ReadAheadFile, TensorLocation, TorchZip
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.loading.verify import VerifyReport, collect_problem, verify_tag
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.storage.threads import READ_THREADS
from xla_ckpt.tags.entry import TagEntry

logger = get_logger(__name__)

_MISSING_FILE_HINT = "A file of the directory is missing, or was overwritten."


def scan_sharded_arrays(files: DcpFiles, hints: LoadHints) -> list[tuple[KeyPath, ArrayRecord | UnreadableArray]]:
    """Return (path, record) of each array in a directory of safetensors shards.

    Raises:
        CorruptCheckpointError: A file is missing or corrupt, or parts overlap or are missing.
    """
    names = list_safetensors_shards(files.file_names)
    _check_shard_names(names)
    parts: dict[str, tuple[DType, list[Shard]]] = {}
    foreign: dict[str, UnreadableArray] = {}
    for name in names:
        with annotate_errors(file=name):
            record, head, tensors = scan_safetensors_file(files.directory, name)
            starts, number = parse_saved_offsets(head), files.add(record)
            for tensor in tensors:
                if tensor.dtype is None:
                    foreign[tensor.name] = describe_unknown_dtype(tensor)
                    continue
                start = starts.get(tensor.name, (0,) * len(tensor.shape))
                dtype, shards = parts.setdefault(tensor.name, (tensor.dtype, []))
                if len(start) != len(tensor.shape) or dtype != tensor.dtype:
                    raise FormatError("a part of an array does not fit to the others", leaf=tensor.name)
                stop = tuple(a + n for a, n in zip(start, tensor.shape, strict=True))
                shards.append(Shard(Box(start, stop), number, tensor.offset))
    arrays: dict[str, ArrayRecord] = {}
    for key, (dtype, shards) in parts.items():
        if len({len(shard.box.stop) for shard in shards}) > 1:
            raise FormatError("the parts of an array have not the same number of dims", leaf=key)
        shape = tuple(map(max, zip(*(shard.box.stop for shard in shards), strict=True)))
        try:
            with annotate_errors(leaf=key):
                arrays[key] = create_array_record(dtype, shape, shards)
        except FormatError as error:
            error.hint = _MISSING_FILE_HINT
            raise
    short = _find_truncated_arrays(arrays, hints)
    if not hints.arrays:
        logger.warning(
            "no file says how large the arrays are: %d files are there, and each array is taken to end where its last "
            "part in them does",
            len(names),
        )
    unknown = find_quantized_weights(arrays) | short
    return [((key,), record) for key, record in (arrays | unknown | foreign).items()]


def _check_shard_names(names: list[str]) -> None:
    """Check that the numbers of the files have no gaps.

    Raises:
        CorruptCheckpointError: A file is missing, or the files belong to two saves.
    """
    parts = [tuple(map(int, match.groups())) for name in names if (match := SHARD_NAME.fullmatch(name))]
    ranks, models, counts = (set(column) for column in zip(*parts, strict=True))
    if len(counts) > 1:
        raise CorruptCheckpointError(
            "files of two saves lie here", file=names[-1], found=", ".join(f"of {n}" for n in sorted(counts))
        )
    for word, numbers, last in (("shard", ranks, max(ranks)), ("model", models, max(counts))):
        first = next(n for n in count(1) if n not in numbers)
        if first <= last:
            raise CorruptCheckpointError(
                "a file is missing", file=f"{word}-{first:05}", found=f"{len(names)} files", hint=_MISSING_FILE_HINT
            )


def _find_truncated_arrays(arrays: Mapping[str, ArrayRecord], hints: LoadHints) -> dict[str, UnreadableArray]:
    """Return the arrays whose stored parts end before the shape in the program."""
    called = match_parameter_names(arrays, hints.arrays)
    unknown: dict[str, UnreadableArray] = {}
    for key, name in called.items():
        shape, wanted = arrays[key].shape, hints.arrays[name].shape
        if wanted is None or len(wanted) != len(shape) or shape == wanted:
            continue
        if all(a <= b for a, b in zip(shape, wanted, strict=True)):
            unknown[key] = UnreadableArray(
                problem="the parts of this array that are stored end before the array does",
                expected=str(list(wanted)),
                found=str(list(shape)),
                hint=_MISSING_FILE_HINT,
            )
    return unknown


_RANK_FILE = re.compile(r"__(\d+)_\d+\.distcp")
"""Tensor file; the number is the rank that wrote it."""

StoredValues = Sequence[tuple[KeyPath, Any]]
"""(path, value) of all stored values."""

_PLAIN_TYPES = frozenset({int, float, str, bool, type(None)})


def open_dcp(store: Store, entry: TagEntry, hints: LoadHints) -> TagReader:
    """Return a reader of a DCP directory, for the restore engine.

    Raises:
        CorruptCheckpointError: Files are missing, corrupt, or inconsistent.
        UntrustedObjectError: `.metadata` names a class that is not a torch class. No code was run.
        UnsupportedStateError: A tensor is stored in an unsupported form.
    """
    with open_for_scan(store, entry.tag, lambda: store.open(entry.directory)) as directory:
        files = DcpFiles(directory)
        values: StoredValues
        if METADATA_FILE not in files.file_names and list_safetensors_shards(files.file_names):
            values = scan_sharded_arrays(files, hints)
        else:
            values = _read_stored_values(files)
        manifest, objects = _build_manifest(files, values, entry, hints)
        reader = TagReader(
            files.wrap_with_crc_checks(directory, files.file_names), store.path, entry.tag, manifest, objects
        )
        if files.digest_records:
            reader.damage_hint = files.digest_mismatch_hint
        return reader


@dataclass(frozen=True, slots=True)
class StoredItem:
    """Content of a span: a chunk of a tensor, or a value if `box` is None."""

    key: str
    span: StorageSpan
    dtype: DType | None = None
    box: Box | None = None


def require_contents(files: DcpFiles) -> DcpContents:
    """Return the metadata of a directory.

    Raises:
        CorruptCheckpointError: The metadata are missing or corrupt, or the digests contradict them.
    """
    contents = files.read_contents()
    if contents is None:
        raise CorruptCheckpointError(
            "a file is missing",
            file=METADATA_FILE,
            hint="The save has not ended: DCP writes this file last, and nothing can be loaded without it.",
        )
    return contents


def _read_stored_values(files: DcpFiles) -> StoredValues:
    """Return (path, value) of all stored values: an `ArrayRecord` or `UnreadableArray` for each tensor.

    Any other value is returned itself, and can contain records. A value that needs trust is an `UntrustedObject`.

    Raises:
        CheckpointError: See `open_dcp`.
    """
    contents = require_contents(files)
    values: dict[str, Any] = dict(contents.unsupported)
    shards: dict[str, list[Shard]] = {key: [] for key in contents.tensors}
    for name, spans in sorted(group_spans_by_file(contents).items()):
        with closing(files.open(name)) as source:
            number = files.get_file_number(name, source.size)
            ahead = ReadAheadFile(source, name)
            for item in spans:
                with annotate_errors(leaf=item.key):
                    if item.box is None:
                        values[item.key] = _read_value(files, ahead, item.span)
                    else:
                        shards[item.key] += _locate_chunk(files, ahead, item, number)
    for key, tensor in contents.tensors.items():
        values[key] = _make_record(key, tensor, shards[key])
    return [(path, values[key]) for key, path in contents.paths.items()]


def group_spans_by_file(contents: DcpContents) -> dict[str, list[StoredItem]]:
    """Return the stored items of each file, in file order.

    Raises:
        UnsupportedStateError: A DCP extension transformed some of them.
    """
    files: dict[str, list[StoredItem]] = {}
    for item in _iterate_spans(contents):
        with annotate_errors(leaf=item.key):
            check_no_transforms(item.span)
        files.setdefault(item.span.file, []).append(item)
    for spans in files.values():
        spans.sort(key=lambda item: item.span.offset)
    return files


def _iterate_spans(contents: DcpContents) -> Iterator[StoredItem]:
    for key, span in contents.objects.items():
        yield StoredItem(key, span)
    for key, tensor in contents.tensors.items():
        for chunk in tensor.chunks:
            if chunk.span is not None:
                yield StoredItem(key, chunk.span, tensor.dtype, chunk.box)


def _make_record(key: str, tensor: DcpTensor, shards: list[Shard]) -> ArrayRecord:
    with annotate_errors(leaf=key, file=METADATA_FILE):
        return create_array_record(tensor.dtype, tensor.shape, shards)


def _locate_chunk(files: DcpFiles, ahead: ReadAheadFile, item: StoredItem, number: int) -> Iterator[Shard]:
    """Locate the elements of a chunk, as shards of a file.

    Raises:
        CorruptCheckpointError: Its zip is invalid, or has other content.
    """
    assert item.box is not None
    assert item.dtype is not None
    if item.box.size or not files.digest_records:  # digests cover only bytes
        yield from iterate_shards(files.locate_tensor(ahead, item.span, item.dtype, item.box), item.box, number)


def _read_value(files: DcpFiles, ahead: ReadAheadFile, span: StorageSpan) -> Any:
    """Read a value that is not a tensor, with a record for each tensor in it.

    Raises:
        CorruptCheckpointError: The value is corrupt, or its zip is invalid.
    """
    files.check_value(ahead, span)

    def record(at: TensorLocation) -> ArrayRecord:
        return make_array_record(at, files.get_inner_file_number(at.file))

    try:
        value = files.read_zip(ahead, span, record, make_composite)
    except UntrustedObjectError as error:
        return _wrap_untrusted(files, span, error.problem)
    if type(value) in _PLAIN_TYPES:
        return value
    flat = flatten_state(value)
    if flat.objects:
        return _wrap_untrusted(files, span, f"a {type(flat.objects[0][1]).__name__} is neither array nor plain value")
    return value


def _wrap_untrusted(files: DcpFiles, span: StorageSpan, problem: str) -> UntrustedObject:
    def data() -> bytes:
        with closing(files.directory.open(span.file)) as source:
            return bytes(ReadAheadFile(source, span.file, 0).read_at(span.offset, span.nbytes))

    return wrap_untrusted_file(span.file, problem, data)


def _build_manifest(
    files: DcpFiles, values: StoredValues, entry: TagEntry, hints: LoadHints
) -> tuple[Manifest, list[UntrustedObject]]:
    """Build the manifest of a directory. Return it, and the objects that its skeleton references by number."""
    parts = build_training_state(build_nested(values), hints, is_scanned_array)
    parts, _ = name_parameters(parts, hints, guess=False)
    ranks = {match[1] for record in files.records if (match := _RANK_FILE.fullmatch(record.path))}
    return build_scanned_manifest(
        entry.tag, flatten_state(parts), files.records, created=entry.created, world=len(ranks) or 1
    )


def verify_dcp(store: Store, entry: TagEntry, workers: int = READ_THREADS) -> VerifyReport:
    """Read and verify every file of a directory.

    All chunks have to exist, match `.metadata`, and cover their tensors.

    Raises:
        StorageError: The directory cannot be opened.
    """
    with start_verify_report(store, entry.tag) as report:
        with wrap_os_errors("opening a directory", path=store.path, tag=entry.tag):
            directory = store.open(entry.directory)
        with closing(directory):
            digested = DIGESTS in directory.list_files()
            sharded = (
                bool(list_safetensors_shards(directory.list_files())) and METADATA_FILE not in directory.list_files()
            )
            if not digested and not sharded:
                _check_zips(directory, report, workers)
        if not report.problems:
            try:
                with open_dcp(store, entry, LoadHints()) as reader:
                    if digested or sharded:
                        whole = verify_tag(reader, workers=workers)
                        report.problems, report.files, report.nbytes = whole.problems, whole.files, whole.nbytes
                        report.digests = digested
                    known = {DIGESTS, MANAGER_METADATA_FILE, *(record.path for record in reader.manifest.files)}
                    report.strangers = [name for name in reader.directory.list_files() if name not in known]
                    report.arrays = len(reader.manifest.arrays)
            except CorruptCheckpointError as error:
                report.problems.append(error)
    return report


def _check_zips(directory: Directory, report: VerifyReport, workers: int) -> None:
    """Check all zips against their CRC-32s, and report the problems of each."""
    files = DcpFiles(directory)
    spans: dict[str, list[StoredItem]] = {}
    collect_problem(report, lambda: spans.update(group_spans_by_file(require_contents(files))))

    def check_file(name: str) -> int:
        sizes: list[int] = []

        def check_zip(item: StoredItem) -> None:
            with annotate_errors(leaf=item.key):
                TorchZip(ahead, item.span.offset, item.span.nbytes).check()
            sizes.append(item.span.nbytes)

        with closing(files.open(name)) as source:
            ahead = ReadAheadFile(source, name)
            cut: list[StoredItem] = []
            for item in spans[name]:
                if item.span.offset + item.span.nbytes > source.size:
                    cut.append(item)
                else:
                    collect_problem(report, partial(check_zip, item))
            if cut:
                report.problems.append(_make_truncated_error(name, cut, source.size))
        return sum(sizes)

    check_files(report, sorted(spans), check_file, workers)


def _make_truncated_error(file: str, lost: Sequence[StoredItem], nbytes: int) -> CorruptCheckpointError:
    """Return one error for all items that a truncated file of `nbytes` bytes no longer contains."""
    first, others = min(lost, key=lambda item: item.span.offset), len(lost) - 1
    return CorruptCheckpointError(
        "the file is cut off" + (f", and {others} more of its keys are not whole" if others else ""),
        leaf=first.key,
        file=file,
        expected=f"{max(item.span.offset + item.span.nbytes for item in lost)} bytes",
        found=nbytes,
    )
