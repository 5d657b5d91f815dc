"""A root directory of tags, as readers see it. Neither orbax nor any framework is needed here.

A directory is a committed tag if it has a manifest and no temporary name. Order is the commit sequence that the
manifest's first line gives, never a time stamp. While a tag is replaced, its old version stands under another name
for an instant; readers find it there.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from dataclasses import dataclass

from xla_ckpt.errors import CheckpointError, CorruptCheckpointError, NoCheckpointError, StorageError
from xla_ckpt.manifest import manifest_json
from xla_ckpt.storage.local import LocalDirectory
from xla_ckpt.tags.names import NXD_MARKS, OLD_PREFIX, TMP_SUFFIX, check_tag, is_tag_name

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
COMMITTED = "commit_success.txt"
"""orbax's mark of a committed directory."""

UNLOCKED_AGE = 3600.0
"""Seconds without a change after which a directory counts as unused, where the file system has no locks.

A save that is alive writes, or waits for other ranks, and that for no longer than its timeout: half an hour unless the
caller says otherwise. As much again is left for clocks that differ. A load seldom takes so long.
"""


@dataclass(frozen=True, slots=True)
class TagEntry:
    """A committed tag, as a listing shows it."""

    tag: str
    sequence: int
    pinned: bool
    created: str
    """Time of the commit: UTC, ISO 8601; empty if unknown."""

    directory: str
    """Its name in the root directory: the tag, or its name while it is being replaced."""

    damage: CheckpointError | None = None
    """Why its manifest could not be read; the sequence then comes from orbax's metadata, or is 0."""


def entries(root: str) -> list[TagEntry]:
    """All committed tags, oldest first. An absent root has none.

    Raises:
        StorageError: The directory cannot be read.
    """
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError.of(error, "listing the checkpoint directory", path=root) from error
    found: dict[str, TagEntry] = {}
    for name in sorted(names, key=lambda n: not n.startswith(OLD_PREFIX)):  # a tag itself wins over its old version
        tag = name.removeprefix(OLD_PREFIX)
        if is_tag_name(tag) and (entry := _entry(root, name, tag)) is not None:
            found[tag] = entry
    return sorted(found.values(), key=lambda e: (e.sequence, e.tag))


