"""The error for a tag that is not there: it says what there is in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xla_ckpt.errors import CheckpointError, NoCheckpointError, UsageError
from xla_ckpt.keywords import meant
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.door import above
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tags.names import NEW_PREFIX
from xla_ckpt.tags.root import Root


def check_is_no_tag(path: str, root_of: Callable[[Store], Root]) -> None:
    """Refuse a root that is itself a tag of the root above it, which `root_of` makes of a store.

    Raises:
        UsageError: It is one.
    """
    try:
        store, name = above(path)
    except UsageError:
        return  # nothing is above it
    if root_of(store).is_ours(name):
        raise UsageError(
            "this is a tag, and no root of tags",
            path=path,
            hint=f"Pass {store.path}, and the name of the new tag (convert: as_tag= (--as)).",
        )


def existing(root: Root, tag: str) -> TagEntry:
    """What a root has under a name.

    Raises:
        NoCheckpointError: Nothing.
    """
    entry = root.entry(tag)
    if entry is None:
        raise no_such_tag(root, tag)
    return entry


def no_such_tag(root: Root, tag: str | None) -> NoCheckpointError:
    """The error for a tag that is not there, or for a root without any (`tag` None)."""
    try:
        tags = [entry.tag for entry in root.entries()]
    except (OSError, CheckpointError):
        tags = []
    return NoCheckpointError(
        f"there is no such checkpoint{meant(tag, tags)}" if tag else "there is no checkpoint",
        path=root.path,
        tag=tag,
        hint=_what_is_there(root, tags),
    )


def _what_is_there(root: Root, tags: Sequence[str]) -> str:
    """What a root directory holds in place of the tag that was looked for: other tags, or what else lies there."""
    store = root.store
    if not store.is_directory(""):
        return "It is a file." if store.has("") else "Nothing lies there."
    if tags:
        return f"Tags there, oldest first: {', '.join(tags[-10:])}."
    try:
        unfinished = [name for name in store.names() if name.startswith(NEW_PREFIX)]
    except OSError:
        unfinished = []
    return "No tag of this library is there" + (f"; {len(unfinished)} unfinished." if unfinished else ".")
