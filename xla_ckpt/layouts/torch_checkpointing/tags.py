"""torch_checkpointing's directories in a root directory. Looks at names and first bytes only, and needs no framework.

The item ``model`` of rank 3 is ``<tag>/model_3.pt``, unless the program gave the item another path. Where an item may
be loaded over another mesh, the file ``metadata.pkl`` is there, and says where its files lie.
A directory is complete when it has its name: until then that begins with ``tmp_``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from xla_ckpt.layouts.foreign_tags import by_numbers, time_text
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

_OF_RANK = re.compile(r"(.+)_(\d{1,9})(\.\w+)?")


def find_tag(store: Store, tag: str) -> TagEntry | None:
    """The directory of this name, if this library wrote it; else None."""
    if tag.startswith(UNFINISHED):
        return None
    try:
        names = store.names(tag)
        mark = next((name for name in sorted(names) if _is_mark(store, f"{tag}/{name}", name)), None)
        time = None if mark is None else store.modified(f"{tag}/{mark}")
    except OSError:
        return None
    return None if mark is None else TagEntry(tag=tag, created=time_text(time or 0), directory=tag)


def _is_mark(store: Store, path: str, name: str) -> bool:
    """Whether a file is one that shows whose the directory is."""
    if name == ITEMS_METADATA:
        return store.start_of(path, 1) == b"\x80"
    named = _OF_RANK.fullmatch(name)
    if named is None or named[3] != ".pt":
        return False
    start = store.start_of(path, _NAME_AT + len(STREAMED))
    return start.startswith(b"PK\3\4") and start[_NAME_AT:] == STREAMED


def tags_among(store: Store, names: Iterable[str]) -> list[TagEntry]:
    """Those of some directories that this library wrote, oldest first: steps are ordered by their numbers."""
    return by_numbers([entry for name in names if (entry := find_tag(store, name)) is not None])


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
