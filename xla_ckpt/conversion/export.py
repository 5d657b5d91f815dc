"""Export a model as Hugging Face safetensors. For tags of this library, neither torch nor orbax is needed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from xla_ckpt.conversion.llama.config import CONFIG_FILE, encode_config
from xla_ckpt.conversion.llama.job import (
    LlamaJob,
    find_model_info,
    rename_from_metadata,
    rename_to_hugging_face,
    resolve_job_without_form,
)
from xla_ckpt.conversion.source import (
    ProgramInfo,
    SourceState,
    check_file,
    check_split,
    check_whole_model,
    narrow_to_part,
    open_source,
    remove_rank_numbers,
    suggest_other_tags,
    warn_divergent,
)
from xla_ckpt.conversion.stream import stream_files
from xla_ckpt.core import dtypes
from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.plan.stored_sharding import get_stored_sharding, has_fused_sections
from xla_ckpt.core.sharding.sharding import ShardingRules, parse_rules
from xla_ckpt.core.tree import schema
from xla_ckpt.errors import SaveError, UsageError, annotate_errors, wrap_os_errors
from xla_ckpt.formats.base import ConversionPlan
from xla_ckpt.formats.hugging_face.layout import MAX_FILE_BYTES, plan_model_files
from xla_ckpt.inspection.tags import choose_tag, locate_checkpoint
from xla_ckpt.keywords import check_arguments_and_fields
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.logs import get_logger
from xla_ckpt.options import ConvertOptions, resolve_options
from xla_ckpt.progress import IoContext, ProgressBar
from xla_ckpt.storage.resolve import PathLike, normalize_path, open_parent
from xla_ckpt.tags.resolve import open_root
from xla_ckpt.tags.root import Transaction, TransactionKind

FLOATING_DTYPES = ("bfloat16", "float16", "float32", "float64")
"""Dtypes that floating-point arrays can be exported in, if not in their stored dtype."""

FILE_SUFFIX = ".safetensors"

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """Result of an export."""

    path: str
    tag: str
    files: tuple[str, ...]
    arrays: int
    nbytes: int
    """Bytes of the arrays."""

    seconds: float = 0.0


@check_arguments_and_fields(options=ConvertOptions, llama=LlamaJob)
def export_hf(
    path: PathLike,
    destination: PathLike,
    tag: str | None = None,
    *,
    part: str = schema.MODEL,
    max_shard_bytes: int = MAX_FILE_BYTES,
    llama: LlamaJob | None = None,
    dtype: str | None = None,
    model: Any = None,
    shardings: ShardingRules | None = None,
    options: ConvertOptions | None = None,
) -> ExportReport:
    """Write the model of a checkpoint of any topology as Hugging Face safetensors, with the index file.

    All bytes are verified while they are read. The export is atomic: the destination appears complete or not at all.
    Bytes are streamed from file to file, so memory does not grow with the model.

    With a `LlamaJob` the arrays of a Llama-like model get the Hugging Face names, shapes and head order, even if
    neuronx-distributed fused them, and transformers can load the directory. Otherwise arrays keep their names, except
    in optimum-neuron checkpoints, whose metadata contain this information.

    Args:
        path: Root directory of the checkpoint; or a Hugging Face directory, to change its `dtype`; or a file written by
            torch.save.
        destination: Directory to create; it must not exist, or be empty.
        tag: Tag to export; None selects the newest.
        part: Leaf path of the state to export, such as a module of the model (``"model/master"``); names are relative
            to it.
        max_shard_bytes: Maximum bytes per file. A new file is started when a file would exceed this.
        llama: Llama-like model and its form in the job. Its config.json is copied, and also replaces `model`.
        dtype: Dtype of all floating-point arrays in the files, such as ``"bfloat16"``; by default as stored.
        model: For tags of other libraries: information that their files do not contain, as for `convert`.
        shardings: As `model`: rules as in `save_checkpoint`.
        options: Options of the export; by default the `default_options`.

    Raises:
        NoCheckpointError: The tag does not exist.
        CorruptCheckpointError: The tag is corrupt. Nothing was written.
        IncompatibleCheckpointError: The sharding of an array in a tag of another library is unknown, or the model does
            not match its config.json.
        UsageError: The destination exists, or the part contains no arrays.
        UnsupportedStateError: An array has a dtype that safetensors does not support.
        StorageError: The destination cannot be written.
        NotDurableError: The directory exists, but may be lost in a power failure.
    """
    began, options = time.monotonic(), resolve_options(ConvertOptions, options)
    cast, job = parse_floating_dtype(dtype), resolve_job_without_form(llama)
    store, named = locate_checkpoint(path, tag)
    tag = choose_tag(store, named)
    check_new_directory(destination)
    known, config = find_model_info(store, tag, job)
    about = ProgramInfo(rules=parse_rules(shardings), model=model, llama=known)
    with (
        suggest_other_tags(store, tag, named),
        open_source(store, tag, about, part=part) as stored,
        annotate_errors(path=store.path, tag=tag),
    ):
        check_file(stored)
        is_model = part == schema.MODEL
        reader, part = narrow_to_part(remove_rank_numbers(stored), part)
        check_split(reader, part)
        if part == schema.MODEL:
            check_whole_model(reader)
        warn_divergent(reader)
        reader, beside = rename_from_metadata(store, reader) if is_model else (reader, {})
        if known is not None:
            reader = rename_to_hugging_face(reader, part, known, options)
            part = schema.MODEL
        elif not beside and any(has_fused_sections(get_stored_sharding(r)) for r in reader.manifest.arrays.values()):
            logger.warning(
                "tag %s: queries, keys and values stay fused, or as often as ranks held them, as in the training. "
                "transformers does not load that: give the model's config.json: llama=LlamaJob(config) (--config)",
                tag,
            )
        rewriting = plan_model_files(
            SourceState(reader, trust=False), part=part, max_file_bytes=max_shard_bytes, dtype=cast
        )
        rewriting = add_files(rewriting, beside)
        rewriting = add_config(rewriting, reader, config)
        with ProgressBar(f"export {tag}", rewriting.nbytes, options.progress) as bar:
            crew = IoContext(workers=options.num_workers, progress=bar)
            write_directory(reader, destination, rewriting, crew, max_memory=options.max_memory)
    files = [file for rank in rewriting.files for file in rank]
    return ExportReport(
        path=normalize_path(destination),
        tag=tag,
        files=tuple(f.path for f in files),
        arrays=sum(len(f.entries) for f in files),
        nbytes=rewriting.nbytes,
        seconds=time.monotonic() - began,
    )


def parse_floating_dtype(name: str | None) -> DType | None:
    """Return the dtype with this name; None for None.

    Raises:
        UsageError: Exports do not support this dtype.
    """
    if name is not None and name not in FLOATING_DTYPES:
        raise UsageError("dtype= is no element type of exports", expected=", ".join(FLOATING_DTYPES), found=repr(name))
    return None if name is None else dtypes.get_dtype(name)


def add_files(conversion: ConversionPlan, files: Mapping[str, bytes]) -> ConversionPlan:
    """Return the plan with additional small files."""
    return replace(conversion, marks={**conversion.marks, **files})


def add_config(conversion: ConversionPlan, reader: TagReader, content: Mapping[str, Any] | None) -> ConversionPlan:
    """Return the plan with an additional config.json that contains the dtype of the arrays in the files.

    Args:
        conversion: Plan of the files.
        reader: Source of the arrays.
        content: Content of the configuration; None adds no file.
    """
    if content is None:
        return conversion
    entries = [entry for of_rank in conversion.files for file in of_rank for entry in file.entries]
    types = [
        entry.cast or record.dtype
        for entry in entries
        if (record := reader.manifest.find_array(entry.leaf)) is not None
    ]
    floats = sorted((dtype for dtype in types if dtype.is_floating), key=lambda dtype: dtype.itemsize)
    # The widest dtype: transformers casts all arrays to it, and no array may lose precision.
    text = encode_config(content, floats[-1].name if floats else None)
    return replace(conversion, marks={**conversion.marks, CONFIG_FILE: text})


def check_new_directory(destination: PathLike) -> None:
    """Check that a destination directory does not exist or is empty, and does not have the name of a safetensors file.

    Raises:
        UsageError: It exists and is not empty; or it has the name of a file.
    """
    store, name = open_parent(destination)
    if store.has(name) and (not store.is_directory(name) or store.list_names(name)):
        raise UsageError(
            "the destination of an export must not exist, or be empty",
            path=normalize_path(destination),
            hint="Name another one, or remove it first.",
        )
    if name.endswith(FILE_SUFFIX):
        raise UsageError(
            "the destination is a directory, and this is the name of a file",
            path=normalize_path(destination),
            hint=f"Name the directory: {normalize_path(destination).removesuffix(FILE_SUFFIX)}. The size of the model "
            "says how many files are in it.",
        )


def write_directory(
    reader: TagReader, destination: PathLike, conversion: ConversionPlan, io: IoContext, *, max_memory: int
) -> None:
    """Write files that do not form a tag. The directory is atomic: it appears complete or not at all.

    Raises:
        CorruptCheckpointError: The tag is corrupt. Nothing was written.
        StorageError: The destination cannot be written.
    """
    store, name = open_parent(destination)
    target = normalize_path(destination)
    files = [file for rank in conversion.files for file in rank]
    with (
        wrap_os_errors("exporting", path=target, tag=reader.tag),
        Transaction(open_root(store), name, TransactionKind.NEW_DIRECTORY) as transaction,
    ):
        directory = transaction.directory
        stream_files(reader, directory, files, io, max_memory=max_memory)
        transaction.seal(conversion.marks)
        transaction.commit()


def check_new_file(destination: PathLike) -> None:
    """Check that a destination file does not exist. Existing files are never overwritten.

    Raises:
        UsageError: A file or directory of this name exists.
    """
    store, name = open_parent(destination)
    if store.is_directory(name):
        hint = f"Name a file in it: {normalize_path(destination).rstrip('/')}/state.pt"
        raise UsageError(
            "the destination is a single file, and there is a directory", path=store.path, file=name, hint=hint
        )
    if store.has(name):
        open_root(store).clean(name)  # remove the leftovers of a program that was killed after it had renamed the file
        raise UsageError(
            "there is a file of this name already",
            path=store.path,
            file=name,
            hint="Name another one, or remove it first: nothing is written over.",
        )


def write_single_file(
    reader: TagReader, destination: PathLike, conversion: ConversionPlan, io: IoContext, *, max_memory: int
) -> None:
    """Write a single file atomically. It is durable when this returns.

    Raises:
        UsageError: The name is in use.
        CorruptCheckpointError: The tag is corrupt. Nothing was written.
        StorageError: The destination cannot be written.
    """
    (plan,) = (file for rank in conversion.files for file in rank)
    store, name = open_parent(destination)
    with (
        wrap_os_errors("writing", path=normalize_path(destination), tag=reader.tag),
        Transaction(open_root(store), name, TransactionKind.NEW_FILE) as transaction,
    ):
        file, directory = replace(plan, path=name), transaction.directory
        stream_files(reader, directory, [file], io, max_memory=max_memory)
        transaction.seal({})
        try:
            transaction.commit()
        except SaveError:
            check_new_file(destination)  # another process may have created one in the meantime
            raise
