"""The error for a tag that is not there: it says what there is in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xla_ckpt.errors import CheckpointError, NoCheckpointError, UsageError
from xla_ckpt.keywords import meant
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.door import above, store_at
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tags.names import NEW_PREFIX, is_tag_name
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


def followed(store: Store, tag: str) -> str:
    """Return the name of the tag that is meant by a name: that to which a link of the program's own leads, such as
    ``latest``, or the name itself.

    Raises:
        UsageError: It is a link out of the root.
    """
    here, address = store.address("").rstrip("/"), store.address(tag) if is_tag_name(tag) else ""
    if address in ("", f"{here}/{tag}") or _is_file(store_at(address)):  # caches have links to files
        return tag
    place, _, name = address.rpartition("/")
    if place != here:
        raise UsageError(
            "this is a link out of the root, which is not followed",
            path=store.path,
            tag=tag,
            expected="a tag, or a link to a tag of the same root",
            found=address,
            hint="Pass the path of the root of that tag.",
        )
    return name


def _is_file(store: Store) -> bool:
    return store.has("") and not store.is_directory("")


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
        hint=_link(root.store, tag) or _what_is_there(root, tags),
    )


def _link(store: Store, tag: str | None) -> str:
    """What is said of a link: only reads by its name follow it."""
    if tag is None or store.file_system is None or not is_tag_name(tag) or not store.has(tag):
        return ""
    try:
        name = followed(store, tag)
    except UsageError as error:
        return f"It is a link to {error.found}, and counts as no tag."
    return "" if name == tag else f"It is a link to {name}: name that tag."


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
