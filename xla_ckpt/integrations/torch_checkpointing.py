"""A storage for torch_checkpointing's manager: files with digests, in directories that are committed durably.

``CheckpointManager.Config(storage_config=StorageConfig())`` takes the place of the package's own storage of local file
systems, and keeps its layout. (Interface: torch_checkpointing 0.1.1, `torch_checkpointing/storage/base_storage.py`.)

The package tells a storage of files and of one rename, and not of a save. So each file that is written below
``tmp_<name>`` has a record there, from before its first byte on: which run of the job writes it, and, when it is
durable, its digests. The rename of ``tmp_<name>`` to ``<name>`` looks at all records. If a file was not written to its
end, it is refused; files of an earlier run, which was killed, are removed. The records become one file of digests.
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
    """A name of this run of the job, which all of its ranks find.

    Raises:
        UsageError: There are other ranks, and no process group by which they could find the same one.
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
class StorageConfig(base_storage.StorageConfig):  # type: ignore[misc]  # torch_checkpointing is not looked into
    """Makes a `DurableStorage`, in the process that saves and in those that it starts.

    Raises (on construction):
        UsageError: The ranks of the job cannot agree on `run`.
    """

    temp_dir_prefix: str = "tmp_"
    """What the names of unfinished directories begin with, as in the package's `CheckpointWriterConfig`."""

    run: str = field(default_factory=_agree_on_run_name)
    """A name of this run of the job: the same on all ranks, and another one each time that the job starts."""

    def create_storage(self) -> DurableStorage:
        return DurableStorage(self)


class DurableStorage(filesystem.LocalFileSystemStorage):  # type: ignore[misc]  # likewise
    """Local files, each with digests, durable when its stream is closed, and compared whenever it is read.

    A directory is committed by the rename of ``tmp_<name>``, if each file in it was written to its end by this run.

    Raises:
        OSError: The file system refused.
        CorruptCheckpointError: From reads: a byte is not what was written.
        SaveError: From the rename: a file was not written to its end, or past this storage. Nothing is committed.
        NotDurableError: From the rename: the file system refused to make the new name durable, and to take it back.
    """

    def __init__(self, config: StorageConfig) -> None:
        super().__init__(filesystem.LocalFileSystemStorageConfig(use_direct_io=False))
        self._config = config
        self._last_read: tuple[Any, Mapping[str, FileRecord]] = None, {}
        """The directory of the last file that was read, and its digests: most loads read one directory."""

    def stream_read(self, path: Path, read_args: base_storage.ReadArgs | None = None) -> io.RawIOBase:
        """A file for reading. One of a committed directory is compared with its digests."""
        reader = self._open_verified(Path(path))
        if reader is None:
            return super().stream_read(path, read_args)  # type: ignore[no-any-return]
        if read_args is not None and not read_args.pre_read_full_file:
            return reader
        with reader:
            return io.BytesIO(reader.readall())  # type: ignore[return-value]  # as the package's own storage does

    def stream_write(self, path: Path) -> io.RawIOBase:
        """A file for writing: whole and durable when the stream is closed.

        Where a ``with`` block fails, or nobody closes it, it is not whole.
        """
        path = Path(path)
        if not path.parent.is_dir():
            raise RuntimeError(f"there is no directory {path.parent}")  # the package's own storage raises this, too
        record = self._find_record(path)
        if record is not None:
            record.write(None)
        return _Writer(path.open("wb", buffering=0), record)

    def write(self, path: Path, data: Any) -> None:
        """Write a whole file, durably."""
        with self.stream_write(path) as stream:
            stream.write(data)

    def delete(self, path: Path) -> None:
        """Remove a file, and its record."""
        super().delete(path)
        if (record := self._find_record(Path(path))) is not None:
            record.remove()

    def rename(
        self, src_path: Path, dst_path: Path, is_directory: bool = False, background_cleanup: bool = False
    ) -> None:
        """Give a file or a directory another name, durably. The class says what it does with an unfinished one."""
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
        """The record of a file below an unfinished directory; None of another one."""
        prefix = self._config.temp_dir_prefix
        draft = next((folder for folder in path.parents if folder.name.startswith(prefix)), None)
        return None if draft is None else DraftFileRecord(draft, path.relative_to(draft).as_posix(), self._config.run)

    def _open_verified(self, path: Path) -> _Reader | None:
        """A file of a directory with digests; None of another one.

        Raises:
            CorruptCheckpointError: The digests are damaged, or the file has another size.
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
    """Whether something is there that a rename does not replace."""
    return path.exists() and not (path.is_dir() and not any(path.iterdir()))


def _remove_records(committed: Path) -> None:
    """Remove what a commit leaves of its records. Nobody reads them; that they stay is no failure of the commit."""
    try:
        shutil.rmtree(committed / RECORDS_DIRECTORY)
    except OSError as error:
        logger.warning("%s is committed; %s could not be removed from it: %s", committed, RECORDS_DIRECTORY, error)


class _Writer(io.RawIOBase):
    """A file being written: digested as it comes, and durable once it is closed."""

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
        self._file.close()  # nobody has closed the stream: the file is not whole


class _Reader(io.RawIOBase):
    """A file being read, whose bytes are compared with their digests."""

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
                # Its frames have parts of the memory, which the package closes before it lets the error pass.
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
