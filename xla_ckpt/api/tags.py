"""Listing and verifying tags. Our own ones need neither torch nor orbax."""

from __future__ import annotations

from xla_ckpt.api.paths import PathLike, directory_at
from xla_ckpt.engine.read import READERS
from xla_ckpt.engine.verify import VerifyReport, verify_tag
from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.layouts.tags_of_all import find, ours, tag_names
from xla_ckpt.tags.directory import no_such_tag


def list_tags(path: PathLike) -> list[str]:
    """Names of the committed tags in `path`, oldest commit first (by commit sequence, never by time stamps).

    Complete tags that neuronx-distributed wrote there come before them, in its own order: by time stamps.

    Raises:
        StorageError: The directory cannot be read. (One that does not exist has no tags.)
    """
    return tag_names(directory_at(path))


def latest_tag(path: PathLike) -> str | None:
    """The newest committed tag in `path`; None when there is none."""
    tags = list_tags(path)
    return tags[-1] if tags else None


def chosen_tag(root: str, tag: str | None) -> str:
    """The tag that a caller names, or the newest.

    Raises:
        NoCheckpointError: None is named, and there is none.
    """
    found = latest_tag(root) if tag is None else tag
    if found is None:
        raise no_such_tag(root, None)
    return found


def has_checkpoint(path: PathLike) -> bool:
    """Whether `path` holds a committed tag."""
    return bool(list_tags(path))


def verify(path: PathLike, tag: str | None = None, *, num_workers: int = READERS) -> VerifyReport:
    """Read a whole tag, the newest by default, and compare every byte with its digest.

    Of a tag that neuronx-distributed wrote, which has no digests, the zips are compared with their own CRC-32, and the
    files and tensors of all ranks are looked for.

    Returns:
        A report; `report.ok` is True if nothing is wrong, else `report.problems` says what, file by file.

    Raises:
        NoCheckpointError: There is no such tag.
        UnsupportedVersionError: A newer version of this library wrote it.
    """
    root = directory_at(path)
    tag = chosen_tag(root, tag)
    if (theirs := find(root, tag)) is not None:
        from xla_ckpt.layouts.nxd.verify import verify_nxd
        from xla_ckpt.state.values import CODEC

        return verify_nxd(root, theirs, CODEC, num_workers)
    try:
        with ours(root, tag) as reader:
            return verify_tag(reader, workers=num_workers)
    except CorruptCheckpointError as error:
        return VerifyReport(root, tag, problems=[error])
