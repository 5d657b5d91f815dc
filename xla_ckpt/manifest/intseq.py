"""Long lists of integers that mostly count: cut positions, file numbers, byte offsets.

In the manifest a list is written as runs: ``[7, [0, 64, 4]]`` is 7, 0, 64, 128, 192. A list of one value repeated is
that value alone. Runs keep the manifest of thousands of ranks to a few megabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xla_ckpt.errors import FormatError

LIMIT = 1 << 62
"""No offset, size or index reaches this."""

MIN_RUN = 3
"""Shorter progressions are written out: three numbers stand for a run."""


def pack_ints(values: Sequence[int]) -> Any:
    """`values` as JSON.

    >>> pack_ints([5, 5, 5]), pack_ints([0, 64, 128, 192, 7])
    (5, [[0, 64, 4], 7])
    """
    if values and all(v == values[0] for v in values):
        return values[0]
    packed: list[Any] = []
    i = 0
    while i < len(values):
        step = values[i + 1] - values[i] if i + 1 < len(values) else 0
        end = i + 1
        while end < len(values) and values[end] - values[end - 1] == step:
            end += 1
        if end - i > MIN_RUN:
            packed.append([values[i], step, end - i])
            i = end
        else:
            packed.append(values[i])
            i += 1
    return packed


def unpack_ints(packed: Any, count: int) -> tuple[int, ...]:
    """The `count` integers that `pack` wrote; work and memory stay proportional to `count`.

    Raises:
        FormatError: Not a packed list, not `count` long, or out of range.

    >>> unpack_ints([[0, 64, 4], 7], 5)
    (0, 64, 128, 192, 7)
    """
    if _is_index(packed):
        return (packed,) * count
    if not isinstance(packed, list):
        raise FormatError("broken list of integers", found=str(packed)[:40])
    values: list[int] = []
    for entry in packed:
        if _is_index(entry):
            values.append(entry)
        elif isinstance(entry, list) and len(entry) == 3 and all(type(n) is int for n in entry):
            first, step, length = entry
            last = first + step * (length - 1)
            if not (0 < length <= count and _is_index(first) and _is_index(last)):
                raise FormatError("broken run of integers", found=str(entry)[:80])
            values.extend(first + step * k for k in range(length))
        else:
            raise FormatError("broken list of integers", found=str(entry)[:80])
        if len(values) > count:
            break
    if len(values) != count:
        raise FormatError("list of integers of the wrong length", expected=count, found=len(values))
    return tuple(values)


def unpack_any(packed: Any, limit: int) -> tuple[int, ...]:
    """As `unpack`, for a list (not a lone number) whose length, at most `limit`, is not known beforehand."""
    if not isinstance(packed, list):
        raise FormatError("broken list of integers", found=str(packed)[:40])
    count = 0
    for entry in packed:
        count += entry[2] if isinstance(entry, list) and len(entry) == 3 and _is_index(entry[2]) else 1
        if count > limit:
            raise FormatError("list of integers is too long", expected=f"at most {limit}")
    return unpack_ints(packed, count)


def _is_index(value: object) -> bool:
    return type(value) is int and 0 <= value < LIMIT
