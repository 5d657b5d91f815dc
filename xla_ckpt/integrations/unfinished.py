"""Files of a directory that is being written by several processes, of which nobody says when it begins.

Each file has a record beside it, from before its first byte on: which run of the job writes it, and, when it is
durable, its digests. When all is written, the records tell whether the directory is whole.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from xla_ckpt.errors import FormatError, SaveError
from xla_ckpt.layouts.digests import DIGESTS, dump_digests
from xla_ckpt.logs import get_logger
from xla_ckpt.manifest.manifest_json import file_json, parse_file
from xla_ckpt.manifest.records import FileRecord
from xla_ckpt.storage.base import FileSystem
from xla_ckpt.storage.door import above, store_at
from xla_ckpt.storage.small_files import write_small

logger = get_logger(__name__)

RECORDS = ".xla_ckpt"
"""The directory of the records, in the one that is being written."""


@dataclass(frozen=True, slots=True)
class FileInDraft:
    """What is known of a file of an unfinished directory."""

    draft: Path
    file: str
    """The path of the file, relative to the directory."""

    run: str
    """The run that asks."""

    @property
    def _place(self) -> Path:
        return self.draft / RECORDS / f"{self.file}.json"

    def write(self, record: FileRecord | None) -> None:
        """Say that this run writes the file, and its digests once it is whole."""
        self._place.parent.mkdir(parents=True, exist_ok=True)
        self._place.write_text(json.dumps({"run": self.run, "file": None if record is None else file_json(record)}))

    def read(self) -> tuple[str, FileRecord | None]:
        """Which run has written the file, and its digests if it is whole. A loss of power may have torn the record."""
        try:
            about = json.loads(self._place.read_text())
            return about["run"], None if about["file"] is None else parse_file(about["file"])
        except (ValueError, LookupError, TypeError, FormatError):
            return "", None

    def remove(self) -> None:
        """Forget the file."""
        self._place.unlink(missing_ok=True)

    def move(self, other: FileInDraft | None) -> None:
        """The file has another name now, perhaps outside of the directory."""
        _, record = self.read()
        if other is not None:
            other.write(None if record is None else replace(record, path=other.file))
        self.remove()


def _files_in(draft: Path, run: str) -> list[FileInDraft]:
    """The records of an unfinished directory."""
    folder = draft / RECORDS
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.json"))
    return [FileInDraft(draft, name.removesuffix(".json"), run) for name in names]


def seal_draft(draft: Path, run: str) -> None:
    """Make an unfinished directory complete and durable: after this it needs nothing but its name.

    Raises:
        SaveError: A file was not written to its end, or past this storage.
    """
    finished = {about.file: record for about in _files_in(draft, run) if (record := _finished(about)) is not None}
    written = {*finished, DIGESTS}
    present = [path.relative_to(draft) for path in draft.rglob("*") if path.is_file()]
    for path in present:
        if path.parts[0] != RECORDS and path.as_posix() not in written:
            raise SaveError(
                "a file was written past this storage, so that nobody knows whether it is whole: nothing is committed",
                path=str(draft),
                file=path.as_posix(),
                hint="A callback writes files with args.storage. If another program has left this one, remove it.",
            )
    (draft / DIGESTS).unlink(missing_ok=True)  # that of a commit that was killed
    store, name = above(draft)
    with contextlib.closing(store.open(name, lock=False)) as directory:
        write_small(directory, DIGESTS, dump_digests(list(finished.values())))
    for folder in (draft, *(path for path in draft.rglob("*") if path.is_dir())):
        file_system_at(folder).sync()


def _finished(about: FileInDraft) -> FileRecord | None:
    """The digests of a file that this run has written; None if an earlier run has, whose file is removed.

    Raises:
        SaveError: The file is not whole.
    """
    path, (run, record) = about.draft / about.file, about.read()
    if run != about.run:
        logger.warning("%s: removed %s, which an earlier run of the job has left", about.draft, about.file)
        path.unlink(missing_ok=True)
        about.remove()
        return None
    size = path.stat().st_size if path.is_file() else None
    if record is None or record.size != size:
        raise SaveError(
            "a rank has not written a file to its end: nothing is committed",
            path=str(about.draft),
            file=about.file,
            expected="a whole file" if record is None else f"{record.size} bytes",
            found="no file" if size is None else f"{size} bytes",
            hint="The rank that writes it has raised an error, or was killed. Save again.",
        )
    return record


def file_system_at(path: Path) -> FileSystem:
    """The names in a local directory."""
    store = store_at(path).file_system
    assert store is not None, "a Path is no address of a bucket"
    return store
