"""Listing and verifying tags. Needs neither torch nor orbax."""

from __future__ import annotations

import os

from xla_ckpt.api.foreign import find, tag_names
from xla_ckpt.engine.read import READERS
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.engine.verify import VerifyReport, verify_tag
from xla_ckpt.errors import CorruptCheckpointError, UsageError
from xla_ckpt.tags.directory import no_such_tag, open_tag

PathLike = str | os.PathLike[str]


def list_tags(path: PathLike) -> list[str]:
    """Names of the committed tags in `path`, oldest commit first (by commit sequence, never by time stamps).

    Complete tags that neuronx-distributed wrote there come before them, in its own order: by time stamps.

    Raises:
        StorageError: The directory cannot be read. (One that does not exist has no tags.)
    """
    return tag_names(os.path.abspath(os.fspath(path)))


def latest_tag(path: PathLike) -> str | None:
    """The newest committed tag in `path`; None when there is none."""
    tags = list_tags(path)
    return tags[-1] if tags else None


def has_checkpoint(path: PathLike) -> bool:
    """Whether `path` holds a committed tag."""
    return bool(list_tags(path))


def verify(path: PathLike, tag: str | None = None, *, num_workers: int = READERS) -> VerifyReport:
    """Read a whole tag, the newest by default, and compare every byte with its digest.

    Returns:
        A report; `report.ok` is True if nothing is wrong, else `report.problems` says what, file by file.

    Raises:
        NoCheckpointError: There is no such tag.
        UnsupportedVersionError: A newer version of this library wrote it.
        UsageError: neuronx-distributed wrote it, which stores no digests.
    """
    root = os.path.abspath(os.fspath(path))
    tag = latest_tag(root) if tag is None else tag
    if tag is None:
        raise no_such_tag(root, None)
    if find(root, tag) is not None:
        raise UsageError("neuronx-distributed wrote this tag, without digests to verify it by", path=root, tag=tag)
    try:
        with TagReader(open_tag(root, tag), root, tag) as reader:
            return verify_tag(reader, workers=num_workers)
    except CorruptCheckpointError as error:
        return VerifyReport(root, tag, problems=[error])
