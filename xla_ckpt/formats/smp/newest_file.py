"""Reconcile SMP's file ``newest`` with the checkpoint directories in a root.

SMP only reads `newest`, which it rewrites after a save. Our saves are committed before that: the directories decide,
and `newest` is made to agree with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from xla_ckpt.formats.smp.tags import NEWEST, PARTIAL, read_newest_lines, sort_newest_lines
from xla_ckpt.formats.tags import list_all_tags
from xla_ckpt.storage.resolve import PathLike, open_store


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRoot:
    """The partial checkpoints in a root directory."""

    lines: tuple[str, ...] | None
    """Those of `newest`; None if there is no such file."""

    order: tuple[str, ...]
    """The directories that there are, oldest first."""

    theirs: tuple[str, ...]
    """Those of them that have no manifest of ours."""


def read_partial_root(path: PathLike) -> PartialRoot:
    """What lies in a root directory.

    Raises:
        StorageError: It cannot be read.
    """
    store = open_store(path)
    tags = [(layout is None, entry.tag) for layout, entry in list_all_tags(store) if entry.tag.endswith(PARTIAL)]
    lines = tuple(read_newest_lines(store)) if store.has(NEWEST) else None
    order = reconcile_newest(lines or (), [tag for _, tag in tags], store.is_directory)
    ours = {tag for is_ours, tag in tags if is_ours}
    return PartialRoot(lines=lines, order=tuple(order), theirs=tuple(t for t in order if t not in ours))


def reconcile_newest(lines: Sequence[str], complete: Sequence[str], is_there: Callable[[str], bool]) -> list[str]:
    """The lines of `newest` that agree with the directories.

    Each directory stands there once. One that is listed, and of which nobody can tell whether it is complete, stays
    listed, before the others.

    Args:
        lines: Those that are there.
        complete: The complete directories, oldest first.
        is_there: Says whether there is a directory of a name.

    >>> reconcile_newest(["a", "b", "a", "old", "gone"], ["b", "c"], {"old"}.__contains__)
    ['old', 'b', 'c']
    """
    others = [name for name in sort_newest_lines(lines) if name not in complete and is_there(name)]
    return [*others, *complete]


def find_excess_directories(order: Sequence[str], smp_directories: Iterable[str], keep: int) -> list[str]:
    """Those of SMP's own directories that are too many, oldest first. Saves of this library count their own.

    >>> find_excess_directories(["a", "b", "c", "d"], ["a", "b"], 3)
    ['a']
    """
    own = set(smp_directories)
    return [name for name in order[: max(len(order) - keep, 0)] if name in own]
