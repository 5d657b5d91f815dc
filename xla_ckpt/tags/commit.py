"""How a tag comes to be: a draft is filled, and becomes the tag in one step, or is thrown away.

On file systems orbax carries out the last step and the retention (`tags/orbax_dir.py`); it is imported in the
background, where commits are expected (`tags/orbax_import.py`). Stores that are no file systems have one rename each.
"""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import dataclass
from typing import Any

from xla_ckpt.storage.base import Directory, Store, rename_durably
from xla_ckpt.storage.local import LocalStore
from xla_ckpt.storage.undisturbed import undisturbed
from xla_ckpt.tags.cleaning import clean, remove, remove_unused
from xla_ckpt.tags.directory import TagEntry, entries
from xla_ckpt.tags.names import NEW_PREFIX, OLD_PREFIX
from xla_ckpt.tags.orbax_import import ORBAX, Span
from xla_ckpt.tags.overtaken import check_not_overtaken, set_aside
from xla_ckpt.tags.retention import TagFact, superfluous

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Draft:
    """A directory that will be a tag. Readers do not take it for one."""

    store: Store
    tag: str
    sequence: int
    """The commit number that the tag will have."""

    newest: TagEntry | None
    """The newest tag that can be read, as it was when the draft was made."""

    directory: Directory
    """Where its files go. Everything in it must be durable before the commit."""

    committed: bool = False
    """Whether it has become the tag: then its name may already be that of somebody else's draft."""

    @property
    def name(self) -> str:
        """Its name in the store."""
        return self.directory.name


def begin(store: Store, tag: str) -> Draft:
    """Make the directory that a save fills, after what earlier saves left behind has been removed.

    Raises:
        OSError: The storage refused.
    """
    store.prepare()
    clean(store)
    found = entries(store)
    return Draft(
        store=store,
        tag=tag,
        sequence=1 + max((entry.sequence for entry in found), default=0),
        newest=next((entry for entry in reversed(found) if entry.damage is None), None),
        directory=make_directory(store, NEW_PREFIX + tag),
    )


class Filling:
    """A context that begins a draft, and throws it away unless it is committed.

    What a signal handler raises comes when the draft is there, or is gone: nobody else would remove it.
    """

    def __init__(self, store: Store, tag: str) -> None:
        self._store, self._tag = store, tag
        self._draft: Draft | None = None

    def __enter__(self) -> Draft:
        try:
            with undisturbed():
                self._draft = begin(self._store, self._tag)
        except BaseException:
            self.__exit__()
            raise
        return self._draft

    def __exit__(self, *_: object) -> None:
        with undisturbed():
            if self._draft is not None:
                abandon(self._draft)


def make_directory(store: Store, name: str) -> Directory:
    """Make a directory of this name, or of a name that begins like it.

    The name is taken where another job saves the same tag, and where a save was killed on a file system without locks:
    there what it left looks as if it were in use, and a job that starts again must be able to save that tag.
    """
    for number in itertools.count():
        try:
            return store.make(f"{name}-{number}" if number else name)
        except FileExistsError:
            continue
    raise AssertionError("numbers do not end")


def expect(store: Store) -> None:
    """Have ready what a commit in this store takes, as soon as that can be: somebody will commit there, it seems."""
    if isinstance(store, LocalStore):
        ORBAX.begin()


def ready(store: Store) -> Span | None:
    """Wait until that is so; when it was made so, if it took something.

    Raises:
        ImportError: orbax cannot be imported.
    """
    if isinstance(store, LocalStore):
        ORBAX.module()
        return ORBAX.span
    return None


def commit(draft: Draft, *, pinned: bool, num_kept: int | None, report: Any = None) -> float:
    """Make the tag appear, in one step, and retire older ones.

    An old version of the tag stays readable until the new one is in place. That older tags could not be deleted is
    logged, and no error: the new one is there. `report` is plain JSON about the save, which the tag keeps for people; a
    store that is no file system keeps none.

    Returns:
        Seconds that retiring older tags took.

    Raises:
        SaveError: It was not committed; the tag is as it was before.
        OSError: Likewise.
        NotDurableError: It was committed, and a loss of power may undo that.
    """
    check_not_overtaken(draft.store, draft.tag, draft.sequence)
    module = ORBAX.module() if isinstance(draft.store, LocalStore) else None
    with undisturbed():  # orbax's threads would go on without a caller that has been interrupted
        if module is not None and isinstance(draft.store, LocalStore):
            retained: float = module.publish(draft, draft.store, pinned=pinned, num_kept=num_kept, report=report)
        else:
            retained = _publish(draft, num_kept)
        draft.committed = True
    return retained


def abandon(draft: Draft) -> None:
    """Let go of a draft; one that has not become a tag is removed: it may be why the storage is full."""
    draft.directory.close()
    if not draft.committed and draft.store.has(draft.name):
        # This save made it. Where there are no locks, `remove_unused` would leave it until it is old.
        remove(draft.store, draft.name)


def _publish(draft: Draft, num_kept: int | None) -> float:
    store, tag = draft.store, draft.tag
    set_aside(store, tag, draft.sequence)
    try:
        rename_durably(store, draft.name, tag)
    except OSError:
        if store.has(OLD_PREFIX + tag):
            store.rename(OLD_PREFIX + tag, tag)
        raise
    began = time.perf_counter()
    facts = [TagFact(e.tag, e.sequence, e.pinned) for e in entries(store)]
    for name in superfluous(facts, num_kept):
        remove_unused(store, name)
    return time.perf_counter() - began
