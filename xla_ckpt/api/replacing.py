"""Where a new tag may go, and what it may replace: a tag of its name, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from xla_ckpt.errors import StorageError, UsageError, storage_errors
from xla_ckpt.layouts.base import Layout
from xla_ckpt.layouts.listing import find_foreign, named_itself
from xla_ckpt.logs import get_logger
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.door import working_directory
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tags.listing import names_in
from xla_ckpt.tags.missing import check_is_no_tag
from xla_ckpt.tags.names import LEDGER, is_tag_name
from xla_ckpt.tags.roots import root_of

logger = get_logger(__name__)

MAX_SHOWN_NAMES = 5
"""Names of what lies there that an error has."""


def check_place(store: Store, tag: str) -> None:
    """Refuse a tag whose name something else has than a tag of ours, and a root that is a checkpoint itself.

    Raises:
        UsageError: Something else has it; or the root is a tag, or is not there, and the tag's name is that of a root.
        StorageError: It cannot be looked at.
    """
    if store.object_store is not None:
        _check_in_object_store(store.look(), tag)
        return
    _check_is_root(store)
    if not store.has(tag):
        here = working_directory()
        if here is not None and not store.has("") and here.is_directory(tag) and root_of(here).is_root(tag):
            raise UsageError(
                "the path and the tag seem to be swapped",
                path=store.path,
                tag=tag,
                found=f"{tag} is a directory with tags, and {store.path} is not there",
                hint="The path of the root comes first, and then the tag.",
            )
        return
    root = root_of(store)
    if root.is_ours(tag):
        return
    if (foreign := _foreign_tag(store, tag)) is not None:
        _check_unfinished(store, tag, *foreign)
        logger.warning("%s: what another library began to save as tag %s will be replaced", store.path, tag)
        return
    with storage_errors("looking at what has the tag's name", path=store.path, tag=tag):
        names = store.names(tag) if store.is_directory(tag) else None
    if names == []:
        return
    is_root = names is not None and root.is_root(tag)
    kind = "a root with" if is_root else "a directory with"
    raise UsageError(
        "what has the name of the new tag is no tag, and would be lost",
        path=store.path,
        tag=tag,
        found="a file or a link" if names is None else f"{kind} {_some(names)}",
        hint=f"To save in that root, pass {store.path}/{tag} as the path." if is_root else "Give the tag another name.",
    )


def _check_in_object_store(store: Store, tag: str) -> None:
    """Where tags lie under names of their own: a checkpoint of another library's is not lost there, but hidden.

    One listing answers it for most saves. `LedgerRoot.hold` looks whether the root is a tag of ours.
    """
    try:
        names = names_in(store)
        if LEDGER not in names and names:
            _check_is_no_other_checkpoint(store)
        if tag in names and not root_of(store).is_ours(tag) and (foreign := _foreign_tag(store, tag)) is not None:
            _check_unfinished(store, tag, *foreign)
    except StorageError as error:
        # Who may only write there can save all the same, and what is wrong with the storage a save meets next.
        logger.debug("%s: what lies there cannot be listed: %s", store.path, error)


def _foreign_tag(store: Store, name: str) -> tuple[Layout, TagEntry] | None:
    """What another library has saved as a tag of this name, or has begun to save; None if it is none."""
    foreign = find_foreign(store, name)
    return foreign if foreign is not None and foreign[0].tagged else None


def _check_unfinished(store: Store, tag: str, layout: Layout, entry: TagEntry) -> None:
    """Refuse to replace a checkpoint of another library that is complete, or was so once: a part may be left."""
    if entry.complete or entry.damage is not None:
        raise UsageError(
            "a checkpoint of another library has the name of the new tag",
            path=store.path,
            tag=tag,
            found=f"one that {layout.origin or layout.name} wrote",
            hint=f"Give the new tag another name, or first move {store.path}/{tag} away.",
        )


def _check_is_root(store: Store) -> None:
    """Refuse a root that is itself a tag: retention would remove the tags in it with it."""
    check_is_no_tag(store.path, root_of)
    if not store.is_directory("") or not root_of(store).is_root(""):  # most saves go to a root that is one
        _check_is_no_other_checkpoint(store)


def _check_is_no_other_checkpoint(store: Store) -> None:
    """Refuse a root that is a checkpoint of another library, which the tags in it would hide."""
    if (itself := named_itself(store)) is None:
        return
    above, name = itself
    if (foreign := find_foreign(above, name)) is not None:
        layout, _ = foreign
        raise UsageError(
            f"this is a checkpoint that {layout.origin} wrote, and no root of tags"
            if layout.tagged
            else f"this is a checkpoint itself (layout {layout.name!r}), and no root of tags",
            path=store.path,
            hint=f"Pass {above.path}, and the name of the new tag (convert: as_tag= (--as)); or a new directory.",
        )


def _some(names: Sequence[str]) -> str:
    shown = sorted(names, key=lambda name: (not is_tag_name(name), name))[:MAX_SHOWN_NAMES]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")
