"""Tags of neuronx-distributed in a root directory. Looks at names and time stamps only, and needs no framework.

``<root>/<tag>/checkpoint`` marks a tag, ``<root>/<tag>/done`` a complete one, and the newest is the one whose ``done``
is. The older layout has no marks: ``<root>/<tag>/tp_rank_00_pp_rank_00`` and its peers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from xla_ckpt.layouts.foreign_tags import time_text
from xla_ckpt.storage.base import Store
from xla_ckpt.tags.entry import TagEntry
from xla_ckpt.tags.listing import names_in
from xla_ckpt.tags.roots import may_be_foreign

LEGACY = re.compile(r"tp_rank_(\d{2,})_pp_rank_(\d{2,})(?:_dp_rank_(\d{2,}))?")
"""Name of a rank's file or directory in the older layout."""

LEGACY_OPTIMIZER = re.compile(r"optim\.dp_rank_(\d{2,})\.tp_rank_(\d{2,})")
"""Name of a file that `save_sharded_state_dict` of a ZeRO-1 optimizer leaves beside them. It names no stage."""

_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class NxdTag:
    """A tag that neuronx-distributed wrote."""

    tag: str
    complete: bool
    legacy: bool
    """Whether it has the older layout."""

    time: int
    """Time stamp (ns) by which neuronx-distributed orders tags."""

    below: str = ""
    """Where in the tag's directory the files of the ranks lie: empty, or a path that ends with ``/``."""

    def entry(self) -> TagEntry:
        """What a listing shows of it."""
        return TagEntry(tag=self.tag, created=time_text(self.time), directory=self.tag, complete=self.complete)


def find_nxd_tag(store: Store, tag: str) -> NxdTag | None:
    """The tag of this name; None if it is no tag of neuronx-distributed's, or one of ours."""
    if not may_be_foreign(store, tag):
        return None
    if (marked := marked_tag(store, tag)) is not None:
        return marked
    try:
        ranks = [name for name in store.names(tag) if LEGACY.fullmatch(name)]
    except OSError:
        return None
    if not ranks:
        return None
    time = max(_time(store, f"{tag}/{name}") or 0 for name in ranks)
    return NxdTag(tag=tag, complete=True, legacy=True, time=time)


def marked_tag(store: Store, tag: str, below: str = "") -> NxdTag | None:
    """The tag of the present layout in a directory, or below a path in it; None if there is none."""
    folder = f"{tag}/{below}".rstrip("/")
    if not any(store.is_directory(f"{folder}/{part}") for part in ("model", "optim")):
        return None
    done, begun = (_time(store, f"{folder}/{mark}") for mark in ("done", "checkpoint"))
    if done is None and begun is None:
        return None
    return NxdTag(tag=tag, complete=done is not None, legacy=False, time=done or begun or 0, below=below)


def complete_nxd_tags(store: Store) -> list[NxdTag]:
    """The complete tags, oldest first; equal time stamps are ordered by the numbers in their names.

    Raises:
        StorageError: The directory cannot be read.
    """
    complete = [t for t in (find_nxd_tag(store, name) for name in names_in(store)) if t is not None and t.complete]
    return sorted(complete, key=lambda t: (t.time, _natural(t.tag)))


def _natural(tag: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _DIGITS.split(tag)]


def _time(store: Store, path: str) -> int | None:
    try:
        return store.modified(path)
    except OSError:
        return None
