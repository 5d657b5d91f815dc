"""Directory operations in a root: atomic replacement, trash, retirement and cleanup after killed saves.

`replace_directory` exchanges a draft with the directory of its name in one step, and refuses to overwrite the
result of a concurrent save. Retired tags move to the trash with one rename; files are removed when no reader has
them open.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from xla_ckpt.errors import CheckpointError, NotDurableError, SaveError, StorageError
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import FileSystem, Identity, Store, rename_durably, sync_or_undo
from xla_ckpt.tags import listing
from xla_ckpt.tags.entry import DRAFT_PREFIX, REPLACED_PREFIX, TRASH_NAME, TagEntry
from xla_ckpt.tags.retention import Retention
from xla_ckpt.tags.retention_inputs import select_tags_to_retire

logger = get_logger(__name__)


def clean_root(store: FileSystem, only: str | None = None) -> None:
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
    check_is_directory(store, TRASH_NAME)
    doomed = []
    for name in store.list_names():
        if only is not None and name != REPLACED_PREFIX + only and not is_draft(name, only):
            continue
        if not store.is_directory(name):
            continue  # a link or a file of the program's own
        with _ignore_permission_errors(store, name):
            if name.startswith(REPLACED_PREFIX) and not store.has(target := name[len(REPLACED_PREFIX) :]):
                logger.warning("%s: a replacement of %s was interrupted; the old version is back", store.path, target)
                store.rename(name, target)
                store.sync()
            elif name.startswith(REPLACED_PREFIX):
                doomed.append(move_to_trash(store, name))  # also if it is read: the next replacement needs the name
            elif name.startswith(DRAFT_PREFIX):
                doomed.append(name)
    with _ignore_permission_errors(store, TRASH_NAME):
        in_trash = [f"{TRASH_NAME}/{name}" for name in store.list_names(TRASH_NAME)]
        doomed += [
            name for name in in_trash if only is None or name.startswith(f"{TRASH_NAME}/{REPLACED_PREFIX}{only}-")
        ]
    _remove_expired(store, list(dict.fromkeys(doomed)))


def list_leftovers(store: FileSystem) -> set[str]:
    """What lies in a root directory for `clean_root` to look after."""
    names = [n for n in store.list_names() if n.startswith((DRAFT_PREFIX, REPLACED_PREFIX))]
    return {*names, *(f"{TRASH_NAME}/{name}" for name in store.list_names(TRASH_NAME))}


def _remove_expired(store: FileSystem, names: Sequence[str]) -> None:
    doomed = [name for name in names if not store.is_in_use(name)]
    if doomed:
        # What has no files any more must not have its name again after a loss of power: a tag that was retired, or the
        # old version of one that was replaced, which has the name of the draft since then.
        store.sync()
    for name in doomed:
        with _ignore_permission_errors(store, name):
            remove_unused(store, name)
    if store.is_directory(TRASH_NAME):
        with (
            _ignore_permission_errors(store, TRASH_NAME),
            contextlib.suppress(FileNotFoundError),
        ):  # another program came first
            # Not `remove_directory`: somebody may move a tag there at this moment, which may still be read.
            store.remove_empty(TRASH_NAME)


def is_draft(name: str, target: str) -> bool:
    """Whether a directory is, or may be, filled to become the one of a name.

    >>> is_draft(".new-best-1", "best"), is_draft(".new-best-of-all", "best")
    (True, False)
    """
    suffix = name.removeprefix(DRAFT_PREFIX + target)
    return suffix != name and (not suffix or (suffix[0] == "-" and suffix[1:].isdigit()))


_warned: set[tuple[str, str]] = set()
"""(root directory, name) of what could not be removed, and has been told of: a save an hour tells it once."""


@contextlib.contextmanager
def _ignore_permission_errors(store: FileSystem, name: str) -> Iterator[None]:
    """Leave what this user may not touch: another user's leftovers are no reason for a save to fail."""
    try:
        yield
    except PermissionError as error:
        _warn_once(store, name, error)


def _warn_once(store: Store, name: str, error: Exception) -> None:
    if (store.path, name) not in _warned:
        _warned.add((store.path, name))
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
    check_is_directory(store, TRASH_NAME)
    places = (f"{TRASH_NAME}/{name}-{n}" for n in itertools.count())
    while True:
        if not store.is_directory(TRASH_NAME):
            with contextlib.suppress(FileExistsError):
                store.make_directory(TRASH_NAME).close()
        place = next(place for place in places if not store.has(place))
        try:
            store.rename(name, place)
        except FileNotFoundError:
            if not store.has(name):
                raise
            continue  # another program that cleans up has removed the trash
        return place


