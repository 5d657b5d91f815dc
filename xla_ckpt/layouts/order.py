"""The order of tags of which some have one that is known, and others only time stamps. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def merged(ordered: Sequence[T], others: Iterable[T], time: Callable[[T], int]) -> list[T]:
    """Two sequences as one, in which each keeps its order: one of the others comes before those that are newer.

    >>> merged([30, 10, 50], [20, 40], lambda time: time)
    [30, 10, 20, 40, 50]
    """
    made = list(ordered)
    for other in reversed(list(others)):
        at = next((i for i in range(len(made), 0, -1) if time(made[i - 1]) <= time(other)), 0)
        made.insert(at, other)
    return made
