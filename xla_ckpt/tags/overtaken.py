"""A save that goes on late, after another job has saved the same tag: that version stays.

A process may be stopped for long and go on when its job has been restarted elsewhere. Wherever it was stopped on its
way to the commit, it finds that out, and takes back what it has done.
"""

from __future__ import annotations

from xla_ckpt.errors import SaveError
from xla_ckpt.storage.base import Store
from xla_ckpt.tags.directory import TagEntry, entry_of
from xla_ckpt.tags.names import OLD_PREFIX


def check_not_overtaken(store: Store, tag: str, sequence: int) -> None:
    """Refuse to commit a tag of which another job has committed a version since this save took its commit number.

    Raises:
        SaveError: It has.
    """
    found = entry_of(store, tag)
    if found is not None and found.sequence >= sequence:
        raise _overtaken(found, sequence)


def set_aside(store: Store, tag: str, sequence: int) -> None:
    """Give the old version of a tag, if there is one, the name under which it waits for its successor.

    What was moved is looked at only then: before the move another job could still put its own version there.

    Raises:
        SaveError: It is a version that another job has committed meanwhile; it has its name again.
        OSError: The storage refused.
    """
    if not store.has(tag):
        return
    old = OLD_PREFIX + tag
    store.rename(tag, old)
    found = entry_of(store, tag)
    if found is None or found.sequence < sequence:
        return
    error = _overtaken(found, sequence)
    if found.directory == old:
        try:
            store.rename(old, tag)
        except OSError as refused:  # a third job has the name by now, or else the next save gives it back
            raise error from refused
    raise error


def _overtaken(found: TagEntry, sequence: int) -> SaveError:
    return SaveError(
        "another job has saved this tag meanwhile",
        tag=found.tag,
        expected=f"commit {sequence - 1} or an earlier one",
        found=f"commit {found.sequence}",
        hint="That version stays. Two jobs that save to one directory need different tags.",
    )
