"""Format sizes, rates, times, shapes and values for display."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MIN_RATED_BYTES = 1_000_000
"""Minimum number of bytes for which a rate is shown. Smaller transfers mostly measure opening files and starting
threads."""

MAX_SIBLINGS = 32
"""Maximum number of values of one container that are shown individually."""

MAX_VALUE_LENGTH = 60
"""Maximum length of a plain value that is not truncated."""


def format_bytes(nbytes: int | None) -> str:
    """Format a number of bytes.

    >>> format_bytes(999), format_bytes(123_456_789), format_bytes(None)
    ('999 B', '123.5 MB', '?')
    """
    if nbytes is None:
        return "?"
    amount = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if amount < 1000 or unit == "TB":
            return f"{nbytes} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    raise AssertionError("unreachable")


def format_rate(nbytes: int, seconds: float) -> str:
    """Format a rate. Returns an empty string for too few bytes.

    >>> format_rate(123_000_000, 0.5), format_rate(248, 0.002)
    ('246.0 MB/s', '')
    """
    return f"{format_bytes(int(nbytes / seconds))}/s" if nbytes >= MIN_RATED_BYTES and seconds > 0 else ""


def format_time(created: str) -> str:
    """Format a time of the manifest in the local time zone.

    >>> format_time("")
    '?'
    """
    try:
        return datetime.datetime.fromisoformat(created).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return "?"


def format_duration(seconds: float) -> str:
    """Format a duration in seconds.

    >>> format_duration(0.00123), format_duration(12.345)
    ('1.2 ms', '12.35 s')
    """
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def format_shape(dims: Sequence[int] | None) -> str:
    """Format a shape.

    >>> format_shape([2, 3]), format_shape([]), format_shape(None)
    ('2 x 3', 'scalar', '-')
    """
    return "-" if dims is None else " x ".join(map(str, dims)) or "scalar"


def format_spec(spec: Sequence[Any] | None) -> str:
    """Format a spec in the syntax of sharding rules on the command line (``--sharding``).

    >>> [format_spec(spec) for spec in ((("dp", "tp"), None), (("tp", (8, "4x2")),), (("tp", 3),), ())]
    ['dp+tp,_', 'tp:8+4x2', 'tp*3', 'not split']
    """
    if spec is None:
        return "not known"
    return ",".join(map(_format_dim, spec)) if any(spec) else "not split"


def _format_dim(entry: Any) -> str:
    if entry is None or isinstance(entry, str):
        return entry or "_"
    axes = "+".join(part for part in entry if isinstance(part, str))
    behind = [part for part in entry if not isinstance(part, str)]
    if not behind:
        return axes
    return f"{axes}*{behind[0]}" if isinstance(behind[0], int) else f"{axes}:{'+'.join(map(str, behind[0]))}"


def collapse_values(values: Mapping[str, Sequence[Any]]) -> list[tuple[str, ...]]:
    """Return a row per leaf with its formatted plain values. Long lists of numbers (such as RNG state) become one row.

    >>> collapse_values({"a/0": [1], "b": ["x"]})
    [('a/0', '1'), ('b', '"x"')]
    """
    long = _find_long_lists(leaf for leaf, row in values.items() if all(map(_is_number, row)))
    rows: dict[str, tuple[str, ...]] = {}
    for leaf, row in values.items():
        if leaf in long:
            parent, length = long[leaf]
            rows[f"{parent}/..."] = (f"{length} numbers",) * len(row)
        else:
            rows[leaf] = tuple(map(format_value, row))
    return [(leaf, *texts) for leaf, texts in rows.items()]


def collapse_leaves(leaves: Sequence[str]) -> list[str]:
    """Return leaf paths, with one entry for all members of a long list (RNG state has 625).

    >>> collapse_leaves(["a/0", "b", "a/1"]), collapse_leaves(["b", *(f"a/{i}" for i in range(40))])
    (['a/0', 'b', 'a/1'], ['b', 'a/...: 40 leaves'])
    >>> collapse_leaves([*map(str, range(40)), "step"])  # a tree that is a list, and another one
    ['/...: 40 leaves', 'step']
    """
    long = _find_long_lists(leaf for leaf in leaves if leaf.rpartition("/")[2].isdecimal())
    texts = {leaf: f"{parent}/...: {length} leaves" for leaf, (parent, length) in long.items()}
    return list(dict.fromkeys(texts.get(leaf, leaf) for leaf in leaves))


def _find_long_lists(members: Iterable[str]) -> dict[str, tuple[str, int]]:
    """Map each member of a parent with more than `MAX_SIBLINGS` members to (parent, number of members)."""
    parents = {leaf: leaf.rpartition("/")[0] for leaf in members}
    lengths = Counter(parents.values())
    return {leaf: (parent, lengths[parent]) for leaf, parent in parents.items() if lengths[parent] > MAX_SIBLINGS}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def format_value(value: Any) -> str:
    """Format a plain value as JSON, truncated if it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_VALUE_LENGTH else text[:MAX_VALUE_LENGTH] + "..."


def format_count(n: int, word: str) -> str:
    """Format a number with its noun.

    >>> format_count(1, "file"), format_count(2, "file")
    ('1 file', '2 files')
    """
    return f"{n} {word}" if n == 1 else f"{n} {word}s"
