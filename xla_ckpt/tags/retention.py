"""Which tags to delete. Pure: facts in, decision out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xla_ckpt.errors import UsageError


@dataclass(frozen=True, slots=True)
class TagFact:
    """What retention knows of a tag."""

    tag: str
    sequence: int
    """Commit number: the order of tags."""

    pinned: bool = False


def check_keep(num_kept: int | None) -> int | None:
    """`num_kept`, if it makes sense.

    Raises:
        UsageError: Neither None nor an int of at least 1.
    """
    if num_kept is not None and type(num_kept) is not int:
        raise UsageError(
            "num_kept_ckpts is no number of tags", expected="None (keep all) or an int", found=repr(num_kept)
        )
    if num_kept is not None and num_kept < 1:
        raise UsageError(
            f"num_kept_ckpts={num_kept!r} would not even keep the tag being saved",
            expected="None (keep all) or at least 1",
            found=num_kept,
        )
    return num_kept


def superfluous(facts: Sequence[TagFact], num_kept: int | None) -> list[str]:
    """The tags to delete, oldest first: all but the newest `num_kept` of those that are not pinned.

    >>> superfluous([TagFact("a", 1), TagFact("best", 2, pinned=True), TagFact("b", 3), TagFact("c", 4)], 2)
    ['a']
    """
    if num_kept is None:
        return []
    live = sorted((f for f in facts if not f.pinned), key=lambda f: (f.sequence, f.tag))
    newest = max(facts, key=lambda f: (f.sequence, f.tag), default=None)
    return [f.tag for f in live[: max(len(live) - num_kept, 0)] if f is not newest]
