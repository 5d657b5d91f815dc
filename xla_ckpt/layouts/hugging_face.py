"""Hugging Face's layout: the model alone, as safetensors files and an index, for other programs to load."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import closing

from xla_ckpt.dtypes import DType
from xla_ckpt.engine.tag_reader import DAMAGED, TagReader
from xla_ckpt.engine.verify import VerifyReport
from xla_ckpt.errors import CorruptCheckpointError, FormatError, UsageError, naming
from xla_ckpt.files.safetensors import PlainTensor, header_bytes, plain_tensors, told_offsets
from xla_ckpt.layouts.base import Layout, ModelNames, Rewriting, StoredState, Topology
from xla_ckpt.layouts.saved_files import SavedFiles
from xla_ckpt.layouts.scanned import directory_to_scan, flattened_model, scanned_manifest
from xla_ckpt.manifest.arrays import ArrayRecord, array_record
from xla_ckpt.manifest.digest import digest
from xla_ckpt.manifest.records import FileRecord, Manifest, UnknownArray
from xla_ckpt.manifest.shards import Shard
from xla_ckpt.plan.export_plan import SINGLE, WEIGHT_INDEX, index, plan_export
from xla_ckpt.plan.hints import Hints
from xla_ckpt.sharding.box import Box
from xla_ckpt.storage.base import Directory, ReadDirectory, Store
from xla_ckpt.storage.pool import READERS
from xla_ckpt.storage.small_files import read_whole
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tree import schema
from xla_ckpt.tree.json_object import json_object

SUFFIX = ".safetensors"

ADAPTER_ARRAYS = "adapter_model.safetensors"
"""PEFT's only file of arrays."""

_SHARD = re.compile(r"(?!shard-).+-\d{5}-of-(?!00001)(\d{5})\.safetensors")
"""Name of one of several files of a model, which their index names all; DCP's own shards begin with another word."""

MAX_FILE_BYTES = 5_000_000_000
"""Largest file, unless a single array is larger: Hugging Face's own default."""

MAX_INDEX = 100_000_000
"""A larger index is not read (bytes)."""


class HuggingFace(Layout):
    """The model as Hugging Face safetensors. It is no tag: it has no manifest, and no optimizer.

    A directory of it that is named as a tag is opened, and so is a file of any other name that is a model by itself. No
    root lists them among its tags.
    """

    name = "safetensors"
    tagged = False
    holds = schema.MODEL
    model_names = ModelNames.HUGGING_FACE

    def find(self, store: Store, tag: str) -> TagEntry | None:
        if any(store.has(f"{tag}/{name}") for name in (SINGLE, WEIGHT_INDEX)):
            return TagEntry(tag=tag, directory=tag)
        if store.file_system is None:
            return None
        if store.is_directory(tag):  # shards without their index: who opens the directory is told what is missing
            return TagEntry(tag=tag, directory=tag) if any(map(_SHARD.fullmatch, store.names(tag))) else None
        if tag.endswith(SUFFIX) and store.has(tag):
            # Beside one of these it is a part of their model.
            belongs = any(store.has(name) for name in (SINGLE, WEIGHT_INDEX, ADAPTER_ARRAYS))
            return None if belongs else TagEntry(tag=tag, directory=tag, files=(tag,))
        return None

    def tag_of(self, entry: TagEntry) -> str:
        return entry.tag.removesuffix(SUFFIX) if entry.files else entry.tag

    def open(self, store: Store, entry: TagEntry, hints: Hints) -> TagReader:
        name = "" if entry.files else entry.directory
        with directory_to_scan(store, entry.tag, lambda: store.open(name, lock=False, links=True)) as directory:
            if not entry.files:
                return TagReader(directory, store.path, entry.tag, self.scanned(directory, entry.tag), ())
            if (shard := _SHARD.fullmatch(entry.tag)) is not None:
                raise _no_index(
                    f"{entry.tag} is one of {int(shard[1])} shards of a model, and {WEIGHT_INDEX} is missing"
                )
            (file,) = entry.files
            one = SavedFiles(directory, (file,))
            check_is_whole(one, file)
            arrays, files = scanned_model(one, file)
            manifest, _ = scanned_manifest(entry.tag, flattened_model(arrays), files)
            return TagReader(one, store.path, entry.tag, manifest, ())

    def scanned(self, directory: Directory, tag: str) -> Manifest:  # of derived classes another one
        """The manifest of such a directory. No array is read.

        Raises:
            CheckpointError: It is damaged.
        """
        arrays, files = scanned_model(directory)
        return scanned_manifest(tag, flattened_model(arrays), files)[0]

    def verify(self, store: Store, entry: TagEntry, workers: int = READERS) -> VerifyReport:
        report = super().verify(store, entry, workers)
        report.strangers = []  # whatever else lies there is the model's: its configuration, a tokenizer
        return report

    def rewriting(self, stored: StoredState, to: Topology) -> Rewriting:
        return model_files(stored, part=schema.MODEL, max_file_bytes=MAX_FILE_BYTES)


def _no_index(problem: str) -> CorruptCheckpointError:
    """The error for shards of a model without the index, which says which arrays are in each."""
    hint = "Restore the index, which says what each shard holds, and pass the directory."
    return CorruptCheckpointError(problem, file=WEIGHT_INDEX, hint=hint)


