"""Directory operations in a root: atomic replacement, trash, retirement and cleanup after killed saves.

`replace_directory` exchanges a draft with the directory that has its final name atomically, and raises an error instead
of overwriting the result of a concurrent save. Retired tags move to the trash with one rename; files are deleted when
no reader has them open.
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
    """Remove leftovers of killed or replaced writers: drafts, old versions and trash. Roll back an interrupted
    replacement.

    Directories in use are skipped until the next call.

    Args:
        store: The root directory.
        only: Only clean up leftovers of this name. Used if the directory is not a root of tags and may contain
            unrelated files.

    Raises:
        StorageError: A link or a file has the name of the trash.
        OSError: The storage failed.
    """
    check_is_directory(store, TRASH_NAME)
    doomed = []
    for name in store.list_names():
        if only is not None and name != REPLACED_PREFIX + only and not is_draft(name, only):
            continue
        if not store.is_directory(name):
            continue  # a link or a file that does not belong to this library
        with _ignore_permission_errors(store, name):
            if name.startswith(REPLACED_PREFIX) and not store.has(target := name[len(REPLACED_PREFIX) :]):
                logger.warning("%s: a replacement of %s was interrupted; the old version is back", store.path, target)
                store.rename(name, target)
                store.sync()
            elif name.startswith(REPLACED_PREFIX):
                doomed.append(move_to_trash(store, name))  # even if in use: the name is needed again
            elif name.startswith(DRAFT_PREFIX):
                doomed.append(name)
    with _ignore_permission_errors(store, TRASH_NAME):
        in_trash = [f"{TRASH_NAME}/{name}" for name in store.list_names(TRASH_NAME)]
        doomed += [
            name for name in in_trash if only is None or name.startswith(f"{TRASH_NAME}/{REPLACED_PREFIX}{only}-")
        ]
    _remove_expired(store, list(dict.fromkeys(doomed)))


def list_leftovers(store: FileSystem) -> set[str]:
    """Return the leftovers in a root directory that `clean_root` handles."""
    names = [n for n in store.list_names() if n.startswith((DRAFT_PREFIX, REPLACED_PREFIX))]
    return {*names, *(f"{TRASH_NAME}/{name}" for name in store.list_names(TRASH_NAME))}


def _remove_expired(store: FileSystem, names: Sequence[str]) -> None:
    doomed = [name for name in names if not store.is_in_use(name)]
    if doomed:
        # A directory whose files are deleted must not get its former name back after a power loss: a retired tag, or
        # the old version of a replaced tag, which got the name of the draft.
        store.sync()
    for name in doomed:
        with _ignore_permission_errors(store, name):
            remove_unused(store, name)
    if store.is_directory(TRASH_NAME):
        with (
            _ignore_permission_errors(store, TRASH_NAME),
            contextlib.suppress(FileNotFoundError),
        ):  # another program was faster
            # Not `remove_directory`: another process may move a tag there now, which may still be read.
            store.remove_empty(TRASH_NAME)


def is_draft(name: str, target: str) -> bool:
    """Return True if a directory is, or may be, a draft of a name.

    >>> is_draft(".new-best-1", "best"), is_draft(".new-best-of-all", "best")
    (True, False)
    """
    suffix = name.removeprefix(DRAFT_PREFIX + target)
    return suffix != name and (not suffix or (suffix[0] == "-" and suffix[1:].isdigit()))


_warned: set[tuple[str, str]] = set()
"""(root directory, name) pairs for which a warning about a failed removal was logged, so that it is logged once."""


@contextlib.contextmanager
def _ignore_permission_errors(store: FileSystem, name: str) -> Iterator[None]:
    """Ignore permission errors of the block with a warning: leftovers of another user must not fail a save."""
    try:
        yield
    except PermissionError as error:
        _warn_once(store, name, error)


def _warn_once(store: Store, name: str, error: Exception) -> None:
    if (store.path, name) not in _warned:
        _warned.add((store.path, name))
        logger.warning("could not remove %s in %s: %s", name or "it", store.path, error)


def check_is_directory(store: FileSystem, name: str) -> None:
    """Raise an error if a reserved name is a link, which may point anywhere, or a file.

    Raises:
        StorageError: The name is not a directory.
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
    """Move a directory into the trash under an unused name, and return that name. Open readers are not affected.

    Raises:
        OSError: The storage failed, the directory does not exist, or a link or a file has the name of the trash.
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
    """Return the tags that a policy drops when a new tag is committed, oldest first.

    If the tags cannot be listed, a warning is logged and all are kept.

    Raises:
        UsageError: The policy failed.
    """
    if retention is None:
        return []  # listing a root of 10,000 tags takes a third of a second
    try:
        entries = [entry for entry in listing.list_entries(store) if entry.tag != new.tag]
    except CheckpointError as error:
        logger.warning("%s: no older tag is deleted when tag %s comes: %s", store.path, new.tag, error)
        return []
    doomed = set(select_tags_to_retire(store, [*entries, new], retention))
    return [entry for entry in entries if entry.tag in doomed]


def retire_tags(store: FileSystem, doomed: Sequence[TagEntry]) -> None:
    """Move tags to the trash, except those that are being read, or were pinned or saved again since they were listed.

    If a tag cannot be moved, a warning is logged: the tag that replaces it is committed.
    """

    def retire_unchanged(old: TagEntry) -> None:
        now = listing.get_entry(store, old.tag)
        is_same = now is not None and (now.sequence, now.pinned) == (old.sequence, old.pinned)
        if is_same and not store.is_in_use(old.tag):
            move_to_trash(store, old.tag)

    entries = {old.tag: old for old in doomed}
    retire_each(store, entries, lambda tag: retire_unchanged(entries[tag]))


def retire_each(store: Store, names: Iterable[str], retire_one: Callable[[str], object]) -> None:
    """Call `retire_one` for each name. A failure is logged once per name, and the others are still retired."""
    for name in names:
        try:
            retire_one(name)
        except FileNotFoundError:
            logger.debug("%s in %s: another job has retired it", name, store.path)
        except (OSError, CheckpointError) as error:
            _warn_once(store, name, error)


def remove_unused(store: FileSystem, name: str) -> None:
    """Remove a directory unless it is in use. A failure is logged."""
    if store.is_directory(name):
        _remove_or_warn(store, name, store.remove_unused)


def remove_directory(store: FileSystem, name: str) -> None:
    """Remove a directory. A failure is logged."""
    _remove_or_warn(store, name, store.remove)


def remove_empty_root(store: FileSystem) -> None:
    """Remove the root directory itself if it is empty. A failure is logged."""
    _remove_or_warn(store, "", store.remove_empty)


def _remove_or_warn(store: FileSystem, name: str, remove_one: Callable[[str], object]) -> None:
    try:
        remove_one(name)
    except FileNotFoundError:
        logger.debug("%s in %s: another program removed it", name, store.path)
    except OSError as error:
        _warn_once(store, name, error)


def replace_directory(store: FileSystem, draft: str, name: str, replaced: Identity | None) -> str | None:
    """Rename a directory to its final name durably, replacing an existing directory.

    If the storage cannot exchange two names atomically, the old directory is named ``.old-<name>`` for an instant.
    Readers look for it under both names.

    Args:
        store: The root directory.
        draft: Current name of the directory.
        name: Final name of the directory.
        replaced: Identity of the directory with the final name when the write began; None if there was none.

    Returns:
        The new name of the old directory; None if there was none.

    Raises:
        SaveError: Another writer has replaced the directory in the meantime; its version is kept.
        OSError: The storage failed; the name is unchanged.
        NotDurableError: The new directory is in place, but a power loss may undo that.
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
        if store.get_identity(draft) != replaced:  # another writer was faster, after the check above
            store.exchange(draft, name)
            raise make_concurrent_save_error(store.path, name)
        sync_or_undo(store, name, lambda: store.exchange(draft, name))
        return draft
    old = REPLACED_PREFIX + name
    if store.has(old):
        move_to_trash(store, old)  # not removed, because it may be read
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
    """Rename the old directory back, unless another writer has taken its name."""
    try:
        store.rename(old, name)
    except OSError as refused:
        raise error from refused  # readers find it under its other name, and the next save renames it back


def check_no_concurrent_save(store: FileSystem, name: str, replaced: Identity | None) -> None:
    """Raise an error if another writer has replaced a directory since this one began.

    Raises:
        SaveError: The directory was replaced.
    """
    current = store.get_identity(name)
    if current is not None and current != replaced:
        raise make_concurrent_save_error(store.path, name)


def make_concurrent_save_error(path: str, name: str) -> SaveError:
    """Return the error for a directory that another writer has replaced since this one began."""
    return SaveError(
        "another job has saved this checkpoint meanwhile",
        path=path,
        found=name,
        hint="That version stays. Two jobs that save to one directory at the same time need different names.",
    )
