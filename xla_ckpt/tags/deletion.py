"""Delete tags outside of a save, with checks: pinned, in use, or the last readable tag."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from xla_ckpt.errors import StorageError, UsageError, wrap_os_errors
from xla_ckpt.tags.directory_operations import retire_each
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tags.listing import check_entry
from xla_ckpt.tags.retention import Retention
from xla_ckpt.tags.retention_inputs import select_tags_to_retire
from xla_ckpt.tags.root import Root, make_no_such_tag_error, require_tag


def delete_tag(root: Root, tag: str, *, force: bool) -> None:
    """Delete a native tag durably. Open readers keep its files, which are deleted once no reader has them open.

    Args:
        root: Root that contains it.
        tag: Name of the tag.
        force: Delete it even if it is pinned, being read, the last tag, or the last readable tag.

    Raises:
        NoCheckpointError: The tag does not exist.
        UsageError: The tag is pinned, being read or the last one, and `force` is False; or a save of this tag is
            running.
        StorageError: The storage failed.
    """
    check_deletable(root, [tag], force=force)
    retire_tag(root, tag)
    with wrap_os_errors("deleting a tag", path=root.path, tag=tag):
        root.clean()


def retire_tag(root: Root, tag: str) -> None:
    """Remove a deletable tag from the root durably. `Root.clean` deletes its files.

    Raises:
        NoCheckpointError: The tag does not exist.
        StorageError: The storage failed.
    """
    try:
        root.retire(tag)
    except FileNotFoundError:
        raise make_no_such_tag_error(root, tag) from None  # retired by a concurrent save
    except OSError as error:
        raise StorageError.of(error, "deleting a tag", path=root.path, tag=tag) from error


def check_deletable(root: Root, tags: Sequence[str], *, force: bool) -> None:
    """Raise an error if one of these native tags must not be deleted, before the first one is deleted.

    Raises:
        CheckpointError: As `delete_tag`.
    """
    for tag in tags:
        require_tag(root, tag)
    for refusal in find_refusals(root, tags, force=force).values():
        raise refusal


def find_refusals(root: Root, tags: Collection[str], *, force: bool) -> dict[str, UsageError]:
    """Return the errors for the native tags that must not be deleted. Lists the root once and reads few
    manifests.

    Raises:
        CheckpointError: The root cannot be read.
    """
    entries, doomed = root.list_entries(), frozenset(tags)
    others = [entry for entry in entries if entry.tag not in doomed]
    is_sound = force or any(_is_readable(root, other) for other in reversed(others))
    refused: dict[str, UsageError] = {}
    for entry in entries:
        if entry.tag not in doomed:
            continue
        if root.is_written(entry.tag):
            refused[entry.tag] = make_busy_error(root, entry.tag)
        elif not force and (refusal := _find_refusal(root, entry, is_last=not others, is_last_sound=not is_sound)):
            refused[entry.tag] = refusal
    return refused


def apply_retention(root: Root, retention: Retention) -> None:
    """Delete the tags that a policy does not keep, except those being read. A failure to move one is logged once.

    Raises:
        StorageError: The storage failed to list the tags or to clean up.
    """

    def retire_unread(tag: str) -> None:
        if not root.is_read(tag):
            root.retire(tag)

    with wrap_os_errors("deleting older tags", path=root.path):
        doomed = select_tags_to_retire(root.store, root.list_entries(), retention)
        retire_each(root.store, doomed, retire_unread)
        root.clean()


def make_busy_error(root: Root, tag: str) -> UsageError:
    """Return the error for a tag that is being written."""
    return UsageError("a save of this tag is running", path=root.path, tag=tag, hint="Try again when it has ended.")


def _find_refusal(root: Root, entry: TagEntry, *, is_last: bool, is_last_sound: bool) -> UsageError | None:
    """Return the error for a tag that may only be deleted with `force`, otherwise None.

    `is_last_sound` is True if no other tag can be read.
    """
    if entry.pinned:
        problem, hint = "this tag is pinned", "Unpin it first"
    elif is_last:
        problem, hint = "this is the last tag that this library has here", "Save another one first"
    elif is_last_sound and _is_readable(root, entry):
        problem, hint = "this is the last tag here whose manifest can be read", "Save another one first"
    elif root.is_read(entry.tag):
        problem, hint = "somebody reads this tag, or may do so", "Try again later"
    else:
        return None
    return UsageError(problem, path=root.path, tag=entry.tag, hint=f"{hint}, or say force=True (--force).")


def _is_readable(root: Root, entry: TagEntry) -> bool:
    return check_entry(root.store, entry).damage is None
