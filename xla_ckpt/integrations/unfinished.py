"""Per-file records in a directory that several processes write, without a call that starts the save.

A record is written next to each file before its first byte. It contains the run of the job that writes the file and,
once the file is durable, its checksums. When all files are written, the records show if the directory is complete.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from xla_ckpt.core.manifest.manifest import FileRecord
from xla_ckpt.core.manifest.manifest_json import dump_file_record, parse_file_record
from xla_ckpt.errors import FormatError, SaveError
from xla_ckpt.formats.digests import DIGESTS, dump_digests
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import FileSystem, write_file
from xla_ckpt.storage.resolve import open_parent, open_store

logger = get_logger(__name__)

RECORDS_DIRECTORY = ".xla_ckpt"
"""Name of the directory of records, inside the directory being written."""


@dataclass(frozen=True, slots=True)
class DraftFileRecord:
    """Record of one file in an unfinished directory."""

    draft: Path
    file: str
    """Path of the file, relative to the directory."""

    run: str
    """Name of the current run."""

    @property
    def _record_path(self) -> Path:
        return self.draft / RECORDS_DIRECTORY / f"{self.file}.json"

    def write(self, record: FileRecord | None) -> None:
        """Record that this run writes the file, with its checksums once it is complete."""
        self._record_path.parent.mkdir(parents=True, exist_ok=True)
        self._record_path.write_text(
            json.dumps({"run": self.run, "file": None if record is None else dump_file_record(record)})
        )

    def read(self) -> tuple[str, FileRecord | None]:
        """Return the run that has written the file, and its checksums if it is complete.

        A power loss may have truncated the record.
        """
        try:
            about = json.loads(self._record_path.read_text())
            return about["run"], None if about["file"] is None else parse_file_record(about["file"])
        except (ValueError, LookupError, TypeError, FormatError):
            return "", None

    def remove(self) -> None:
        """Remove the record."""
        self._record_path.unlink(missing_ok=True)

    def move(self, other: DraftFileRecord | None) -> None:
        """Move the record after its file was renamed, possibly to a path outside of the directory."""
        _, record = self.read()
        if other is not None:
            other.write(None if record is None else replace(record, path=other.file))
        self.remove()


def _list_records(draft: Path, run: str) -> list[DraftFileRecord]:
    """Return the records of an unfinished directory."""
    folder = draft / RECORDS_DIRECTORY
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.json"))
    return [DraftFileRecord(draft, name.removesuffix(".json"), run) for name in names]


def finalize_draft(draft: Path, run: str) -> None:
    """Make an unfinished directory complete and durable, ready for its rename.

    Raises:
        SaveError: A file is incomplete, or was written without this storage.
    """
    finished = {
        about.file: record for about in _list_records(draft, run) if (record := _check_finished(about)) is not None
    }
    written = {*finished, DIGESTS}
    present = [path.relative_to(draft) for path in draft.rglob("*") if path.is_file()]
    for path in present:
        if path.parts[0] != RECORDS_DIRECTORY and path.as_posix() not in written:
            raise SaveError(
                "a file was written past this storage, so that nobody knows whether it is whole: nothing is committed",
                path=str(draft),
                file=path.as_posix(),
                hint="A callback writes files with args.storage. If another program has left this one, remove it.",
            )
    (draft / DIGESTS).unlink(missing_ok=True)  # of a commit that was killed
    store, name = open_parent(draft)
    with contextlib.closing(store.open(name, lock=False)) as directory:
        write_file(directory, DIGESTS, dump_digests(list(finished.values())))
    for folder in (draft, *(path for path in draft.rglob("*") if path.is_dir())):
        open_file_system(folder).sync()


def _check_finished(draft_file: DraftFileRecord) -> FileRecord | None:
    """Return the checksums of a file that this run has written. Remove a file of an earlier run, and return None.

    Raises:
        SaveError: The file is incomplete.
    """
    path, (run, record) = draft_file.draft / draft_file.file, draft_file.read()
    if run != draft_file.run:
        logger.warning("%s: removed %s, which an earlier run of the job has left", draft_file.draft, draft_file.file)
        path.unlink(missing_ok=True)
        draft_file.remove()
        return None
    size = path.stat().st_size if path.is_file() else None
    if record is None or record.size != size:
        raise SaveError(
            "a rank has not written a file to its end: nothing is committed",
            path=str(draft_file.draft),
            file=draft_file.file,
            expected="a whole file" if record is None else f"{record.size} bytes",
            found="no file" if size is None else f"{size} bytes",
            hint="The rank that writes it has raised an error, or was killed. Save again.",
        )
    return record


def open_file_system(path: Path) -> FileSystem:
    """Return the file system of a local directory."""
    store = open_store(path).file_system
    assert store is not None, "a Path is no address of a bucket"
    return store
