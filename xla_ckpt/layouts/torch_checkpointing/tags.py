"""torch_checkpointing's directories in a root directory. Looks at names and first bytes only, and needs no framework.

The item ``model`` of rank 3 is ``<tag>/model_3.pt``, unless the program gave the item another path. Where an item may
be loaded over another mesh, the file ``metadata.pkl`` is there, and says where its files lie.
A directory is complete when it has its name: until then that begins with ``tmp_``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from xla_ckpt.layouts.foreign_tags import time_text
from xla_ckpt.storage.base import Store
from xla_ckpt.tags.entry import TagEntry

ITEMS_METADATA = "metadata.pkl"
"""The file that says how items are cut."""

UNFINISHED = "tmp_"
"""What the names of directories begin with whose save has not ended."""

STREAMED = b"archive/data.pkl"
"""The first name in a zip of torch.save that was written into a stream, as this library does. One that was written into
a file begins with the name of the file."""

_NAME_AT = 30
"""Where this name stands in a zip."""

_OF_RANK = re.compile(r"(.+)_(0|[1-9]\d{0,8})(\.\w+)?")

_ITEM = re.compile(r"[A-Za-z0-9_-]+")
"""What an item may be called."""


def find_tag(store: Store, tag: str) -> TagEntry | None:
    """The directory of this name, if this library wrote it; else None."""
    if tag.startswith(UNFINISHED):
        return None
    try:
        mark = _mark(store, tag, store.names(tag))
        time = None if mark is None else store.modified(f"{tag}/{mark}")
    except OSError:
        return None
    return None if mark is None else TagEntry(tag=tag, created=time_text(time or 0), directory=tag)


def _mark(store: Store, tag: str, names: Iterable[str]) -> str | None:
    """A file that shows whose the directory is; None if it is not theirs.

    Without metadata it is theirs if rank 0 has a file of an item, and the first file of each item was written into a
    stream: others call files like this, too, but give torch.save a path.
    """
    if ITEMS_METADATA in names and store.start_of(f"{tag}/{ITEMS_METADATA}", 1) == b"\x80":
        return ITEMS_METADATA
    first: dict[str, int] = {}
    for name in names:
        named = _OF_RANK.fullmatch(name)
        if named is not None and named[3] == ".pt" and _ITEM.fullmatch(named[1]):
            first[named[1]] = min(int(named[2]), first.get(named[1], int(named[2])))
    marks = sorted(file_of(item, rank) for item, rank in first.items())
    if 0 not in first.values() or not all(_is_streamed(store, f"{tag}/{mark}") for mark in marks):
        return None
    return marks[0]


def _is_streamed(store: Store, path: str) -> bool:
    start = store.start_of(path, _NAME_AT + len(STREAMED))
    return start.startswith(b"PK\3\4") and start[_NAME_AT:] == STREAMED


def items_by_name(names: Iterable[str]) -> dict[str, dict[int, str]]:
    """Item -> rank -> file, as the names of the files say.

    >>> items_by_name(["model_0.pt", "model_1.pt", "st/config.json"])
    {'model': {0: 'model_0.pt', 1: 'model_1.pt'}, 'st/config': {0: 'st/config.json'}}
    """
    items: dict[str, dict[int, str]] = {}
    for name in sorted(names):
        named = _OF_RANK.fullmatch(name)
        folder, slash, last = name.rpartition("/")
        item, rank = (named[1], int(named[2])) if named else (folder + slash + last.partition(".")[0], 0)
        items.setdefault(item, {}).setdefault(rank, name)
    return items


def file_of(item: str, rank: int) -> str:
    """The file of an item, unless the program says otherwise."""
    return f"{item}_{rank}.pt"


def rank_of(path: str) -> int | None:
    """The rank whose file this is, unless the program called it otherwise; None if it is none of a rank."""
    named = _OF_RANK.fullmatch(path)
    return None if named is None else int(named[2])


def world_of(items: Mapping[str, Mapping[int, str]]) -> int:
    """How many ranks saved, as far as the files show it."""
    return 1 + max((rank for files in items.values() for rank in files), default=0)
