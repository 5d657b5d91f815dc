"""Exporting a model as Hugging Face safetensors. Our own tags need neither torch nor orbax."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from xla_ckpt import dtypes
from xla_ckpt.api.llama import (
    LlamaJob,
    described_model,
    formless_job,
    name_as_hugging_face,
    name_as_told,
)
from xla_ckpt.api.opened import (
    Knowledge,
    OpenState,
    check_file,
    check_split,
    check_whole_model,
    naming_other_tags,
    narrowed,
    opened,
    tell_divergent,
    without_rank_numbers,
)
from xla_ckpt.api.tags import chosen_tag, located
from xla_ckpt.dtypes import DType
from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.progress import Progress
from xla_ckpt.engine.stream import stream_files
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import SaveError, UsageError, naming, storage_errors
from xla_ckpt.keywords import taking_values
from xla_ckpt.layouts.base import Rewriting
from xla_ckpt.layouts.hugging_face import MAX_FILE_BYTES, model_files
from xla_ckpt.layouts.llama_config import CONFIG, with_dtype
from xla_ckpt.logs import get_logger
from xla_ckpt.options import ConvertOptions, chosen
from xla_ckpt.plan.row_order import is_grouped
from xla_ckpt.plan.stored_shardings import stored_sharding
from xla_ckpt.sharding.rules import Rules, parse_rules
from xla_ckpt.storage.door import PathLike, above, full_path
from xla_ckpt.tags.root import Kind
from xla_ckpt.tags.roots import root_of
from xla_ckpt.tags.transaction import Transaction
from xla_ckpt.tree import schema

FLOATING = ("bfloat16", "float16", "float32", "float64")
"""Element types that arrays are exported in, where they are not as they are stored."""

FILE_ENDING = ".safetensors"

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What an export wrote."""

    path: str
    tag: str
    files: tuple[str, ...]
    arrays: int
    nbytes: int
    """Bytes of the arrays."""

    seconds: float = 0.0


@taking_values(options=ConvertOptions, llama=LlamaJob)
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
    shardings: Rules | None = None,
    options: ConvertOptions | None = None,
) -> ExportReport:
    """Write the model of a checkpoint, whatever its topology, as Hugging Face safetensors: files and index.

    Every byte is verified on the way. The destination appears complete or not at all. Memory does not grow with the
    model: bytes go from file to file.

    With a `LlamaJob` the arrays of a Llama-like model get Hugging Face's names, shapes and order of heads, whatever
    neuronx-distributed fused: transformers loads the directory. Without one they keep the names that they have, but for
    checkpoints of optimum-neuron's, whose metadata say all that.

    Args:
        path: Root directory of the checkpoint; or a directory of Hugging Face's, for another `dtype`; or a file that
            torch.save wrote.
        destination: Directory to make; it must not exist, or be empty.
        tag: Which checkpoint; None takes the newest.
        part: Leaf path of what is exported, such as a module of the model (``"model/master"``); names are relative
            to it.
        max_shard_bytes: A further file is begun when one would grow beyond this.
        llama: A Llama-like model, and how the job had it. Its config.json is copied, and also says what `model` would.
        dtype: Element type of all floating-point arrays in the files, such as ``"bfloat16"``; by default as stored.
        model: For tags that another library wrote: what their files do not say, as for `convert`.
        shardings: Likewise: rules as in `save_checkpoint`.
        options: How the export goes about its work; by default those of `default_options`.

    Raises:
        NoCheckpointError: There is no such tag.
        CorruptCheckpointError: It is damaged. Nothing was written.
        IncompatibleCheckpointError: Nobody says how an array of another library's tag is split, or the model is not the
            one of its config.json.
        UsageError: The destination exists, or there is nothing to export.
        UnsupportedStateError: An array has an element type that safetensors has no name for.
        StorageError: The destination cannot be written.
        NotDurableError: The directory is there, and a loss of power may undo that.
    """
    began, options = time.monotonic(), chosen(ConvertOptions, options)
    cast, job = floating_type(dtype), formless_job(llama)
    store, named = located(path, tag)
    tag = chosen_tag(store, named)
    check_new_directory(destination)
    known, config = described_model(store, tag, job)
    about = Knowledge(rules=parse_rules(shardings), model=model, known=known)
    with (
        naming_other_tags(store, tag, named),
        opened(store, tag, about, part=part) as stored,
        naming(path=store.path, tag=tag),
    ):
        check_file(stored)
        tells_names = part == schema.MODEL
        reader, part = narrowed(without_rank_numbers(stored), part)
        check_split(reader, part)
        if part == schema.MODEL:
            check_whole_model(reader)
        tell_divergent(reader)
        reader, beside = name_as_told(store, reader) if tells_names else (reader, {})
        if known is not None:
            reader = name_as_hugging_face(reader, part, known, options)
            part = schema.MODEL
        elif not beside and any(is_grouped(stored_sharding(r)) for r in reader.manifest.arrays.values()):
            logger.warning(
                "tag %s: queries, keys and values stay fused, or as often as ranks held them, as in the training. "
                "transformers does not load that: give the model's config.json: llama=LlamaJob(config) (--config)",
                tag,
            )
        rewriting = model_files(OpenState(reader, trust=False), part=part, max_file_bytes=max_shard_bytes, dtype=cast)
        rewriting = with_files(rewriting, beside)
        rewriting = with_config(rewriting, reader, config)
        with Progress(f"export {tag}", rewriting.nbytes, options.progress) as bar:
            crew = Crew(workers=options.num_workers, progress=bar)
            write_directory(reader, destination, rewriting, crew, max_memory=options.max_memory)
    files = [file for rank in rewriting.files for file in rank]
    return ExportReport(
        path=full_path(destination),
        tag=tag,
        files=tuple(f.path for f in files),
        arrays=sum(len(f.entries) for f in files),
        nbytes=rewriting.nbytes,
        seconds=time.monotonic() - began,
    )


