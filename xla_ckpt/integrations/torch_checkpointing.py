"""Storage backend for torch_checkpointing: durable files with checksums, in directories that are committed atomically.

``CheckpointManager.Config(storage_config=StorageConfig())`` replaces the package's storage for local file systems and
keeps its layout. (Interface: torch_checkpointing 0.1.1, `torch_checkpointing/storage/base_storage.py`.)

The package calls a storage for single files and one rename, but does not announce a save. Each file written below
``tmp_<name>`` therefore gets a record in that directory before its first byte. The record contains the run of the job
that writes the file and, once the file is durable, its checksums. The rename of ``tmp_<name>`` to ``<name>`` checks all
records: it fails if a file is incomplete, and removes files of an earlier run that was killed. The records are then
merged into one file of checksums.
"""

from __future__ import annotations

import io
import os
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch_checkpointing.storage import base_storage, filesystem

from xla_ckpt.core.manifest.manifest import FileRecord
from xla_ckpt.distributed.exchange import Exchange
from xla_ckpt.distributed.torch_store import STORE_TIMEOUT_SECONDS, get_torch_communicator
from xla_ckpt.errors import CheckpointError, UsageError, annotate_errors
from xla_ckpt.formats.digests import DIGESTS, read_digests
from xla_ckpt.formats.torch_checkpointing.verified_directory import StreamDigester, VerifiedDirectory
from xla_ckpt.integrations.unfinished import RECORDS_DIRECTORY, DraftFileRecord, finalize_draft, open_file_system
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import sync_or_undo
from xla_ckpt.storage.resolve import open_parent

logger = get_logger(__name__)


