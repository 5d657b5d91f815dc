"""Exporting a model as Hugging Face safetensors. Our own tags need neither torch nor orbax."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import Any

from xla_ckpt.api.paths import PathLike, directory_at
from xla_ckpt.api.progress import Progress
from xla_ckpt.api.tags import chosen_tag
from xla_ckpt.engine.read import READERS
from xla_ckpt.engine.stream import MAX_MEMORY, stream_files
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import CheckpointError, StorageError, UsageError
from xla_ckpt.layouts.tags_of_all import opened
from xla_ckpt.plan.export_plan import INDEX, index, plan_export
from xla_ckpt.sharding.rules import Rules, parse_rules
from xla_ckpt.storage.local import LocalDirectory, sync_directory, write_small
from xla_ckpt.tree import path as paths
from xla_ckpt.tree.skeleton import array_paths

MAX_SHARD_BYTES = 5_000_000_000
"""Largest file of an export, unless a single array is larger: Hugging Face's own default."""


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export wrote."""

    path: str
    tag: str
    files: tuple[str, ...]
    arrays: int
    nbytes: int
    """Bytes of the arrays."""


def export_hf(
    path: PathLike,
    destination: PathLike,
    tag: str | None = None,
    *,
    part: str = "model",
    max_shard_bytes: int = MAX_SHARD_BYTES,
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
        model: For tags that neuronx-distributed wrote: what they do not say, as for `convert`.
        shardings: Likewise: rules as in `save_checkpoint`.
        max_memory: Bytes of array data in memory at a time.
        progress: Show a progress bar: True, False, or None for only if it takes long, on a terminal.
        num_workers: Threads that read, at most.

    Raises:
        NoCheckpointError: There is no such tag.
        CorruptCheckpointError: It is damaged. Nothing was written.
        IncompatibleCheckpointError: Nobody says how a tag of neuronx-distributed's is split.
        UsageError: The destination exists, or there is nothing to export.
        UnsupportedStateError: An array has an element type that safetensors has no name for.
        StorageError: The destination cannot be written.
    """
    root, target = directory_at(path), directory_at(destination)
    tag = chosen_tag(root, tag)
    with opened(root, tag, parse_rules(shardings), model, part=part) as reader:
        return export(reader, target, part, max_shard_bytes, max_memory, num_workers, progress)


def export(
    reader: TagReader, target: str, part: str, max_shard_bytes: int, max_memory: int, workers: int, progress: Any = None
) -> ExportReport:
    """As `export_hf`, of an open tag."""
    if os.path.lexists(target) and (not os.path.isdir(target) or os.listdir(target)):
        raise UsageError("the destination of an export must not exist, or be empty", path=target)
    partial = target + ".partial"
    try:
        for leaf in array_paths(reader.manifest.skeleton, ""):
            if paths.is_under(leaf, part):
                reader.manifest.array(leaf)  # raises where nobody says how it is split
        files = plan_export(reader.manifest, part, max_shard_bytes)
        total = sum(f.data_bytes for f in files)
        shutil.rmtree(partial, ignore_errors=True)
        os.makedirs(partial)
        directory = LocalDirectory(partial)
        try:
            with Progress(f"export {reader.tag}", total, progress) as bar:
                stream_files(reader, directory, files, max_memory=max_memory, workers=workers, progress=bar)
            if len(files) > 1:
                write_small(directory, INDEX, index(files))
            directory.sync()
        finally:
            directory.close()
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.rename(partial, target)
        sync_directory(os.path.dirname(target))
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, CheckpointError):
            raise
        raise StorageError.of(error, "exporting", path=target, tag=reader.tag) from error
    except CheckpointError as error:
        shutil.rmtree(partial, ignore_errors=True)
        error.at(path=reader.root, tag=reader.tag)
        raise
    names = tuple(f.path for f in files)
    return ExportReport(target, reader.tag, names, sum(len(f.entries) for f in files), total)
