"""Deleting a tag by hand, beside saves and readers that run meanwhile: it goes as retention would have it go."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from xla_ckpt.errors import StorageError, UsageError, storage_errors
from xla_ckpt.tags.cleaning import retire_each
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tags.facts import tags_to_retire
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
    retire(root, tag)
    with storage_errors("deleting a tag", path=root.path, tag=tag):
        root.clean()


def retire(root: Root, tag: str) -> None:
    """Have a tag disappear that may be deleted, durably. Its files go with `Root.clean`.

    Raises:
        NoCheckpointError: There is no such tag.
        StorageError: The storage refused.
    """
    try:
        root.retire(tag)
    except FileNotFoundError:
        raise no_such_tag(root, tag) from None  # a save's retention came first
    except OSError as error:
        raise StorageError.of(error, "deleting a tag", path=root.path, tag=tag) from error


def check_deletable(root: Root, tags: Sequence[str], *, force: bool) -> None:
    """Refuse to delete tags of ours if one of them must stay. Each is deleted by itself: this says it beforehand.

    Raises:
        CheckpointError: As `delete`.
    """
    for tag in tags:
        existing(root, tag)
    for refusal in refusals(root, tags, force=force).values():
        raise refusal


def refusals(root: Root, tags: Collection[str], *, force: bool) -> dict[str, UsageError]:
    """Why some of these tags of ours must stay. The root is listed once, and one manifest of those that stay is read.

    Raises:
        CheckpointError: The root cannot be read.
    """
    entries, doomed = root.entries(), frozenset(tags)
    others = [entry for entry in entries if entry.tag not in doomed]
    is_sound = force or any(_is_sound(root, other) for other in reversed(others))
    refused: dict[str, UsageError] = {}
    for entry in entries:
        if entry.tag not in doomed:
            continue
        if root.is_written(entry.tag):
            refused[entry.tag] = busy(root, entry.tag)
        elif not force and (refusal := _refusal(root, entry, is_last=not others, is_last_sound=not is_sound)):
            refused[entry.tag] = refusal
    return refused


def retire_superfluous(root: Root, retention: Retention) -> None:
    """Delete the tags that a policy does not keep, but for those that somebody reads. One that cannot be moved is told
    of once.

    Raises:
        StorageError: The storage refused to list them, or to clean up.
    """

    def retire_unread(tag: str) -> None:
        if not root.is_read(tag):
            root.retire(tag)

    with storage_errors("deleting older tags", path=root.path):
        doomed = tags_to_retire(root.store, root.entries(), retention)
        retire_each(root.store, doomed, retire_unread)
        root.clean()


def busy(root: Root, tag: str) -> UsageError:
    """The error for a tag that somebody writes."""
    return UsageError("a save of this tag is running", path=root.path, tag=tag, hint="Try again when it has ended.")


def _refusal(root: Root, entry: TagEntry, *, is_last: bool, is_last_sound: bool) -> UsageError | None:
    """Why a tag must stay, unless it is forced to go. `is_last_sound`: no other one can be read."""
    if entry.pinned:
        problem, hint = "this tag is pinned", "Unpin it first"
    elif is_last:
        problem, hint = "this is the last tag that this library has here", "Save another one first"
    elif is_last_sound and _is_sound(root, entry):
        problem, hint = "this is the last tag here whose manifest can be read", "Save another one first"
    elif root.is_read(entry.tag):
        problem, hint = "somebody reads this tag, or may do so", "Try again later"
    else:
        return None
    return UsageError(problem, path=root.path, tag=entry.tag, hint=f"{hint}, or say force=True (--force).")


def _is_sound(root: Root, entry: TagEntry) -> bool:
    return looked_into(root.store, entry).damage is None