def _entry(root: str, name: str, tag: str) -> TagEntry | None:
    try:
        with open(os.path.join(root, name, MANIFEST), "rb") as file:
            start = file.read(manifest_json.HEAD_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        if not _was_committed(root, name):
            return None
        lost = CorruptCheckpointError("the tag has no manifest", path=root, tag=tag, file=MANIFEST)
        return TagEntry(tag, _orbax_sequence(root, name), False, "", name, lost)
    except OSError as error:
        damage: CheckpointError = StorageError.of(error, "reading a manifest", path=root, tag=tag)
        return TagEntry(tag, _orbax_sequence(root, name), False, "", name, damage)
    try:
        head = manifest_json.parse_head(start)
    except CheckpointError as error:
        error.at(path=root, tag=tag, file=MANIFEST)
        return TagEntry(tag, _orbax_sequence(root, name), False, "", name, error)
    return TagEntry(tag, head.sequence, head.pinned, head.created, name)


def is_ours(root: str, name: str) -> bool:
    """Whether a directory is a tag of ours, damaged or not."""
    return os.path.exists(os.path.join(root, name, MANIFEST)) or _was_committed(root, name)


def _was_committed(root: str, name: str) -> bool:
    """Whether orbax's own marks say that this directory without a manifest was a tag of ours."""
    return os.path.exists(os.path.join(root, name, COMMITTED)) and _orbax_sequence(root, name) > 0


def _orbax_sequence(root: str, name: str) -> int:
    """The commit sequence from orbax's copy of it: enough to keep a damaged tag in its place in the order."""
    try:
        with open(os.path.join(root, name, "_CHECKPOINT_METADATA"), "rb") as file:
            sequence = json.load(file)["custom_metadata"]["sequence"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0  # unknown: such a tag counts as the oldest
    return sequence if type(sequence) is int and sequence > 0 else 0


def open_tag(root: str, tag: str) -> LocalDirectory:
    """The directory of a committed tag, marked as being read so that no retention deletes it under the reader.

    Raises:
        NoCheckpointError: There is no such tag; the message lists those that there are.
        InvalidTagError: `tag` cannot be one.
    """
    check_tag(tag, root)
    for name in (tag, OLD_PREFIX + tag, tag):  # it may move from the first name to the second, or be replaced
        path = os.path.join(root, name)
        if not is_ours(root, name):
            continue
        try:
            directory = LocalDirectory(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StorageError.of(error, "opening a tag", path=root, tag=tag) from error
        _mark(directory, fcntl.LOCK_SH)
        return directory
    raise no_such_tag(root, tag)


def no_such_tag(root: str, tag: str | None) -> NoCheckpointError:
    """The error for a tag that is not there, or for a root without any (`tag` None)."""
    try:
        there = [e.tag for e in entries(root)]
        unfinished = [n for n in os.listdir(root) if n.endswith(TMP_SUFFIX)]
    except (OSError, CheckpointError):
        there, unfinished = [], []
    if not os.path.isdir(root):
        hint = "It is a file." if os.path.exists(root) else "The directory does not exist."
    elif any(os.path.exists(os.path.join(root, name)) for name in (MANIFEST, *NXD_MARKS)):
        above, name = os.path.split(root)
        hint = f"This is the directory of a tag: pass {above} and the tag {name}."
    elif there:
        hint = f"Tags there, oldest first: {', '.join(there[-10:])}."
    else:
        hint = "No tag was ever committed there" + (f"; {len(unfinished)} unfinished." if unfinished else ".")
    return NoCheckpointError(
        "there is no such checkpoint" if tag else "there is no checkpoint", path=root, tag=tag, hint=hint
    )


def _mark(directory: LocalDirectory, how: int) -> None:
    try:
        fcntl.flock(directory.fd, how | fcntl.LOCK_NB)
    except OSError as error:
        # Where there are no locks, `in_use` goes by the age of a directory.
        logger.debug("%s is not marked as being in use: %s", directory.path, error)


def mark_in_use(directory: LocalDirectory) -> None:
    """Mark a directory as being written, until it is closed or the process ends."""
    _mark(directory, fcntl.LOCK_EX)


def in_use(path: str) -> bool:
    """Whether somebody reads (or, for an unfinished save, writes) this directory right now.

    Where that cannot be found out, it counts as in use until nothing in it has changed for `UNLOCKED_AGE`.
    """
    held = locked(path)
    return _is_young(path) if held is None else held


def locked(path: str) -> bool | None:
    """Whether somebody has marked a directory as being read or written; None if that cannot be found out."""
    try:
        directory = LocalDirectory(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        _doubt(path, error)
        return None
    try:
        fcntl.flock(directory.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:  # ENOTSUP, ENOLCK, ENOSYS: not every file system has locks
        _doubt(path, error)
        return None
    finally:
        directory.close()
    return False


def _is_young(path: str) -> bool:
    """Whether something in a directory has changed in the last `UNLOCKED_AGE` seconds."""

    def fail(error: OSError) -> None:
        raise error

    since = time.time() - UNLOCKED_AGE
    try:
        places = (os.path.join(at, name) for at, _, files in os.walk(path, onerror=fail) for name in ("", *files))
        return any(os.lstat(place).st_mtime > since for place in places)
    except OSError as error:
        # A file that has vanished meanwhile means that somebody is at work there.
        logger.debug("%s is left alone: %s", path, error)
        return True


_DOUBTED: set[int | None] = set()
"""Numbers of the errors that `_doubt` has told of."""


def _doubt(path: str, error: OSError) -> None:
    if error.errno not in _DOUBTED:
        _DOUBTED.add(error.errno)
        logger.warning(
            "cannot find out whether %s is in use (%s): this and others like it are left alone until nothing in them "
            "has changed for %g minutes, also if num_kept_ckpts would delete them",
            path, error.strerror or error, UNLOCKED_AGE / 60,
        )  # fmt: skip
