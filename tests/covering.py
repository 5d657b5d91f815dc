"""Choosing some of the cases of a matrix, so that each combination that matters comes in one of them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")


def covering(cases: Sequence[Case], shown_by: Callable[[Case], Iterable[Hashable]]) -> list[Case]:
    """Some of the cases, in their order: whatever any case shows is shown by one of these.

    It is the greedy cover of a set: the next case is the one that shows most of what no other one shows yet, and the
    first of several. So it is the same in every process, as pytest's workers need it.
    """
    shows = [frozenset(shown_by(case)) for case in cases]
    left = set[Hashable]().union(*shows)
    best = [(-len(shown), number) for number, shown in enumerate(shows)]
    heapq.heapify(best)
    chosen = []
    while left:
        _, number = heapq.heappop(best)
        new = (-len(shows[number] & left), number)
        if best and best[0] < new:  # what it showed is shown meanwhile, so that another one may show more
            heapq.heappush(best, new)
            continue
        left -= shows[number]
        chosen.append(number)
    return [cases[number] for number in sorted(chosen)]


def pairs_of_values(axes: Sequence[Hashable]) -> Iterable[Hashable]:
    """What a case shows if it has these values on the axes of a matrix: each pair of the values of two axes."""
    return combinations(enumerate(axes), 2)


def some_of(cases: Sequence[tuple[Any, ...]], shown_by: Callable[[Any], Iterable[Hashable]]) -> list[Any]:
    """All cases as parameters of a test; those that are not chosen are the rest of a matrix."""
    some = covering(cases, shown_by)
    return [pytest.param(*case, marks=() if case in some else pytest.mark.rest) for case in cases]
