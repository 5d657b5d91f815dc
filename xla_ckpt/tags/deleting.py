"""Deleting a tag by hand, beside saves and readers that run meanwhile: it goes as retention would have it go."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from xla_ckpt.errors import StorageError, UsageError, storage_errors
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tags.facts import facts_of
from xla_ckpt.tags.kept import superfluous
from xla_ckpt.tags.listing import looked_into
from xla_ckpt.tags.missing import existing, no_such_tag
from xla_ckpt.tags.retention import Retention
from xla_ckpt.tags.root import Root


def delete(root: Root, tag: str, *, force: bool) -> None:
    """Delete a tag of ours, durably. Who has it open reads on; its files go when nobody does any more.

    Args:
        root: Where it is.
        tag: Which tag.
        force: Delete it although it is pinned, being read, or the last tag, or the last one that can be read.

    Raises:
        NoCheckpointError: There is no such tag.
        UsageError: It is pinned, being read, or the last one, without `force`; or a save of this tag is running.
        StorageError: The storage refused.
    """
    check_deletable(root, [tag], force=force)
    try:
        root.retire(tag)
        root.clean()
    except FileNotFoundError:
        raise no_such_tag(root, tag) from None  # a save's retention came first
    except OSError as error:
        raise StorageError.of(error, "deleting a tag", path=root.path, tag=tag) from error


def check_deletable(root: Root, tags: Sequence[str], *, force: bool) -> None:
    """Refuse to delete tags of ours if one of them must stay. Each is deleted by itself: this says it beforehand.

    Raises:
        CheckpointError: As `delete`.
    """
    entries = [existing(root, tag) for tag in tags]
    for entry in entries:
        if root.is_written(entry.tag):
            raise busy(root, entry.tag)
    if not force:
        others = [other for other in root.entries() if other.tag not in tags]
        for entry in entries:
            _check_dispensable(root, entry, others)


def retire_superfluous(root: Root, retention: Retention) -> None:
    """Delete the tags that a policy does not keep, but for those that somebody reads.

    Raises:
        StorageError: The storage refused.
    """
    with storage_errors("deleting older tags", path=root.path):
        for tag in superfluous(facts_of(root.store, root.entries()), retention):
            with contextlib.suppress(FileNotFoundError):  # another job has retired it
                if not root.is_read(tag):
                    root.retire(tag)
        root.clean()


def busy(root: Root, tag: str) -> UsageError:
    """The error for a tag that somebody writes."""
    return UsageError("a save of this tag is running", path=root.path, tag=tag, hint="Try again when it has ended.")


def _check_dispensable(root: Root, entry: TagEntry, others: Sequence[TagEntry]) -> None:
    if entry.pinned:
        problem, hint = "this tag is pinned", "Unpin it first"
    elif not others:
        problem, hint = "this is the last tag that this library has here", "Save another one first"
    elif not any(_is_sound(root, other) for other in reversed(others)) and _is_sound(root, entry):
        problem, hint = "this is the last tag here whose manifest can be read", "Save another one first"
    elif root.is_read(entry.tag):
        problem, hint = "somebody reads this tag, or may do so", "Try again later"
    else:
        return
    raise UsageError(problem, path=root.path, tag=entry.tag, hint=f"{hint}, or say force=True (--force).")


def _is_sound(root: Root, entry: TagEntry) -> bool:
    return looked_into(root.store, entry).damage is None
