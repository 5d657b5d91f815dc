"""Exporting a model as Hugging Face safetensors. Needs neither torch nor orbax."""

from __future__ import annotations

import mmap
import os
import shutil
from dataclasses import dataclass

from xla_ckpt.api.tags import latest_tag
from xla_ckpt.engine.read import READERS, read_into
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import CheckpointError, StorageError, UsageError
from xla_ckpt.layout.box import Box
from xla_ckpt.plan.export_plan import INDEX, ExportFile, index, plan_export
from xla_ckpt.plan.restore_plan import Want, plan_restore
from xla_ckpt.storage.local import LocalDirectory, sync_directory, write_small
from xla_ckpt.tags.directory import no_such_tag, open_tag

PathLike = str | os.PathLike[str]

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
        num_workers: Threads that read, at most.

    Raises:
        NoCheckpointError: There is no such tag.
        CorruptCheckpointError: It is damaged. Nothing was written.
        UsageError: The destination exists, or there is nothing to export.
        UnsupportedStateError: An array has an element type that safetensors has no name for.
        StorageError: The destination cannot be written.
    """
    root, target = os.path.abspath(os.fspath(path)), os.path.abspath(os.fspath(destination))
    tag = latest_tag(root) if tag is None else tag
    if tag is None:
        raise no_such_tag(root, None)
    if os.path.lexists(target) and (not os.path.isdir(target) or os.listdir(target)):
        raise UsageError("the destination of an export must not exist, or be empty", path=target)
    partial = target + ".partial"
    with TagReader(open_tag(root, tag), root, tag) as reader:
        try:
            files = plan_export(reader.manifest, part, max_shard_bytes)
            shutil.rmtree(partial, ignore_errors=True)
            os.makedirs(partial)
            for file in files:
                _write(reader, file, os.path.join(partial, file.name), num_workers)
            _finish(partial, target, files)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, CheckpointError):
                raise
            raise StorageError.of(error, "exporting", path=target, tag=tag) from error
        except CheckpointError as error:
            shutil.rmtree(partial, ignore_errors=True)
            error.at(path=root, tag=tag)
            raise
    names = tuple(f.name for f in files)
    return ExportReport(target, tag, names, sum(len(f.arrays) for f in files), sum(f.nbytes for f in files))


def _write(reader: TagReader, file: ExportFile, path: str, workers: int) -> None:
    """Read whole arrays straight into a mapping of the file that they go to."""
    header = file.header
    size = len(header) + file.nbytes
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.posix_fallocate(fd, 0, size)  # a full disk is an error here, and a killed process in a mapping
        with mmap.mmap(fd, size) as mapping, memoryview(mapping) as memory:
            memory[: len(header)] = header
            slots, wants, at = [], [], len(header)
            for slot, array in enumerate(file.arrays):
                slots.append(memory[at : at + array.nbytes])
                wants.append(Want(array.leaf, Box.whole(array.shape), slot))
                at += array.nbytes
            try:
                read_into(reader, plan_restore(reader.manifest, wants), slots, workers=workers)
                mapping.flush()
            finally:
                for piece in slots:
                    piece.release()
        os.fsync(fd)
    finally:
        os.close(fd)


def _finish(partial: str, target: str, files: list[ExportFile]) -> None:
    directory = LocalDirectory(partial)
    try:
        if len(files) > 1:
            write_small(directory, INDEX, index(files))
        directory.sync()
    finally:
        directory.close()
    os.makedirs(os.path.dirname(target), exist_ok=True)
    os.rename(partial, target)
    sync_directory(os.path.dirname(target))
