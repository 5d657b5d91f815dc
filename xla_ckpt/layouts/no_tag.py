"""What is said where a tag, or a root of tags, is asked for that is not there: where the tags are."""

from __future__ import annotations

from xla_ckpt.errors import CheckpointError, NoCheckpointError, storage_errors
from xla_ckpt.keywords import meant
from xla_ckpt.layouts.listing import all_tags, named_itself, roots_below, tag_names
from xla_ckpt.storage import door
from xla_ckpt.storage.base import Store
from xla_ckpt.tags.ledger_cleaning import check_not_lost
from xla_ckpt.tags.ledger_rules import Ledger
from xla_ckpt.tags.missing import no_such_tag
from xla_ckpt.tags.roots import root_of

MAX_LOOKED_INTO = 100
"""Directories that are looked into for the sake of a hint, at most."""

MAX_NAMED_ROOTS = 10
"""Directories that a hint names, at most."""


def no_tag(store: Store, tag: str | None) -> NoCheckpointError:
    """The error for a tag that is not there, or for a root without any (`tag` None)."""
    return with_hint(no_such_tag(root_of(store), tag), store)


def check_lies_there(store: Store) -> None:
    """Refuse a root where nothing lies at all, or whose tags are lost: its list would look like that of an empty one.

    Raises:
        NoCheckpointError: Nothing lies there.
        CorruptCheckpointError: Tags lie there, and the record of them is gone.
    """
    if root_of(store).is_certain():
        return
    if not store.is_directory(""):
        raise no_tag(store, None)
    if store.object_store is not None:
        with storage_errors("listing the tags", path=store.path):
            check_not_lost(store.object_store, Ledger)


def with_hint(error: NoCheckpointError, store: Store) -> NoCheckpointError:
    """The same error, with a hint at what other libraries have there, or at the root above."""
    tags = all_tags(store)
    foreign = [(layout.origin, entry.tag) for layout, entry in tags if layout is not None]
    if foreign:
        others = ", ".join(tag for _, tag in foreign[-10:])
        if len(foreign) == len(tags):
            error.problem += meant(error.tag, [tag for _, tag in foreign])
            error.hint = f"{foreign[-1][0]} wrote the tags there: {others}."
        else:
            error.hint = f"{error.hint or ''} {foreign[-1][0]} wrote others there: {others}.".lstrip()
    elif (inside := named_itself(store)) is not None:
        above, name = inside
        error.hint = f"This is a checkpoint by itself: pass it without a tag, or pass {above.path} and the tag {name}."
    elif not tags and not store.has("") and (beside := _tags_above(store)):
        error.hint = f"Nothing lies there. {beside}"
    elif not tags and (below := names_of_roots_below(store)):
        error.hint = f"There are checkpoints below it, in {below}: pass one of these directories."
    return error


def names_of_roots_below(store: Store) -> str:
    """The directories in a directory in which there are tags: a path was named that is not long enough. Empty if there
    are none, or it cannot be found out: it is only for a hint.
    """
    try:
        below = roots_below(store.path, levels=1, most=MAX_LOOKED_INTO)
    except (CheckpointError, OSError):
        return ""
    names = [path.rpartition("/")[2] for path, _ in below]
    return ", ".join(names[:MAX_NAMED_ROOTS]) + (" and others" if len(names) > MAX_NAMED_ROOTS else "")


def _tags_above(root: Store) -> str:
    """What tags there are in the directory above: where nothing lies, somebody may have named a tag by its path."""
    try:
        above, _ = door.above(root.path)
        tags = tag_names(above.look())
    except CheckpointError:
        return ""  # it is only for a hint
    return f"In {above.path} there are, oldest first: {', '.join(tags[-10:])}." if tags else ""