def floating_type(name: str | None) -> DType | None:
    """The element type that a caller names.

    Raises:
        UsageError: It is none that arrays are rounded to.
    """
    if name is not None and name not in FLOATING:
        raise UsageError("dtype= is no element type of exports", expected=", ".join(FLOATING), found=repr(name))
    return None if name is None else dtypes.dtype(name)


def with_files(rewriting: Rewriting, files: Mapping[str, bytes]) -> Rewriting:
    """The same files, and small ones beside them."""
    return replace(rewriting, marks={**rewriting.marks, **files})


def with_config(rewriting: Rewriting, reader: TagReader, content: Mapping[str, Any] | None) -> Rewriting:
    """The same files, and the config.json beside them, with the element type that the arrays have in them.

    Args:
        rewriting: The files.
        reader: What they are made of.
        content: What the configuration says; None makes no file.
    """
    if content is None:
        return rewriting
    entries = [entry for of_rank in rewriting.files for file in of_rank for entry in file.entries]
    types = [
        entry.cast or record.dtype for entry in entries if (record := reader.manifest.array(entry.leaf)) is not None
    ]
    floats = sorted((dtype for dtype in types if dtype.floating), key=lambda dtype: dtype.itemsize)
    # The widest: transformers gives all arrays this type, and none of them may lose anything.
    text = with_dtype(content, floats[-1].name if floats else None)
    return replace(rewriting, marks={**rewriting.marks, CONFIG: text})


def check_new_directory(destination: PathLike) -> None:
    """Refuse a destination of several files at which something lies, or which has the name of one of them.

    Raises:
        UsageError: It exists, and is not empty; or it is named as a file.
    """
    store, name = above(destination)
    if store.has(name) and (not store.is_directory(name) or store.names(name)):
        raise UsageError(
            "the destination of an export must not exist, or be empty",
            path=full_path(destination),
            hint="Name another one, or remove it first.",
        )
    if name.endswith(FILE_ENDING):
        raise UsageError(
            "the destination is a directory, and this is the name of a file",
            path=full_path(destination),
            hint=f"Name the directory: {full_path(destination).removesuffix(FILE_ENDING)}. The size of the model says "
            "how many files are in it.",
        )


def write_directory(
    reader: TagReader, destination: PathLike, rewriting: Rewriting, crew: Crew, *, max_memory: int
) -> None:
    """Write files that make no tag. The directory appears complete or not at all.

    Raises:
        CorruptCheckpointError: The tag is damaged. Nothing was written.
        StorageError: The destination cannot be written.
    """
    store, name = above(destination)
    target = full_path(destination)
    files = [file for rank in rewriting.files for file in rank]
    with (
        storage_errors("exporting", path=target, tag=reader.tag),
        Transaction(root_of(store), name, Kind.NEW) as transaction,
    ):
        directory = transaction.directory
        stream_files(reader, directory, files, crew, max_memory=max_memory)
        transaction.seal(rewriting.marks)
        transaction.commit()


def check_no_file(destination: PathLike) -> None:
    """Refuse a destination of a single file at which something lies: nothing is ever written over.

    Raises:
        UsageError: Something does.
    """
    store, name = above(destination)
    if store.is_directory(name):
        hint = f"Name a file in it: {full_path(destination).rstrip('/')}/state.pt"
        raise UsageError(
            "the destination is a single file, and there is a directory", path=store.path, file=name, hint=hint
        )
    if store.has(name):
        root_of(store).clean(name)  # a program was killed when it had given the file its name
        raise UsageError(
            "there is a file of this name already",
            path=store.path,
            file=name,
            hint="Name another one, or remove it first: nothing is written over.",
        )


def write_file(reader: TagReader, destination: PathLike, rewriting: Rewriting, crew: Crew, *, max_memory: int) -> None:
    """Write a single file. It appears complete or not at all, and is durable when this returns.

    Raises:
        UsageError: Something has its name.
        CorruptCheckpointError: The tag is damaged. Nothing was written.
        StorageError: The destination cannot be written.
    """
    (plan,) = (file for rank in rewriting.files for file in rank)
    store, name = above(destination)
    with (
        storage_errors("writing", path=full_path(destination), tag=reader.tag),
        Transaction(root_of(store), name, Kind.FILE) as transaction,
    ):
        file, directory = replace(plan, path=name), transaction.directory
        stream_files(reader, directory, [file], crew, max_memory=max_memory)
        transaction.seal({})
        try:
            transaction.commit()
        except SaveError:
            check_no_file(destination)  # somebody has put one there meanwhile
            raise
