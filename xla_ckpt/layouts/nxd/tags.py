"""Tags of neuronx-distributed in a root directory. Looks at names and time stamps only, and needs no framework.

``<root>/<tag>/checkpoint`` marks a tag, ``<root>/<tag>/done`` a complete one, and the newest is the one whose ``done``
is. The older layout has no marks: ``<root>/<tag>/tp_rank_00_pp_rank_00`` and its peers.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from xla_ckpt.tags.directory import is_ours
from xla_ckpt.tags.names import is_tag_name

LEGACY = re.compile(r"tp_rank_(\d{2,})_pp_rank_(\d{2,})(?:_dp_rank_(\d{2,}))?")
"""Name of a rank's file or directory in the older layout."""

_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class NxdTag:
    """A tag in one of neuronx-distributed's layouts."""

    tag: str
    path: str
    complete: bool
    legacy: bool
    time: int
    """Time stamp (ns) by which neuronx-distributed orders tags."""


def find(root: str, tag: str) -> NxdTag | None:
    """The tag in `root`; None if it is no tag of neuronx-distributed's, or one of ours."""
    if not is_tag_name(tag) or is_ours(root, tag):
        return None
    path = os.path.join(root, tag)
    done, begun = _time(path, "done"), _time(path, "checkpoint")
    if any(os.path.isdir(os.path.join(path, part)) for part in ("model", "optim")):
        if done is None and begun is None:
            return None
        return NxdTag(tag, path, done is not None, legacy=False, time=done or begun or 0)
    try:
        ranks = [name for name in os.listdir(path) if LEGACY.fullmatch(name)]
    except OSError:
        return None
    if not ranks:
        return None
    return NxdTag(tag, path, complete=True, legacy=True, time=max(_time(path, name) or 0 for name in ranks))


def complete_tags(root: str) -> list[NxdTag]:
    """The complete tags, oldest first; equal time stamps are ordered by the numbers in their names."""
    try:
        names = os.listdir(root)
    except OSError:
        return []
    found = [t for t in (find(root, name) for name in names) if t is not None and t.complete]
    return sorted(found, key=lambda t: (t.time, _natural(t.tag)))


def _natural(tag: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _DIGITS.split(tag)]


def _time(path: str, name: str) -> int | None:
    try:
        return os.stat(os.path.join(path, name)).st_mtime_ns
    except OSError:
        return None