def model_files(stored: StoredState, *, part: str, max_file_bytes: int, dtype: DType | None = None) -> Rewriting:
    """The files of a part of a state, and their index where there are several.

    Args:
        max_file_bytes: A further file is begun when one would grow beyond this.
        dtype: The element type of all floating-point arrays in the files; None leaves each as it is.

    Raises:
        UsageError: There is nothing to export, or the size makes no sense.
        UnsupportedStateError: An array has an element type that safetensors has no name for.
    """
    files = plan_export(stored.manifest, part, max_file_bytes, dtype)
    return Rewriting([tuple(files)], marks={WEIGHT_INDEX: index(files)} if len(files) > 1 else {})


def check_is_whole(directory: ReadDirectory, file: str) -> None:
    """Refuse a file that says of its arrays that they are parts of others: one of a tag, or of DCP's.

    Raises:
        CorruptCheckpointError: It is damaged.
        UsageError: It says so.
    """
    _, head, _ = scanned_file(directory, file)
    if told_offsets(head):
        raise UsageError(
            "this file of safetensors has parts of the arrays of a checkpoint",
            file=file,
            hint="Pass the directory of the checkpoint to which it belongs.",
        )


def scanned_model(
    directory: ReadDirectory, single: str = SINGLE
) -> tuple[dict[str, ArrayRecord | UnknownArray], list[FileRecord]]:
    """The arrays in a directory of Hugging Face's by name, and its files. No array is read.

    Args:
        single: Name of the only file, where there is no index.

    Raises:
        CorruptCheckpointError: A file is missing or damaged, or the index is not true of the files.
    """
    arrays: dict[str, ArrayRecord] = {}
    unknown: dict[str, UnknownArray] = {}
    files: list[FileRecord] = []
    for number, (file, wanted) in enumerate(_files_of(directory, single).items()):
        record, _, tensors = scanned_file(directory, file)
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
                unknown[tensor.name] = of_unknown_type(tensor)
                continue
            shards = [Shard(Box.whole(tensor.shape), number, tensor.offset)]
            arrays[tensor.name] = array_record(tensor.dtype, tensor.shape, shards)
    return arrays | quantized(arrays) | unknown, files


def of_unknown_type(tensor: PlainTensor) -> UnknownArray:
    """What stands for an array whose element type is not known here. The others of its file are read."""
    return UnknownArray(
        problem="an array of a safetensors file has elements that cannot be read here",
        found=f"{tensor.code} of shape {list(tensor.shape)}",
        hint="Load the others without it, or load it with the program that wrote it and save it there as elements of "
        "whole bytes.",
        shape=tensor.shape,
        tensors=1,
    )


_SCALES = "_scale_inv"


def quantized(arrays: Mapping[str, ArrayRecord]) -> dict[str, UnknownArray]:
    """Of some arrays by name those that mean nothing by themselves: blocks of float8, whose scales are beside them."""
    return {
        name: UnknownArray(
            problem=f"this weight is quantized: its values are the products of {record.dtype.name} and of the blocks "
            f"of {name}{_SCALES}",
            hint="Load it with torch's QuantizedHuggingFaceStorageReader, and save what comes of it.",
            dtype=record.dtype,
            shape=record.shape,
            tensors=1,
        )
        for name, record in arrays.items()
        if record.dtype.name.startswith("float8") and name + _SCALES in arrays
    }


def _files_of(directory: ReadDirectory, single: str) -> Mapping[str, set[str] | None]:
    """Name of each file -> the arrays that the index says are in it; None where there is no index.

    Raises:
        CorruptCheckpointError: There is neither the single file nor the index.
        FormatError: The index is broken, or names a file outside of the directory.
    """
    there = directory.files()
    if single in there:
        return {single: None}
    if WEIGHT_INDEX not in there:
        raise _no_index("the index of a model in shards is missing")
    with naming(file=WEIGHT_INDEX):
        data = read_whole(directory, WEIGHT_INDEX, limit=MAX_INDEX, what="the index")
        places = json_object(data, "the index").get("weight_map")
        if not isinstance(places, dict) or not places:
            raise FormatError("the index has no weight_map")
        names_by_file: dict[str, set[str] | None] = {}
        for name, file in places.items():
            if type(file) is not str or "/" in file or "\\" in file or not file.endswith(SUFFIX):
                raise FormatError("the index names a file that is not one beside it", leaf=name, found=str(file)[:80])
            names = names_by_file.setdefault(file, set())
            assert names is not None
            names.add(name)
        return dict(sorted(names_by_file.items()))


def scanned_file(directory: ReadDirectory, file: str) -> tuple[FileRecord, bytes, list[PlainTensor]]:
    """A file of safetensors: its record, its header, and what it holds.

    Raises:
        CorruptCheckpointError: It is missing or damaged.
    """
    try:
        source = directory.open(file)
    except FileNotFoundError:
        raise CorruptCheckpointError("a file of the index is missing", file=file, hint=DAMAGED) from None
    with closing(source), naming(file=file, hint=DAMAGED):
        start = bytearray(min(8, source.size))
        got = source.read_into(memoryview(start), 0)
        head = bytearray(header_bytes(bytes(start[:got]), source.size))
        if source.read_into(memoryview(head), 0) < len(head):
            raise CorruptCheckpointError("a file ends inside of its header")
        record = FileRecord(path=file, size=source.size, head=len(head), digest=digest(head))
        return record, bytes(head), plain_tensors(bytes(head), source.size)
