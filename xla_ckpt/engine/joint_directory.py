"""The directory that one process of a job has made, and that all of them fill.

Each host may have a disk of its own under the same path. Then the files of the others are missing in the directory that
is committed, although every rank has written what it should.
"""

from __future__ import annotations

from collections.abc import Iterable

from xla_ckpt.errors import StorageError
from xla_ckpt.manifest.records import FileRecord
from xla_ckpt.storage.base import Directory
from xla_ckpt.storage.small_files import size_of
from xla_ckpt.tags.root import Root

ONE_DIRECTORY = "All hosts must see the same directory under the checkpoint path, such as a shared file system."
"""What to do about hosts that do not."""


def open_joint(root: Root, draft: str) -> Directory:
    """The directory that rank 0 made, which holds the lock on it.

    Raises:
        StorageError: This process does not see it.
    """
    try:
        return root.join(draft)
    except FileNotFoundError as error:
        raise StorageError.of(
            error, "opening the directory that rank 0 made", file=draft, hint=ONE_DIRECTORY
        ) from error


def check_written(directory: Directory, rank: int, files: Iterable[FileRecord]) -> None:
    """Check that what a rank has written is there.

    Raises:
        StorageError: A file is missing, or has another size.
    """
    for file in files:
        size = _size(directory, file.path)
        if size != file.size:
            raise StorageError(
                "what this rank has written is not in the directory that rank 0 made",
                rank=rank,
                file=file.path,
                expected=f"{file.size} bytes",
                found="no file" if size is None else f"{size} bytes",
                hint=ONE_DIRECTORY,
            )


def _size(directory: Directory, path: str) -> int | None:
    try:
        return size_of(directory, path)
    except FileNotFoundError:
        return None
