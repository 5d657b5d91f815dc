"""What the tags of other libraries have in common. Needs no framework."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from xla_ckpt.tags.entry import TagEntry

T = TypeVar("T")

_DIGITS = re.compile(r"\d+")


def time_text(time: int) -> str:
    """A time stamp (ns) as a listing has it: UTC, ISO 8601; empty for 0, which says nothing.

    >>> time_text(1_700_000_000_000_000_000)
    '2023-11-14T22:13:20.000000+00:00'
    """
    return datetime.datetime.fromtimestamp(time / 1e9, datetime.UTC).isoformat(timespec="microseconds") if time else ""


def merged_by_time(ordered: Sequence[T], others: Iterable[T], time: Callable[[T], int]) -> list[T]:
    """Tags whose order is known, and others that have only time stamps: one of these comes before those that are newer.

    >>> merged_by_time([30, 10, 50], [20, 40], lambda time: time)
    [30, 10, 20, 40, 50]
    """
    tags = list(ordered)
    for other in reversed(list(others)):
        at = next((i for i in range(len(tags), 0, -1) if time(tags[i - 1]) <= time(other)), 0)
        tags.insert(at, other)
    return tags


def by_numbers(entries: Iterable[TagEntry]) -> list[TagEntry]:
    """Tags in order: those whose names differ in numbers only by these numbers, for a copy of a root may have other
    time stamps; all others by their time stamps.
    """
    groups: dict[str, list[TagEntry]] = {}
    for entry in entries:
        groups.setdefault(_DIGITS.sub("0", entry.tag), []).append(entry)
    ordered: list[tuple[str, TagEntry]] = []
    for group in groups.values():
        latest = ""
        for entry in sorted(group, key=lambda e: ([int(n) for n in _DIGITS.findall(e.tag)], e.created)):
            latest = max(latest, entry.created)
            ordered.append((latest, entry))
    return [entry for _, entry in sorted(ordered, key=lambda pair: pair[0])]
