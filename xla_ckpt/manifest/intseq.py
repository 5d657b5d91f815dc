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
    if values and (len(values) == 1 or all(v == values[0] for v in values)):
        return values[0]
    packed: list[Any] = []
    i = 0
    while i < len(values):
        end = _end_of_run(values, i)
        if end - i > MIN_RUN:
            packed.append([values[i], values[i + 1] - values[i], end - i])
            i = end
        else:
            # Only this value: a longer run may begin with the next one.
            packed.append(values[i])
            i += 1
    return packed


def _end_of_run(values: Sequence[int], first: int) -> int:
    """One past the last value of the arithmetic progression that begins at index `first`."""
    end = first + 1
    if end < len(values):
        step = values[end] - values[first]
        while end < len(values) and values[end] - values[end - 1] == step:
            end += 1
    return end


def unpack_ints(packed: Any, count: int) -> tuple[int, ...]:
    """The `count` integers that `pack_ints` wrote. Whatever is in `packed`, memory stays proportional to `count`.

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
            # The length is checked before the run is written out: a few bytes of a hostile file could ask for any
            # amount of memory. Between a first and a last value in range, so are all others.
            if not (0 < length <= count and _is_index(first) and _is_index(last)):
                raise FormatError("broken run of integers", found=str(entry)[:80])
            values.extend(first + step * k for k in range(length))
        else:
            raise FormatError("broken list of integers", found=str(entry)[:80])
        if len(values) > count:
            break  # further runs would each add up to `count` values more
    if len(values) != count:
        raise FormatError("list of integers of the wrong length", expected=count, found=len(values))
    return tuple(values)


def unpack_any(packed: Any, limit: int) -> tuple[int, ...]:
    """As `unpack_ints`, for a list (not a lone number) whose length, at most `limit`, is not known beforehand."""
    if not isinstance(packed, list):
        raise FormatError("broken list of integers", found=str(packed)[:40])
    count = 0
    for entry in packed:
        is_run = isinstance(entry, list) and len(entry) == 3 and _is_index(entry[2])
        count += entry[2] if is_run else 1
        if count > limit:
            raise FormatError("list of integers is too long", expected=f"at most {limit}")
    return unpack_ints(packed, count)


def _is_index(value: object) -> bool:
    return type(value) is int and 0 <= value < LIMIT
