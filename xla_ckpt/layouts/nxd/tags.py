"""By which files a tag of neuronx-distributed's is known. It needs no framework."""

from __future__ import annotations

import re

from xla_ckpt.layouts.by_rank.grid import RankName
from xla_ckpt.layouts.by_rank.tags import RankTag, modified
from xla_ckpt.storage.base import Store

TAG_MARKS = {"checkpoint": b"1", "done": b"1"}
"""Files by which neuronx-distributed finds a tag, and a complete one. In tags of ours the manifest says that, too."""

_DIGITS = re.compile(r"(\d+)")

FOLDERS = ("model", "optim")
"""The folders of such a tag in which the ranks have their files."""

OF_RANK = RankName("dp_rank_{dp:02}_tp_rank_{tp:02}_pp_rank_{pp:02}.pt")
OF_EXPERTS = RankName("dp_rank_{dp:02}_ep_rank_{ep:02}_tp_rank_{tp:02}_pp_rank_{pp:02}.pt")
"""What the file of a rank is called in a job without and with expert parallelism."""

RANK_FILES = {f: tuple(RankName(f"{f}/{name.template}") for name in (OF_RANK, OF_EXPERTS)) for f in FOLDERS}
"""The same with the folders before them."""


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


def by_time(tag: RankTag) -> tuple[int, list[tuple[int, str]]]:
    """A key that puts the older tag first; of equally old ones that whose name has the smaller number."""
    parts = _DIGITS.split(tag.tag)
    return tag.time, [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
