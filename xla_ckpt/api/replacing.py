"""Where a new tag may go, and what it may replace: a tag of its name, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from xla_ckpt.errors import UsageError, storage_errors
from xla_ckpt.layouts.listing import find_foreign, named_itself
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.door import store_at
from xla_ckpt.tags.missing import check_is_no_tag
from xla_ckpt.tags.names import is_tag_name
from xla_ckpt.tags.roots import root_of

logger = logging.getLogger(__name__)

MAX_SHOWN_NAMES = 5
"""Names of what lies there that an error has."""


def check_place(store: Store, tag: str) -> None:
    """Refuse a tag whose name something else has than a tag, which would be lost; and a root that is a tag itself.

    Raises:
        UsageError: Something else has it; or the root is a tag, or is not there, and the tag's name is that of a root.
        StorageError: It cannot be looked at.
    """
    if store.file_system is None:
        # There a tag lies below a name that nobody else gives. `LedgerRoot.hold` looks whether the root is a tag: the
        # caller does not wait for that.
        return
    _check_is_root(store)
    if not store.has(tag):
        here = store_at(".")
        if not store.has("") and here.is_directory(tag) and root_of(here).is_root(tag):
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
    foreign = find_foreign(store, tag)
    if foreign is not None and foreign[0].tagged:
        logger.warning("%s: tag %s, which %s wrote, will be replaced", store.path, tag, foreign[0].origin or "a layout")
        return
    with storage_errors("looking at what has the tag's name", path=store.path, tag=tag):
        names = store.names(tag) if store.is_directory(tag) else None
    if names == []:
        return
    is_root = names is not None and root.is_root(tag)
    raise UsageError(
        "what has the name of the new tag is no tag, and would be lost",
        path=store.path,
        tag=tag,
        found="a file" if names is None else f"{'a root with' if is_root else 'a directory with'} {_some(names)}",
        hint=f"To save in that root, pass {store.path}/{tag} as the path." if is_root else "Give the tag another name.",
    )


def _check_is_root(store: Store) -> None:
    """Refuse a root that is itself a tag.

    Retention would remove the tags in a tag of ours with it. Those in a checkpoint of another library would hide it.

    Raises:
        UsageError: It is one.
    """
    check_is_no_tag(store.path, root_of)
    if store.is_directory("") and root_of(store).is_root(""):
        return  # most saves
    if (itself := named_itself(store)) is None:
        return
    above, name = itself
    foreign = find_foreign(above, name)
    if foreign is not None and foreign[0].tagged:
        raise UsageError(
            f"this is a checkpoint that {foreign[0].origin} wrote, and no root of tags",
            path=store.path,
            hint=f"Pass {above.path}, and the name of the new tag; or a new directory.",
        )


def _some(names: Sequence[str]) -> str:
    shown = sorted(names, key=lambda name: (not is_tag_name(name), name))[:MAX_SHOWN_NAMES]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")
