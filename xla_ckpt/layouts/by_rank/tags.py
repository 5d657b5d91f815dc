"""Tags of rank files in a root directory. Looks at names and time stamps only, and needs no framework."""

from __future__ import annotations

import re
from dataclasses import dataclass

from xla_ckpt.layouts.foreign_tags import time_text
from xla_ckpt.storage.base import Directory, Store
from xla_ckpt.tags.entry import TagEntry

_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTag:
    """A tag that another program wrote, with a file for each of its ranks."""

    tag: str
    complete: bool
    time: int
    """Time stamp (ns) of its newest file, or of its mark."""

    below: str = ""
    """Where in the tag's directory the files of the ranks lie: empty, or a path that ends with ``/``."""

    older: bool = False
    """Whether its files are called as an older version of the program called them."""

    def opened(self, store: Store) -> Directory:
        """The directory in which its files lie."""
        return store.open(self.tag)

    def entry(self) -> TagEntry:
        """What a listing shows of it."""
        return TagEntry(tag=self.tag, created=time_text(self.time), directory=self.tag, complete=self.complete)


def by_time(tag: RankTag) -> tuple[int, list[tuple[int, str]]]:
    """A key that puts the older tag first; of equally old ones that whose name has the smaller number."""
    parts = _DIGITS.split(tag.tag)
    return tag.time, [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def marked_tag(store: Store, tag: str, below: str = "") -> RankTag | None:
    """The tag with the marks ``checkpoint`` and ``done`` in a directory, or below a path in it; None if there is none.

    The second is that of a complete tag, and the newest one is that whose ``done`` is.
    """
    folder = f"{tag}/{below}".rstrip("/")
    if not any(store.is_directory(f"{folder}/{part}") for part in FOLDERS):
        return None
    done, begun = (modified(store, f"{folder}/{mark}") for mark in ("done", "checkpoint"))
    if done is None and begun is None:
        return None
    return RankTag(tag=tag, complete=done is not None, time=done or begun or 0, below=below)


FOLDERS = ("model", "optim")
"""The folders of such a tag in which the ranks have their files."""


def modified(store: Store, path: str) -> int | None:
    """The time stamp of a file; None if there is none."""
    try:
        return store.modified(path)
    except OSError:
        return None
