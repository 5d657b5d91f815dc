"""The Hugging Face layout: only a model, as safetensors files and an index, for other programs to load."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import closing

from xla_ckpt.core.checksum import compute_digest
from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.files.safetensors import (
    SafetensorsArray,
    get_header_size,
    parse_arrays,
    parse_saved_offsets,
)
from xla_ckpt.core.json_data import parse_json_object
from xla_ckpt.core.manifest.arrays import ArrayRecord, Shard, create_array_record
from xla_ckpt.core.manifest.manifest import FileRecord, Manifest, UnreadableArray
from xla_ckpt.core.plan.export_plan import (
    SINGLE_FILE,
    WEIGHT_INDEX_FILE,
    build_weight_index,
    plan_export,
)
from xla_ckpt.core.plan.hints import LoadHints
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.tree import schema
from xla_ckpt.errors import CorruptCheckpointError, FormatError, UsageError, annotate_errors
from xla_ckpt.formats.base import ConversionPlan, Layout, ModelNames, StoredState, TargetTopology
from xla_ckpt.formats.scan import CrcCheckedDirectory, build_scanned_manifest, flatten_model, open_for_scan
from xla_ckpt.loading.tag_reader import DAMAGED_FILE_HINT, TagReader
from xla_ckpt.loading.verify import VerifyReport
from xla_ckpt.storage.base import Directory, ReadDirectory, Store, read_file
from xla_ckpt.storage.threads import READ_THREADS
from xla_ckpt.tags.entry import TagEntry

SAFETENSORS_SUFFIX = ".safetensors"

ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
"""Name of the only file of arrays in PEFT."""

_SHARD_NAME = re.compile(r"(?!shard-).+-\d{5}-of-(?!00001)(\d{5})\.safetensors")
"""Name of one of several files of a model, all listed in an index. DCP shards have another prefix."""

MAX_FILE_BYTES = 5_000_000_000
"""Maximum file size (bytes), unless a single array is larger: the Hugging Face default."""

MAX_INDEX_BYTES = 100_000_000
"""Maximum size of an index (bytes)."""


class HuggingFaceLayout(Layout):
    """Model as Hugging Face safetensors. It is not a tag, because it has no manifest and no optimizer.

    A directory is opened if it is named as a tag, and a single file with another name if it contains a full model.
    Neither is listed among the tags of a root.
    """

    name = "safetensors"
    tagged = False
    holds = schema.MODEL
    model_names = ModelNames.HUGGING_FACE

    def find(self, store: Store, tag: str) -> TagEntry | None:
        if any(store.has(f"{tag}/{name}") for name in (SINGLE_FILE, WEIGHT_INDEX_FILE)):
            return TagEntry(tag=tag, directory=tag)
        if store.file_system is None:
            return None
        if store.is_directory(tag):  # shards without their index: an error when it is opened
            return TagEntry(tag=tag, directory=tag) if any(map(_SHARD_NAME.fullmatch, store.list_names(tag))) else None
        if tag.endswith(SAFETENSORS_SUFFIX) and store.has(tag):
            # Next to one of these files it is a part of their model.
            belongs = any(store.has(name) for name in (SINGLE_FILE, WEIGHT_INDEX_FILE, ADAPTER_WEIGHTS_FILE))
            return None if belongs else TagEntry(tag=tag, directory=tag, files=(tag,))
        return None

    def tag_of(self, entry: TagEntry) -> str:
        return entry.tag.removesuffix(SAFETENSORS_SUFFIX) if entry.files else entry.tag

    def open(self, store: Store, entry: TagEntry, hints: LoadHints) -> TagReader:
        name = "" if entry.files else entry.directory
        with open_for_scan(store, entry.tag, lambda: store.open(name, lock=False, links=True)) as directory:
            if not entry.files:
                return TagReader(directory, store.path, entry.tag, self.scan_manifest(directory, entry.tag), ())
            if (shard := _SHARD_NAME.fullmatch(entry.tag)) is not None:
                raise _make_missing_index_error(
                    f"{entry.tag} is one of {int(shard[1])} shards of a model, and {WEIGHT_INDEX_FILE} is missing"
                )
            (file,) = entry.files
            one = CrcCheckedDirectory(directory, (file,))
            check_unsharded_file(one, file)
            arrays, files = scan_model(one, file)
            manifest, _ = build_scanned_manifest(entry.tag, flatten_model(arrays), files)
            return TagReader(one, store.path, entry.tag, manifest, ())

    def scan_manifest(self, directory: Directory, tag: str) -> Manifest:  # overridden in derived classes
        """Scan a directory into a manifest. No array is read.

        Raises:
            CheckpointError: The directory is corrupt.
        """
        arrays, files = scan_model(directory)
        return build_scanned_manifest(tag, flatten_model(arrays), files)[0]

    def verify(self, store: Store, entry: TagEntry, workers: int = READ_THREADS) -> VerifyReport:
        report = super().verify(store, entry, workers)
        report.strangers = []  # other files belong to the model: its configuration, a tokenizer
        return report

    def rewriting(self, stored: StoredState, to: TargetTopology) -> ConversionPlan:
        return plan_model_files(stored, part=schema.MODEL, max_file_bytes=MAX_FILE_BYTES)


def _make_missing_index_error(problem: str) -> CorruptCheckpointError:
    """Return the error for shards of a model without the index that lists their arrays."""
    hint = "Restore the index, which says what each shard holds, and pass the directory."
    return CorruptCheckpointError(problem, file=WEIGHT_INDEX_FILE, hint=hint)


def plan_model_files(
    stored: StoredState, *, part: str, max_file_bytes: int, dtype: DType | None = None
) -> ConversionPlan:
    """Plan the files of a part of a state, and their index if there are several.

    Args:
        max_file_bytes: Maximum bytes per file. A new file is started when a file would exceed this.
        dtype: Dtype of all floating-point arrays in the files; None keeps each dtype.

    Raises:
        UsageError: The part contains no arrays, or the size is invalid.
        UnsupportedStateError: An array has a dtype that safetensors does not support.
    """
    files = plan_export(stored.manifest, part, max_file_bytes, dtype)
    return ConversionPlan(
        [tuple(files)], marks={WEIGHT_INDEX_FILE: build_weight_index(files)} if len(files) > 1 else {}
    )


def check_unsharded_file(directory: ReadDirectory, file: str) -> None:
    """Check that a file contains full arrays. Files of a tag or of DCP may contain parts.

    Raises:
        CorruptCheckpointError: The file is corrupt.
        UsageError: The file contains parts of arrays.
    """
    _, head, _ = scan_safetensors_file(directory, file)
    if parse_saved_offsets(head):
        raise UsageError(
            "this file of safetensors has parts of the arrays of a checkpoint",
            file=file,
            hint="Pass the directory of the checkpoint to which it belongs.",
        )


def scan_model(
    directory: ReadDirectory, single_file: str = SINGLE_FILE
) -> tuple[dict[str, ArrayRecord | UnreadableArray], list[FileRecord]]:
    """Scan the arrays in a Hugging Face directory, by name, and its files. No array is read.

    Args:
        single_file: Name of the only file, if there is no index.

    Raises:
        CorruptCheckpointError: A file is missing or corrupt, or the index does not match the files.
    """
    arrays: dict[str, ArrayRecord] = {}
    unknown: dict[str, UnreadableArray] = {}
    files: list[FileRecord] = []
    for number, (file, wanted) in enumerate(_read_index(directory, single_file).items()):
        record, _, tensors = scan_safetensors_file(directory, file)
        files.append(record)
        names = {tensor.name for tensor in tensors}
        if wanted is not None and names != wanted:
            raise CorruptCheckpointError(
                "a file does not hold the arrays that the index says are in it",
                file=file,
                expected=f"{len(wanted)} arrays",
                found=f"{len(names)}; the first that differs is {min(names ^ wanted)}",
            )
        for tensor in tensors:
            if tensor.dtype is None:
                unknown[tensor.name] = describe_unknown_dtype(tensor)
                continue
            shards = [Shard(Box.from_shape(tensor.shape), number, tensor.offset)]
            arrays[tensor.name] = create_array_record(tensor.dtype, tensor.shape, shards)
    return arrays | find_quantized_weights(arrays) | unknown, files


def describe_unknown_dtype(tensor: SafetensorsArray) -> UnreadableArray:
    """Return the entry for an array with an unknown dtype. Other arrays in its file can be read."""
    return UnreadableArray(
        problem="an array of a safetensors file has elements that cannot be read here",
        found=f"{tensor.dtype_code} of shape {list(tensor.shape)}",
        hint="Load the others without it, or load it with the program that wrote it and save it there as elements of "
        "whole bytes.",
        shape=tensor.shape,
        tensor_count=1,
    )


_SCALE_SUFFIX = "_scale_inv"


def find_quantized_weights(arrays: Mapping[str, ArrayRecord]) -> dict[str, UnreadableArray]:
    """Return the arrays that cannot be used without scales: float8 blocks with a separate array of scales."""
    return {
        name: UnreadableArray(
            problem=f"this weight is quantized: its values are the products of {record.dtype.name} and of the blocks "
            f"of {name}{_SCALE_SUFFIX}",
            hint="Load it with torch's QuantizedHuggingFaceStorageReader, and save what comes of it.",
            dtype=record.dtype,
            shape=record.shape,
            tensor_count=1,
        )
        for name, record in arrays.items()
        if record.dtype.name.startswith("float8") and name + _SCALE_SUFFIX in arrays
    }


def _read_index(directory: ReadDirectory, single_file: str) -> Mapping[str, set[str] | None]:
    """Return name of each file -> the arrays that the index lists for it; None if there is no index.

    Raises:
        CorruptCheckpointError: Both the single file and the index are missing.
        FormatError: The index is invalid, or names a file outside of the directory.
    """
    there = directory.list_files()
    if single_file in there:
        return {single_file: None}
    if WEIGHT_INDEX_FILE not in there:
        raise _make_missing_index_error("the index of a model in shards is missing")
    with annotate_errors(file=WEIGHT_INDEX_FILE):
        data = read_file(directory, WEIGHT_INDEX_FILE, limit=MAX_INDEX_BYTES, what="the index")
        places = parse_json_object(data, "the index").get("weight_map")
        if not isinstance(places, dict) or not places:
            raise FormatError("the index has no weight_map")
        names_by_file: dict[str, set[str] | None] = {}
        for name, file in places.items():
            if type(file) is not str or "/" in file or "\\" in file or not file.endswith(SAFETENSORS_SUFFIX):
                raise FormatError("the index names a file that is not one beside it", leaf=name, found=str(file)[:80])
            names = names_by_file.setdefault(file, set())
            assert names is not None
            names.add(name)
        return dict(sorted(names_by_file.items()))


def scan_safetensors_file(directory: ReadDirectory, file: str) -> tuple[FileRecord, bytes, list[SafetensorsArray]]:
    """Scan a safetensors file. Return its record, its header, and its arrays.

    Raises:
        CorruptCheckpointError: It is missing or corrupt.
    """
    try:
        source = directory.open(file)
    except FileNotFoundError:
        raise CorruptCheckpointError("a file of the index is missing", file=file, hint=DAMAGED_FILE_HINT) from None
    with closing(source), annotate_errors(file=file, hint=DAMAGED_FILE_HINT):
        start = bytearray(min(8, source.size))
        got = source.read_into(memoryview(start), 0)
        head = bytearray(get_header_size(bytes(start[:got]), source.size))
        if source.read_into(memoryview(head), 0) < len(head):
            raise CorruptCheckpointError("a file ends inside of its header")
        record = FileRecord(path=file, size=source.size, framing_bytes=len(head), framing_digest=compute_digest(head))
        return record, bytes(head), parse_arrays(bytes(head), source.size)