def find_tags_retired_by(store: FileSystem, new: TagEntry, retention: Retention | None) -> list[TagEntry]:
    """Return the tags that are not to be kept any more when a new one has its name, oldest first.

    That the tags cannot be listed is logged, and all are kept.

    Raises:
        UsageError: The policy failed.
    """
    if retention is None:
        return []  # a root of 10,000 tags takes a third of a second to look through
    try:
        entries = [entry for entry in listing.list_entries(store) if entry.tag != new.tag]
    except CheckpointError as error:
        logger.warning("%s: no older tag is deleted when tag %s comes: %s", store.path, new.tag, error)
        return []
    doomed = set(select_tags_to_retire(store, [*entries, new], retention))
    return [entry for entry in entries if entry.tag in doomed]


def retire_tags(store: FileSystem, doomed: Sequence[TagEntry]) -> None:
    """Move tags to the trash, except those that somebody reads, or has pinned or saved again since they were listed.

    A tag that cannot be moved stays, which is logged: the tag that retires them is there.
    """

    def retire_unchanged(old: TagEntry) -> None:
        now = listing.get_entry(store, old.tag)
        is_same = now is not None and (now.sequence, now.pinned) == (old.sequence, old.pinned)
        if is_same and not store.is_in_use(old.tag):
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
            _warn_once(store, name, error)


def remove_unused(store: FileSystem, name: str) -> None:
    """Remove a directory, unless somebody writes or reads it; that it cannot be removed is logged."""
    if store.is_directory(name):
        _remove_or_warn(store, name, store.remove_unused)


def remove_directory(store: FileSystem, name: str) -> None:
    """Remove a directory; that it cannot be removed is logged."""
    _remove_or_warn(store, name, store.remove)


def remove_empty_root(store: FileSystem) -> None:
    """Remove the root directory itself, if nothing lies in it; that it cannot be removed is logged."""
    _remove_or_warn(store, "", store.remove_empty)


def _remove_or_warn(store: FileSystem, name: str, remove_one: Callable[[str], object]) -> None:
    try:
        remove_one(name)
    except FileNotFoundError:
        logger.debug("%s in %s: another program removed it", name, store.path)
    except OSError as error:
        _warn_once(store, name, error)


def replace_directory(store: FileSystem, draft: str, name: str, replaced: Identity | None) -> str | None:
    """Have a directory take its name, durably.

    Where the storage cannot exchange two names in one step, the old directory stands under ``.old-<name>`` for an
    instant, where readers look for it, too.

    Args:
        store: The root directory.
        draft: The name that the directory has.
        name: The name that it takes.
        replaced: What had the name when the writing began; None if nothing had.

    Returns:
        The name under which the old directory stands now; None if there was none.

    Raises:
        SaveError: Another writer has put a directory there since; it has the name.
        OSError: The storage refused; the name has what it had before.
        NotDurableError: The name has the new directory, and a loss of power may undo that.
    """
    check_no_concurrent_save(store, name, replaced)
    if not store.has(name):
        try:
            rename_durably(store, draft, name)
        except OSError as error:
            if store.has(draft) and store.has(name):
                raise make_concurrent_save_error(store.path, name) from error
            raise
        return None
    if store.exchange(draft, name):
        if store.get_identity(draft) != replaced:  # another writer was faster by less than the look before
            store.exchange(draft, name)
            raise make_concurrent_save_error(store.path, name)
        sync_or_undo(store, name, lambda: store.exchange(draft, name))
        return draft
    old = REPLACED_PREFIX + name
    if store.has(old):
        move_to_trash(store, old)  # not removed: somebody may read it
    store.rename(name, old)
    try:
        if store.get_identity(old) != replaced:
            raise make_concurrent_save_error(store.path, name)
        rename_durably(store, draft, name)
    except NotDurableError:
        raise
    except BaseException as error:
        _restore_replaced(store, old, name, error)
        raise
    return old


def _restore_replaced(store: FileSystem, old: str, name: str, error: BaseException) -> None:
    """Give the old directory its name again, unless a third writer has taken that by now."""
    try:
        store.rename(old, name)
    except OSError as refused:
        raise error from refused  # readers find it under its other name, and the next save gives it back


def check_no_concurrent_save(store: FileSystem, name: str, replaced: Identity | None) -> None:
    """Refuse to replace what another writer has put there since this one began.

    Raises:
        SaveError: It has.
    """
    current = store.get_identity(name)
    if current is not None and current != replaced:
        raise make_concurrent_save_error(store.path, name)


def make_concurrent_save_error(path: str, name: str) -> SaveError:
    """The error for what another writer has put in the place of what was there when this one began."""
    return SaveError(
        "another job has saved this checkpoint meanwhile",
        path=path,
        found=name,
        hint="That version stays. Two jobs that save to one directory at the same time need different names.",
    )
