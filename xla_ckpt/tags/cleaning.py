"""What killed and replaced saves leave in a root directory, and its removal."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from xla_ckpt.errors import CheckpointError, StorageError
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import FileSystem, Store
from xla_ckpt.tags import listing
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tags.facts import tags_to_retire
from xla_ckpt.tags.names import NEW_PREFIX, OLD_PREFIX, TRASH
from xla_ckpt.tags.retention import Retention

logger = get_logger(__name__)


def clean(store: FileSystem, only: str | None = None) -> None:
    """Remove what killed or replaced writers left: unfinished directories, old versions, trash.

    Directories that somebody writes or reads are left alone; they go next time. Undoes a replacement that was
    killed half-way.

    Args:
        store: The root directory.
        only: Clean up after writers of this name alone: the directory is none of tags, and what else lies in it may be
            anybody's.

    Raises:
        StorageError: A link or a file has the name of the trash.
        OSError: The storage refused.
    """
    check_is_directory(store, TRASH)
    doomed = []
    for name in store.names():
        if only is not None and name != OLD_PREFIX + only and not is_draft(name, only):
            continue
        if not store.is_directory(name):
            continue  # a link or a file of the program's own
        with _left_to_others(store, name):
            if name.startswith(OLD_PREFIX) and not store.has(target := name[len(OLD_PREFIX) :]):
                logger.warning("%s: a replacement of %s was interrupted; the old version is back", store.path, target)
                store.rename(name, target)
                store.sync()
            elif name.startswith(OLD_PREFIX):
                doomed.append(move_to_trash(store, name))  # also if it is read: the next replacement needs the name
            elif name.startswith(NEW_PREFIX):
                doomed.append(name)
    with _left_to_others(store, TRASH):
        in_trash = [f"{TRASH}/{name}" for name in store.names(TRASH)]
        doomed += [name for name in in_trash if only is None or name.startswith(f"{TRASH}/{OLD_PREFIX}{only}-")]
    _remove_doomed(store, list(dict.fromkeys(doomed)))


def leftovers(store: FileSystem) -> set[str]:
    """What lies in a root directory for `clean` to look after."""
    names = [n for n in store.names() if n.startswith((NEW_PREFIX, OLD_PREFIX))]
    return {*names, *(f"{TRASH}/{name}" for name in store.names(TRASH))}


def _remove_doomed(store: FileSystem, names: Sequence[str]) -> None:
    doomed = [name for name in names if not store.in_use(name)]
    if doomed:
        # What has no files any more must not have its name again after a loss of power: a tag that was retired, or the
        # old version of one that was replaced, which has the name of the draft since then.
        store.sync()
    for name in doomed:
        with _left_to_others(store, name):
            remove_unused(store, name)
    if store.is_directory(TRASH):
        with _left_to_others(store, TRASH), contextlib.suppress(FileNotFoundError):  # another program came first
            # Not `remove`: somebody may move a tag there at this moment, which may still be read.
            store.remove_empty(TRASH)


def is_draft(name: str, target: str) -> bool:
    """Whether a directory is, or may be, filled to become the one of a name.

    >>> is_draft(".new-best-1", "best"), is_draft(".new-best-of-all", "best")
    (True, False)
    """
    suffix = name.removeprefix(NEW_PREFIX + target)
    return suffix != name and (not suffix or (suffix[0] == "-" and suffix[1:].isdigit()))


_told: set[tuple[str, str]] = set()
"""(root directory, name) of what could not be removed, and has been told of: a save an hour tells it once."""


@contextlib.contextmanager
def _left_to_others(store: FileSystem, name: str) -> Iterator[None]:
    """Leave what this user may not touch: another user's leftovers are no reason for a save to fail."""
    try:
        yield
    except PermissionError as error:
        _tell(store, name, error)


def _tell(store: Store, name: str, error: Exception) -> None:
    if (store.path, name) not in _told:
        _told.add((store.path, name))
        logger.warning("could not remove %s in %s: %s", name or "it", store.path, error)


