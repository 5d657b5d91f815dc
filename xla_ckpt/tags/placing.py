"""A directory takes the name of what was there before, in one step: whoever looks finds one of the two.

A process may be stopped for long and go on when its job has been restarted elsewhere. So what another writer has put
there since this one began stays, and this one takes back what it has done.
"""

from __future__ import annotations

from xla_ckpt.errors import NotDurableError, SaveError
from xla_ckpt.storage.base import FileSystem, Identity
from xla_ckpt.storage.durable_names import rename_durably, sync_or_undo
from xla_ckpt.tags.cleaning import move_to_trash
from xla_ckpt.tags.names import OLD_PREFIX


def place(store: FileSystem, draft: str, name: str, replaced: Identity | None) -> str | None:
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
    check_not_overtaken(store, name, replaced)
    if not store.has(name):
        try:
            rename_durably(store, draft, name)
        except OSError as error:
            if store.has(draft) and store.has(name):
                raise overtaken(store.path, name) from error
            raise
        return None
    if store.exchange(draft, name):
        if store.identity(draft) != replaced:  # another writer was faster by less than the look before
            store.exchange(draft, name)
            raise overtaken(store.path, name)
        sync_or_undo(store, name, lambda: store.exchange(draft, name))
        return draft
    old = OLD_PREFIX + name
    if store.has(old):
        move_to_trash(store, old)  # not removed: somebody may read it
    store.rename(name, old)
    try:
        if store.identity(old) != replaced:
            raise overtaken(store.path, name)
        rename_durably(store, draft, name)
    except NotDurableError:
        raise
    except BaseException as error:
        _bring_back(store, old, name, error)
        raise
    return old


def _bring_back(store: FileSystem, old: str, name: str, error: BaseException) -> None:
    """Give the old directory its name again, unless a third writer has taken that by now."""
    try:
        store.rename(old, name)
    except OSError as refused:
        raise error from refused  # readers find it under its other name, and the next save gives it back


def check_not_overtaken(store: FileSystem, name: str, replaced: Identity | None) -> None:
    """Refuse to replace what another writer has put there since this one began.

    Raises:
        SaveError: It has.
    """
    current = store.identity(name)
    if current is not None and current != replaced:
        raise overtaken(store.path, name)


def overtaken(path: str, name: str) -> SaveError:
    """The error for what another writer has put in the place of what was there when this one began."""
    return SaveError(
        "another job has saved this checkpoint meanwhile",
        path=path,
        found=name,
        hint="That version stays. Two jobs that save to one directory at the same time need different names.",
    )
