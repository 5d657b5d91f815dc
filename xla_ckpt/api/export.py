"""Exporting a model as Hugging Face safetensors. Our own tags need neither torch nor orbax."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xla_ckpt.api.opened import OpenState, check_split, opened, tell_divergent
from xla_ckpt.api.tags import chosen_tag
from xla_ckpt.engine.progress import Progress
from xla_ckpt.engine.read import READERS
from xla_ckpt.engine.stream import MAX_MEMORY, partial_directory, stream_files
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import UsageError, naming, storage_errors
from xla_ckpt.layouts.base import Rewriting
from xla_ckpt.layouts.hugging_face import MAX_FILE_BYTES, model_files
from xla_ckpt.sharding.rules import Rules, parse_rules
from xla_ckpt.storage.base import rename_durably, write_small
from xla_ckpt.storage.door import PathLike, above, full_path, store_at
from xla_ckpt.tree import schema


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


def export_hf(
    path: PathLike,
    destination: PathLike,
    tag: str | None = None,
    *,
    part: str = schema.MODEL,
    max_shard_bytes: int = MAX_FILE_BYTES,
    model: Any = None,
    shardings: Rules | None = None,
    max_memory: int = MAX_MEMORY,
    progress: bool | None = None,
    num_workers: int = READERS,
) -> ExportReport:
    """Write the model of a checkpoint, whatever its topology, as Hugging Face safetensors: files and index.

    Every byte is verified on the way. The destination appears complete or not at all. Memory does not grow with the
    model: bytes go from file to file.

    Args:
        path: Root directory of the checkpoint.
        destination: Directory to make; it must not exist, or be empty.
        tag: Which checkpoint; None takes the newest.
        part: Leaf path of what is exported; names are relative to it.
        max_shard_bytes: A further file is begun when one would grow beyond this.
        model: For tags that another library wrote: what their files do not say, as for `convert`.
        shardings: Likewise: rules as in `save_checkpoint`.
        max_memory: Bytes of array data in memory at a time.
        progress: Show a progress bar: True, False, or None for only if it takes long, on a terminal.
        num_workers: Threads that read, at most.

    Raises:
        NoCheckpointError: There is no such tag.
        CorruptCheckpointError: It is damaged. Nothing was written.
        IncompatibleCheckpointError: Nobody says how an array of another library's tag is split.
        UsageError: The destination exists, or there is nothing to export.
        UnsupportedStateError: An array has an element type that safetensors has no name for.
        StorageError: The destination cannot be written.
    """
    began = time.monotonic()
    store = store_at(path)
    tag = chosen_tag(store, tag)
    with (
        opened(store, tag, parse_rules(shardings), model, part=part) as reader,
        naming(path=reader.root, tag=reader.tag),
    ):
        check_split(reader, part)
        tell_divergent(reader)
        made = model_files(OpenState(reader, trust=False), part=part, max_file_bytes=max_shard_bytes)
        with Progress(f"export {tag}", made.nbytes, progress) as bar:
            write_directory(reader, destination, made, max_memory=max_memory, workers=num_workers, progress=bar)
    files = [file for rank in made.files for file in rank]
    return ExportReport(
        path=full_path(destination),
        tag=tag,
        files=tuple(f.path for f in files),
        arrays=sum(len(f.entries) for f in files),
        nbytes=made.nbytes,
        seconds=time.monotonic() - began,
    )


def write_directory(
    reader: TagReader,
    destination: PathLike,
    made: Rewriting,
    *,
    max_memory: int,
    workers: int,
    progress: Callable[[int], None],
) -> None:
    """Write files that make no tag. The directory appears complete or not at all.

    Raises:
        UsageError: It exists, and is not empty.
        CorruptCheckpointError: The tag is damaged. Nothing was written.
        StorageError: The destination cannot be written.
    """
    store, name = above(destination)
    target, partial = full_path(destination), f"{name}.partial"
    if store.has(name) and (not store.is_directory(name) or store.names(name)):
        raise UsageError("the destination of an export must not exist, or be empty", path=target)
    files = [file for rank in made.files for file in rank]
    with storage_errors("exporting", path=target, tag=reader.tag):
        store.prepare()
        with partial_directory(store, partial) as directory:
            stream_files(reader, directory, files, max_memory=max_memory, workers=workers, progress=progress)
            for path, data in made.marks.items():
                write_small(directory, path, data)
            directory.sync()
            if store.has(name):
                store.remove(name)  # it is empty
            rename_durably(store, partial, name)
