"""ZeRO-1 optimizer files of neuronx-distributed for another number of data-parallel ranks."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace

from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.progress import Progress
from xla_ckpt.engine.stream import stream_files
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import NoCheckpointError, UsageError, naming, storage_errors
from xla_ckpt.layouts.nxd import zero
from xla_ckpt.layouts.nxd.folders import OPTIM, FolderFiles
from xla_ckpt.layouts.nxd.tags import TAG_MARKS
from xla_ckpt.options import MAX_MEMORY
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.storage.door import PathLike, above, full_path, same_directory
from xla_ckpt.storage.pool import BUFFER_BYTES, READERS
from xla_ckpt.tags.root import Kind
from xla_ckpt.tags.roots import root_of
from xla_ckpt.tags.transaction import Transaction

_CARRIED = ("model", "scheduler.pt", "user_content.pt", *TAG_MARKS)
"""What a tag consists of besides its optimizer. The mark of a complete tag comes last."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
    (store, name), (target, target_name) = above(input_dir), above(output_dir)
    source_path, target_path = full_path(input_dir), full_path(output_dir)
    if dp_size is not None and dp_size < 1:
        raise UsageError("dp_size is a number of ranks", found=dp_size)
    if same_directory(store, name, target, target_name) or target.has(f"{target_name}/{OPTIM}"):
        raise UsageError("the output has an optimizer already", path=target_path, hint="Name a directory without one.")
    if target.has(target_name) and not target.is_directory(target_name):
        raise UsageError("the output is no directory", path=target_path)
    directory = _opened(store, name, source_path)
    try:
        with naming(path=source_path), storage_errors("converting", path=target_path, tag=name):
            optimizer = zero.scan_optimizer(FolderFiles(directory), name)
            if optimizer.full and dp_size is None:
                raise UsageError(
                    "these files hold the states of all data-parallel ranks already", hint="Give a dp_size."
                )
            files = optimizer.plans(dp_size)
            total = sum(f.data_bytes for f in files)
            reader = TagReader(directory, source_path, name, optimizer.manifest, ())
            fresh = not target.has(target_name)
            if not fresh:  # the optimizer's directory comes into the one that is there
                target, target_name = above(f"{target_path}/{OPTIM}")
                files = [replace(file, path=file.path.removeprefix(f"{OPTIM}/")) for file in files]
            with Transaction(root_of(target), target_name, Kind.NEW) as transaction:
                draft = transaction.directory
                try:
                    with Progress(f"convert {name}", total, progress) as bar:
                        stream_files(
                            reader, draft, files, Crew(workers=num_workers, progress=bar), max_memory=max_memory
                        )
                finally:
                    reader.close_files()
                if fresh:
                    for path in _carried(directory):
                        _copy(directory, draft, path)
                transaction.seal({})
                transaction.commit()
    finally:
        directory.close()
    return ZeroReport(path=target_path, files=len(files), nbytes=total, dp=dp_size)


def _opened(store: Store, name: str, path: str) -> Directory:
    with storage_errors("opening a tag", path=path):
        try:
            return store.open(root_of(store).place_of(name))
        except (FileNotFoundError, NotADirectoryError):
            raise NoCheckpointError("there is no such directory", path=path) from None


def _carried(directory: Directory) -> list[str]:
    """The files of a tag that its new version has, too: all but the optimizer's, and the marks last."""
    wanted = [path for path in directory.files() if path.split("/")[0] in _CARRIED]
    return sorted(wanted, key=lambda path: _CARRIED.index(path.split("/")[0]))


def _copy(source: Directory, target: Directory, path: str) -> None:
    """Copy a file durably."""
    with closing(source.open(path)) as file:
        sink = target.create(path, file.size)
        try:
            buffer = memoryview(bytearray(min(file.size, BUFFER_BYTES)))
            for at in range(0, file.size, BUFFER_BYTES):
                got = file.read_into(buffer[: min(BUFFER_BYTES, file.size - at)], at)
                sink.patch(buffer[:got], at)
            sink.commit()
        except BaseException:
            sink.abandon()
            raise
