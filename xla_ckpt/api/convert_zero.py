"""ZeRO-1 optimizer files of neuronx-distributed for another number of data-parallel ranks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass

from xla_ckpt.api.paths import PathLike, directory_at
from xla_ckpt.api.progress import Progress
from xla_ckpt.engine.read import READERS
from xla_ckpt.engine.stream import MAX_MEMORY, stream_files
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import CheckpointError, NoCheckpointError, StorageError, UsageError
from xla_ckpt.layouts.nxd import zero as nxd_zero
from xla_ckpt.layouts.nxd.rank_files import Scan
from xla_ckpt.storage.local import LocalDirectory, sync_directory, sync_files
from xla_ckpt.tags.names import NXD_MARKS

_CARRIED = ("model", "scheduler.pt", "user_content.pt", *NXD_MARKS)
"""What a tag consists of besides its optimizer; the mark of a complete one comes last."""


@dataclass(frozen=True, slots=True)
class ZeroReport:
    """What a conversion wrote."""

    path: str
    files: int
    nbytes: int
    dp: int | None
    """Data-parallel ranks that the files are for; None for files that hold the states of all of them."""


def convert_zero_checkpoints(
    input_dir: PathLike,
    output_dir: PathLike,
    dp_size: int | None = None,
    *,
    num_workers: int = READERS,
    max_memory: int = MAX_MEMORY,
    progress: bool | None = None,
) -> ZeroReport:
    """Write the ZeRO-1 optimizer of a tag of neuronx-distributed's for another number of data-parallel ranks.

    States, step counts and master weights all go along. If `output_dir` does not exist, the new directory is a whole
    tag, with copies of model, scheduler and user content. It, or its ``optim``, appears complete or not at all.

    Args:
        input_dir: Directory of the tag: ``optim`` lies in it.
        output_dir: Directory of the new tag; it must not have an ``optim``.
        dp_size: Data-parallel ranks of the new job; None writes ``full_*`` files, which hold the states of all ranks.
        num_workers: Threads that read, at most.
        max_memory: Bytes of array data in memory at a time.
        progress: Show a progress bar: True, False, or None for only if it takes long, on a terminal.

    Raises:
        NoCheckpointError: There is no such directory.
        UsageError: It holds no ZeRO-1 optimizer, or already in the form that is wanted; or the output exists.
        CorruptCheckpointError: Files are missing, damaged, or do not fit together.
        UnsupportedStateError: It is the optimizer of an expert-parallel job.
        StorageError: The output cannot be written.
    """
    source, target = directory_at(input_dir), directory_at(output_dir)
    if dp_size is not None and dp_size < 1:
        raise UsageError("dp_size is a number of ranks", found=dp_size)
    if os.path.realpath(source) == os.path.realpath(target) or os.path.lexists(os.path.join(target, "optim")):
        raise UsageError("the output has an optimizer already", path=target, hint="Name a directory without one.")
    tag = os.path.basename(source)
    try:
        directory = LocalDirectory(source)
    except (FileNotFoundError, NotADirectoryError):
        raise NoCheckpointError("there is no such directory", path=source) from None
    except OSError as error:
        raise StorageError.of(error, "opening a tag", path=source) from error
    try:
        found = nxd_zero.scan(Scan(directory), tag)
        if found.full and dp_size is None:
            raise UsageError("these files hold the states of all data-parallel ranks already", hint="Give a dp_size.")
        files = found.plans(dp_size)
        reader = TagReader(directory, source, tag, found.manifest)
        total = sum(f.data_bytes for f in files)
        with Progress(f"convert {tag}", total, progress) as bar:

            def fill(made: LocalDirectory) -> None:
                stream_files(reader, made, files, max_memory=max_memory, workers=num_workers, progress=bar)

            try:
                _appear(source, target, fill)
            finally:
                reader.close_files()
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise StorageError.of(error, "converting", path=target, tag=tag) from error
    except CheckpointError as error:
        error.at(path=source)
        raise
    finally:
        directory.close()
    return ZeroReport(target, len(files), total, dp_size)


def _appear(source: str, target: str, fill: Callable[[LocalDirectory], None]) -> None:
    """Make the tag, or the optimizer of a directory that is there, under another name, and rename it."""
    if os.path.lexists(target) and not os.path.isdir(target):
        raise UsageError("the output is no directory", path=target)
    fresh = not os.path.lexists(target)
    partial = f"{target}.partial" if fresh else os.path.join(target, "optim.partial")
    shutil.rmtree(partial, ignore_errors=True)
    os.makedirs(partial)
    try:
        made = LocalDirectory(partial)
        try:
            fill(made)
            made.sync()
        finally:
            made.close()
        if fresh:
            for name in _CARRIED:
                _copy(os.path.join(source, name), os.path.join(partial, name))
            sync_directory(partial)
            os.rename(partial, target)
            sync_directory(os.path.dirname(target))
        else:
            os.rename(os.path.join(partial, "optim"), os.path.join(target, "optim"))
            sync_directory(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _copy(source: str, target: str) -> None:
    """Copy a file, or all files of a directory, durably; nothing if it is not there."""
    if os.path.isdir(source):
        os.mkdir(target)
        for name in sorted(os.listdir(source)):
            _copy(os.path.join(source, name), os.path.join(target, name))
        sync_directory(target)
    elif os.path.exists(source):
        shutil.copyfile(source, target)
        sync_files(os.path.dirname(target), [os.path.basename(target)])