def _agree_on_run_name() -> str:
    """Return a name for this run of the job that is the same on all ranks.

    Raises:
        UsageError: There are other ranks, but no process group through which to agree on a name.
    """
    drawn = uuid.uuid4().hex
    if dist.is_available() and dist.is_initialized():
        return str(
            Exchange(get_torch_communicator(), "torch_checkpointing", STORE_TIMEOUT_SECONDS).publish_once("run", drawn)
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError(
            "the ranks of this job cannot agree on a name for this run",
            found=f"WORLD_SIZE={os.environ['WORLD_SIZE']}, and no process group",
            hint="Call torch.distributed.init_process_group() before StorageConfig(), or give run=, the same on all "
            "ranks, and another one each time that the job starts.",
        )
    return drawn


@dataclass
class StorageConfig(base_storage.StorageConfig):  # type: ignore[misc]  # torch_checkpointing is not type-checked
    """Factory for `DurableStorage`, used in the process that saves and in its subprocesses.

    Raises (on construction):
        UsageError: The ranks of the job cannot agree on `run`.
    """

    temp_dir_prefix: str = "tmp_"
    """Prefix of unfinished directories, as in the package's `CheckpointWriterConfig`."""

    run: str = field(default_factory=_agree_on_run_name)
    """Name of this run of the job: the same on all ranks, and different each time that the job starts."""

    def create_storage(self) -> DurableStorage:
        return DurableStorage(self)


class DurableStorage(filesystem.LocalFileSystemStorage):  # type: ignore[misc]  # not type-checked
    """Local file storage with checksums: files are durable when their streams are closed, and verified on every read.

    The rename of ``tmp_<name>`` commits a directory if this run has completely written each file in it.

    Raises:
        OSError: A file system operation failed.
        CorruptCheckpointError: From reads: the data does not match its checksums.
        SaveError: From the rename: a file is incomplete, or was written without this storage. Nothing is committed.
        NotDurableError: From the rename: the new name could not be made durable, and the rename could not be undone.
    """

    def __init__(self, config: StorageConfig) -> None:
        super().__init__(filesystem.LocalFileSystemStorageConfig(use_direct_io=False))
        self._config = config
        self._last_read: tuple[Any, Mapping[str, FileRecord]] = None, {}
        """Directory of the file read last, with its checksums, because most loads read a single directory."""

    def stream_read(self, path: Path, read_args: base_storage.ReadArgs | None = None) -> io.RawIOBase:
        """Open a file for reading. Files in committed directories are verified against their checksums."""
        reader = self._open_verified(Path(path))
        if reader is None:
            return super().stream_read(path, read_args)  # type: ignore[no-any-return]
        if read_args is not None and not read_args.pre_read_full_file:
            return reader
        with reader:
            return io.BytesIO(reader.readall())  # type: ignore[return-value]  # as the package's own storage does

    def stream_write(self, path: Path) -> io.RawIOBase:
        """Open a file for writing. It is complete and durable when the stream is closed.

        It stays incomplete if a ``with`` block fails or the stream is never closed.
        """
        path = Path(path)
        if not path.parent.is_dir():
            raise RuntimeError(f"there is no directory {path.parent}")  # as the package's own storage does
        record = self._find_record(path)
        if record is not None:
            record.write(None)
        return _Writer(path.open("wb", buffering=0), record)

    def write(self, path: Path, data: Any) -> None:
        """Write a complete file durably."""
        with self.stream_write(path) as stream:
            stream.write(data)

    def delete(self, path: Path) -> None:
        """Remove a file and its record."""
        super().delete(path)
        if (record := self._find_record(Path(path))) is not None:
            record.remove()

    def rename(
        self, src_path: Path, dst_path: Path, is_directory: bool = False, background_cleanup: bool = False
    ) -> None:
        """Rename a file or a directory durably. The rename of an unfinished directory commits it (see the class)."""
        src, dst = Path(src_path), Path(dst_path)
        commits = src.parent == dst.parent and src.name == self._config.temp_dir_prefix + dst.name
        if commits and (src / RECORDS_DIRECTORY).is_dir() and not _is_occupied(dst):
            finalize_draft(src, self._config.run)
        moved = self._find_record(src) if src.is_file() else None
        super().rename(src, dst, is_directory, background_cleanup)
        if moved is not None:
            moved.move(self._find_record(dst))
        sync_or_undo(open_file_system(dst.parent), dst.name, lambda: dst.rename(src))
        if commits and (dst / RECORDS_DIRECTORY).is_dir():
            _remove_records(dst)

    def _find_record(self, path: Path) -> DraftFileRecord | None:
        """Return the record of a file below an unfinished directory; None for other files."""
        prefix = self._config.temp_dir_prefix
        draft = next((folder for folder in path.parents if folder.name.startswith(prefix)), None)
        return None if draft is None else DraftFileRecord(draft, path.relative_to(draft).as_posix(), self._config.run)

    def _open_verified(self, path: Path) -> _Reader | None:
        """Open a file of a directory with checksums for verified reading; return None for other files.

        Raises:
            CorruptCheckpointError: The checksums are damaged, or the size of the file differs.
        """
        folder = next((folder for folder in path.parents if (folder / DIGESTS).is_file()), None)
        if folder is None or not path.is_file():
            return None
        store, name = open_parent(folder)
        directory = store.open(name)
        try:
            with annotate_errors(path=str(folder)):
                about = (folder / DIGESTS).stat()
                version = (folder, about.st_ino, about.st_mtime_ns)
                if self._last_read[0] != version:
                    self._last_read = version, read_digests(directory)
                file, records = path.relative_to(folder).as_posix(), self._last_read[1]
                if file in records:
                    return _Reader(VerifiedDirectory(directory, records), str(folder), file)
        except BaseException:
            directory.close()
            raise
        directory.close()
        return None


def _is_occupied(path: Path) -> bool:
    """Return True if the path exists and a rename would not replace it."""
    return path.exists() and not (path.is_dir() and not any(path.iterdir()))


def _remove_records(committed: Path) -> None:
    """Remove the records that remain after a commit. Errors are ignored, because no reader uses the records."""
    try:
        shutil.rmtree(committed / RECORDS_DIRECTORY)
    except OSError as error:
        logger.warning("%s is committed; %s could not be removed from it: %s", committed, RECORDS_DIRECTORY, error)


class _Writer(io.RawIOBase):
    """Stream that computes checksums while it writes, and makes the file durable when it is closed."""

    def __init__(self, file: io.FileIO, record: DraftFileRecord | None) -> None:
        self._file = file
        self._digester = StreamDigester()
        self._record = record

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if not view.nbytes:
            return 0
        left = view.cast("B")
        self._digester.update(left)
        while len(left):
            left = left[self._file.write(left) :]
        return view.nbytes

    def close(self) -> None:
        if not self.closed:
            with self._file:
                os.fsync(self._file.fileno())
            if self._record is not None:
                self._record.write(self._digester.record(self._record.file))
        super().close()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not self.closed:
            with self._file:
                self._file.truncate(0)  # a full disk may be why it failed
            super().close()
        self.close()

    def __del__(self) -> None:
        self._file.close()  # the stream was not closed, so the file stays incomplete


class _Reader(io.RawIOBase):
    """Stream that verifies the data it reads against checksums."""

    def __init__(self, directory: VerifiedDirectory, root: str, file: str) -> None:
        self._directory = directory
        self._root = root
        self._source = directory.open(file)
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._source.size}[whence]
        if base + offset < 0:
            raise ValueError(f"a place before the begin of the file: {base + offset}")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        with memoryview(buffer).cast("B") as view:
            try:
                got = self._source.read_into(view, self._at)
            except CheckpointError as error:
                # The frames of its traceback keep views of the memory, which the package closes before it re-raises
                # the error.
                damage = error.with_traceback(None)
            else:
                self._at += got
                return got
        raise damage.at(path=self._root)

    def close(self) -> None:
        if not self.closed:
            self._source.close()
            self._directory.close()
        super().close()
