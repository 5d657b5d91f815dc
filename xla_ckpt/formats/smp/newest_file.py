"""Reconcile the SMP file ``newest`` with the checkpoint directories in a root.

SMP rewrites `newest` after a save, and only reads it otherwise. Our saves are committed before that, so the directories
are authoritative, and `newest` is updated to match them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from xla_ckpt.formats.smp.tags import NEWEST, PARTIAL, read_newest_lines, sort_newest_lines
from xla_ckpt.formats.tags import list_all_tags
from xla_ckpt.storage.resolve import PathLike, open_store


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRoot:
    """Partial checkpoints in a root directory."""

    lines: tuple[str, ...] | None
    """Lines of `newest`; None if the file does not exist."""

    order: tuple[str, ...]
    """Existing directories, oldest first."""

    theirs: tuple[str, ...]
    """Existing directories without our manifest, oldest first."""


def read_partial_root(path: PathLike) -> PartialRoot:
    """Read the partial checkpoints in a root directory.

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
    """Return the lines of `newest` that match the directories.

    Each directory is listed once. A listed directory that may be incomplete remains listed, before the others.

    Args:
        lines: The existing lines.
        complete: The complete directories, oldest first.
        is_there: Function that returns True if a directory of a name exists.

    >>> reconcile_newest(["a", "b", "a", "old", "gone"], ["b", "c"], {"old"}.__contains__)
    ['old', 'b', 'c']
    """
    others = [name for name in sort_newest_lines(lines) if name not in complete and is_there(name)]
    return [*others, *complete]


def find_excess_directories(order: Sequence[str], smp_directories: Iterable[str], keep: int) -> list[str]:
    """Return excess SMP directories, oldest first. Retention of this library's checkpoints is separate.

    >>> find_excess_directories(["a", "b", "c", "d"], ["a", "b"], 3)
    ['a']
    """
    own = set(smp_directories)
    return [name for name in order[: max(len(order) - keep, 0)] if name in own]
