"""Tags of rank files in a root directory. Looks at names and time stamps only, and needs no framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xla_ckpt.layouts.by_rank.grid import RankName
from xla_ckpt.layouts.foreign_tags import time_text
from xla_ckpt.storage.base import Directory, Store, open_without_links
from xla_ckpt.tags.entry import TagEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTag:
    """A tag that another program wrote, with a file for each of its ranks."""

    tag: str
    complete: bool
    time: int
    """Time stamp (ns) of its newest file, or of its mark."""

    below: str = ""
    """Where in the tag's directory the files of the ranks lie: empty, or a path that ends with ``/``."""

    note: str = ""
    """What a listing says of it besides."""

    marked: bool = True
    """Whether anything but the names of its files says what it is."""

    def opened(self, store: Store) -> Directory:
        """The directory in which its files lie."""
        return open_without_links(store, self.tag)

    def entry(self) -> TagEntry:
        """What a listing shows of it."""
        created = time_text(self.time)
        return TagEntry(tag=self.tag, created=created, directory=self.tag, complete=self.complete, note=self.note)


def named_tag(store: Store, tag: str, names: Sequence[RankName]) -> RankTag | None:
    """The tag in a directory that has files of ranks with such names; None if it has none. It counts as complete."""
    times: list[int] = []
    for entry in store.names(tag):
        for name in names:
            if name.folder.at(entry) is not None:
                time = modified(store, f"{tag}/{entry}{name.file}")
                times += [] if name.file and time is None else [time or 0]
    return RankTag(tag=tag, complete=True, marked=False, time=max(times)) if times else None


def modified(store: Store, path: str) -> int | None:
    """The time stamp of a file; None if there is none."""
    try:
        return store.modified(path)
    except OSError:
        return None
