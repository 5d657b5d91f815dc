"""What a new tag may replace: a tag of its name, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from xla_ckpt.errors import UsageError, storage_errors
from xla_ckpt.layouts.registry import find_foreign
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.door import store_at
from xla_ckpt.tags.names import is_tag_name
from xla_ckpt.tags.roots import root_of

logger = logging.getLogger(__name__)

MAX_SHOWN_NAMES = 5
"""Names of what lies there that an error has."""


def check_replaceable(store: Store, tag: str) -> None:
    """Refuse a tag whose name something else has than a tag: it would be lost.

    Raises:
        UsageError: Something else has it; or the root is not there, and the tag's name is that of a root.
        StorageError: It cannot be looked at.
    """
    if store.file_system is None:  # a tag of an object store lies below a name that nobody else gives
        return
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


def _some(names: Sequence[str]) -> str:
    shown = sorted(names, key=lambda name: (not is_tag_name(name), name))[:MAX_SHOWN_NAMES]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")
