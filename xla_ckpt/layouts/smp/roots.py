"""The directories that ``smp.save_checkpoint`` left in a root, and what its file `newest` says of them.

SMP goes by `newest` alone, which it rewrites after a save. A save here is committed before that: so the directories
are what counts, and `newest` is made to agree with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from xla_ckpt.layouts.listing import all_tags
from xla_ckpt.layouts.smp.tags import NEWEST, PARTIAL, newest_lines, order_of
from xla_ckpt.storage.door import PathLike, store_at


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRoot:
    """The partial checkpoints in a root directory."""

    lines: tuple[str, ...] | None
    """Those of `newest`; None if there is no such file."""

    order: tuple[str, ...]
    """The directories that there are, oldest first."""

    theirs: tuple[str, ...]
    """Those of them that have no manifest of ours."""


def root_at(path: PathLike) -> PartialRoot:
    """What lies in a root directory.

    Raises:
        StorageError: It cannot be read.
    """
    store = store_at(path)
    tags = [(layout is None, entry.tag) for layout, entry in all_tags(store) if entry.tag.endswith(PARTIAL)]
    lines = tuple(newest_lines(store)) if store.has(NEWEST) else None
    order = agreeing(lines or (), [tag for _, tag in tags], store.is_directory)
    ours = {tag for is_ours, tag in tags if is_ours}
    return PartialRoot(lines=lines, order=tuple(order), theirs=tuple(t for t in order if t not in ours))


def agreeing(lines: Sequence[str], complete: Sequence[str], is_there: Callable[[str], bool]) -> list[str]:
    """The lines of `newest` that agree with the directories.

    Each directory stands there once. One that is listed, and of which nobody can tell whether it is complete, stays
    listed, before the others.

    Args:
        lines: Those that are there.
        complete: The complete directories, oldest first.
        is_there: Says whether there is a directory of a name.

    >>> agreeing(["a", "b", "a", "old", "gone"], ["b", "c"], {"old"}.__contains__)
    ['old', 'b', 'c']
    """
    others = [name for name in order_of(lines) if name not in complete and is_there(name)]
    return [*others, *complete]


def oldest_beyond(order: Sequence[str], of_smp: Iterable[str], kept: int) -> list[str]:
    """Those of SMP's own directories that are too many, oldest first. Saves of this library count their own.

    >>> oldest_beyond(["a", "b", "c", "d"], ["a", "b"], 3)
    ['a']
    """
    own = set(of_smp)
    return [name for name in order[: max(len(order) - kept, 0)] if name in own]