def check_is_directory(store: FileSystem, name: str) -> None:
    """Refuse a root in which a link, which may lead anywhere, or a file has one of this library's own names.

    Raises:
        StorageError: It has.
    """
    if store.has(name) and not store.is_directory(name):
        raise StorageError(
            f"{name}, which this library makes itself, is no directory",
            path=store.path,
            expected="a directory, or nothing",
            found="a link or a file",
            hint=f"Remove {store.path}/{name}: it is made anew.",
        )


def move_to_trash(store: FileSystem, name: str) -> str:
    """Move a directory away, under a name that is free there, and return that. Who reads it does not notice.

    Raises:
        OSError: The storage refused, the directory is gone, or a link or a file has the name of the trash.
    """
    check_is_directory(store, TRASH)
    places = (f"{TRASH}/{name}-{n}" for n in itertools.count())
    while True:
        if not store.is_directory(TRASH):
            with contextlib.suppress(FileExistsError):
                store.make(TRASH).close()
        place = next(place for place in places if not store.has(place))
        try:
            store.rename(name, place)
        except FileNotFoundError:
            if not store.has(name):
                raise
            continue  # another program that cleans up has removed the trash
        return place


def tags_without(store: FileSystem, new: TagEntry, retention: Retention | None) -> list[TagEntry]:
    """Return the tags that are not to be kept any more when a new one has its name, oldest first.

    That the tags cannot be listed is logged, and all are kept.

    Raises:
        UsageError: The policy failed.
    """
    if retention is None:
        return []  # a root of 10,000 tags takes a third of a second to look through
    try:
        entries = [entry for entry in listing.entries(store) if entry.tag != new.tag]
    except CheckpointError as error:
        logger.warning("%s: no older tag is deleted when tag %s comes: %s", store.path, new.tag, error)
        return []
    doomed = set(tags_to_retire(store, [*entries, new], retention))
    return [entry for entry in entries if entry.tag in doomed]


def retire(store: FileSystem, doomed: Sequence[TagEntry]) -> None:
    """Move tags to the trash, except those that somebody reads, or has pinned or saved again since they were listed.

    A tag that cannot be moved stays, which is logged: the tag that retires them is there.
    """

    def retire_unchanged(old: TagEntry) -> None:
        now = listing.entry_of(store, old.tag)
        is_same = now is not None and (now.sequence, now.pinned) == (old.sequence, old.pinned)
        if is_same and not store.in_use(old.tag):
            move_to_trash(store, old.tag)

    entries = {old.tag: old for old in doomed}
    retire_each(store, entries, lambda tag: retire_unchanged(entries[tag]))


def retire_each(store: Store, names: Iterable[str], retire_one: Callable[[str], object]) -> None:
    """Retire the directories with these names. One that cannot be moved stays and is logged once; the others go."""
    for name in names:
        try:
            retire_one(name)
        except FileNotFoundError:
            logger.debug("%s in %s: another job has retired it", name, store.path)
        except (OSError, CheckpointError) as error:
            _tell(store, name, error)


def remove_unused(store: FileSystem, name: str) -> None:
    """Remove a directory, unless somebody writes or reads it; that it cannot be removed is logged."""
    if store.is_directory(name):
        _remove(store, name, store.remove_unused)


def remove(store: FileSystem, name: str) -> None:
    """Remove a directory; that it cannot be removed is logged."""
    _remove(store, name, store.remove)


def remove_empty_root(store: FileSystem) -> None:
    """Remove the root directory itself, if nothing lies in it; that it cannot be removed is logged."""
    _remove(store, "", store.remove_empty)


def _remove(store: FileSystem, name: str, how: Callable[[str], object]) -> None:
    try:
        how(name)
    except FileNotFoundError:
        logger.debug("%s in %s: another program removed it", name, store.path)
    except OSError as error:
        _tell(store, name, error)
