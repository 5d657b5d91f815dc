"""A directory that is no tag of ours: it is filled under another name, and takes its own in one step.

What had that name before is there until the new one is complete, and gone afterwards. Whoever looks finds one of the
two, whatever happens in between. Where the storage cannot exchange two names in one step, the old directory stands
under ``.old-<name>`` for an instant.

A process may be stopped for long and go on when its job has been restarted elsewhere: what another writer has put there
since it began stays.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from xla_ckpt.errors import SaveError
from xla_ckpt.storage.base import Directory, Store, not_durable, rename_durably
from xla_ckpt.tags.cleaning import remove, remove_unused
from xla_ckpt.tags.names import NEW_PREFIX, OLD_PREFIX


@dataclass(slots=True, kw_only=True)
class Replacement:
    """A directory on its way to its name."""

    store: Store
    name: str
    """The name that it will have."""

    directory: Directory
    """Where its files go. Everything in it must be durable before `commit`."""

    before: Directory | None
    """What had the name when the writing began."""

    ended: bool = False
    """Whether it was committed or abandoned."""


def draft_name(name: str) -> str:
    """The name under which a directory is filled, unless somebody else uses that one.

    >>> draft_name("step-100")
    '.new-step-100'
    """
    return NEW_PREFIX + name


def begin(store: Store, name: str) -> Replacement:
    """Make the directory that is filled, after what killed writers of this name left behind has been removed.

    Raises:
        OSError: The storage refused.
    """
    store.prepare()
    clean(store, name)
    before = _what_has(store, name)
    for number in itertools.count():
        try:
            directory = store.make(f"{draft_name(name)}-{number}" if number else draft_name(name))
        except FileExistsError:
            continue  # somebody else writes it, or may do so for all that can be told
        return Replacement(store=store, name=name, directory=directory, before=before)
    raise AssertionError("numbers do not end")


def _what_has(store: Store, name: str) -> Directory | None:
    """The directory of this name. Without a lock: nobody needs its files."""
    try:
        return store.open(name, lock=False)
    except FileNotFoundError:
        return None


def clean(store: Store, name: str) -> None:
    """Remove what killed writers of a directory left, and undo a replacement that was killed half-way.

    Raises:
        OSError: The storage refused.
    """
    old = OLD_PREFIX + name
    if store.has(old) and not store.has(name):
        rename_durably(store, old, name)
    if doomed := [left for left in store.names() if left == old or _is_draft(left, name)]:
        store.sync()  # a loss of power must not bring back the name of an old version whose files are gone
        for left in doomed:
            remove_unused(store, left)


def _is_draft(left: str, name: str) -> bool:
    """Whether somebody has filled this directory to replace the one of that name."""
    rest = left.removeprefix(draft_name(name))
    return rest != left and (not rest or (rest[0] == "-" and rest[1:].isdigit()))


def where(store: Store, name: str) -> str:
    """The name under which a directory is right now: it may be that of an old version that is just being replaced."""
    return OLD_PREFIX + name if not store.has(name) and store.has(OLD_PREFIX + name) else name


def commit(made: Replacement) -> None:
    """Have the directory take its name. What had the name before is removed, unless somebody reads it.

    Raises:
        SaveError: Another writer has put a directory there since this one began; it has the name.
        OSError: The storage refused; the name has what it had before.
        NotDurableError: The name has the new directory, and a loss of power may undo that.
    """
    store, name, draft = made.store, made.name, made.directory.name
    if not store.has(name):
        try:
            rename_durably(store, draft, name)
        except OSError as error:
            if store.has(name):
                raise _overtaken(name) from error
            raise
        made.ended = True
    elif not _was_there(made, name):
        raise _overtaken(name)
    elif store.exchange(draft, name):
        if not _was_there(made, draft):  # another writer was faster by less than the look before
            store.exchange(draft, name)
            raise _overtaken(name)
        try:
            store.sync()
        except OSError as refused:
            try:
                store.exchange(draft, name)
            except OSError as error:
                # The old version has the name of the draft now, and is what a loss of power brings back.
                made.ended = True
                raise not_durable(store, name, refused) from error
            raise
        made.ended = True
        remove_unused(store, draft)  # that is the name of the old version now
    else:
        old = OLD_PREFIX + name
        if store.has(old):
            remove(store, old)
        store.rename(name, old)
        try:
            if not _was_there(made, old):
                raise _overtaken(name)
            rename_durably(store, draft, name)
        except (OSError, SaveError):
            store.rename(old, name)
            raise
        made.ended = True
        remove_unused(store, old)
    _close(made)


def _was_there(made: Replacement, name: str) -> bool:
    """Whether what has this name is what had the name of the new directory when the writing began."""
    return made.before is not None and made.before.is_at(name)


def _overtaken(name: str) -> SaveError:
    return SaveError(
        "another job has saved this checkpoint meanwhile",
        found=name,
        hint="That version stays. Two jobs that save at the same time need different directories.",
    )


def _close(made: Replacement) -> None:
    made.directory.close()
    if made.before is not None:
        made.before.close()


def abandon(made: Replacement) -> None:
    """Remove a directory that was not committed: it may be why the storage is full."""
    if made.ended:
        return
    made.ended = True
    _close(made)
    if made.store.has(made.directory.name):
        remove(made.store, made.directory.name)
