"""Which tests `make test` leaves out: those that took long when all tests ran.

`pytest --durations=0 --durations-min=0 | python -m tests.slow` writes tests/slow.txt of what pytest prints, as
`make test-times` does.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("slow.txt")

SECONDS = 1.0
"""A test that took longer is slow: with those fixtures that it was the first to need."""

PRINTED = re.compile(r"(\d+\.\d+)s (?:setup|call|teardown) +(tests/.+)")


def times(printed: Iterable[str]) -> dict[str, float]:
    """Seconds of each test, by its name, of what pytest prints with these options."""
    seconds: dict[str, float] = defaultdict(float)
    for line in printed:
        if match := PRINTED.fullmatch(line.rstrip()):
            seconds[match[2]] += float(match[1])
    return dict(seconds)


def slow_of(seconds: Mapping[str, float]) -> dict[str, float]:
    """The slow ones of some tests. In a file that has no other, the quickest one is not slow."""
    quickest: dict[str, str] = {}
    for test in seconds:
        file = test.partition("::")[0]
        quickest[file] = min(quickest.get(file, test), test, key=lambda test: seconds[test])
    return {test: took for test, took in seconds.items() if took > SECONDS and test not in quickest.values()}


def listed() -> dict[str, float]:
    """The slow tests, and how many seconds they took."""
    lines = (line.partition(" ") for line in LIST.read_text().splitlines())
    return {test: float(took) for took, _, test in lines}


def mark(items: Iterable[pytest.Item], slow: Container[str]) -> None:
    """Mark those whose names are given."""
    for item in items:
        if item.nodeid in slow:
            item.add_marker(pytest.mark.slow)


def main() -> int:
    """Write the list; the exit code."""
    printed = []
    for line in sys.stdin:
        print(line, end="", flush=True)  # else nobody would see which tests fail
        printed.append(line)
    seconds = times(printed)
    if not seconds:
        print("what came has no durations of tests: call pytest with --durations=0", file=sys.stderr)
        return 2
    slow = slow_of(seconds)
    print(f"{len(slow)} of {len(seconds)} tests took {sum(slow.values()):.0f} of {sum(seconds.values()):.0f} s")
    LIST.write_text("".join(f"{took:.1f} {test}\n" for test, took in sorted(slow.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
