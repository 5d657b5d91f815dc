"""Parse JSON from files: objects, and packed lists of integers. Invalid data raises an error.

Cut positions, file indices and byte offsets mostly form arithmetic progressions, so the manifest stores such a list as
runs: ``[7, [0, 64, 4]]`` is 7, 0, 64, 128, 192. A list of one repeated value is stored as that value. Runs keep the
manifest of thousands of ranks below a few megabytes. The memory for unpacking is proportional to the expected count,
whatever a malicious file contains.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xla_ckpt.core.sharding.box import BoolArray, IntArray
from xla_ckpt.errors import CheckpointError, FormatError


def parse_json(
    text: bytes,
    description: str,
    error_class: type[CheckpointError] = FormatError,
    pairs_hook: Callable[[Any], Any] | None = None,
) -> Any:
    """Parse JSON.

    Args:
        text: The JSON text.
        description: Name of the text in error messages.
        error_class: Class of the error that is raised.
        pairs_hook: Function that creates each object from its (key, value) pairs.

    Raises:
        CheckpointError: The text is not valid JSON. The class is `error_class`.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs_hook)
    except (ValueError, RecursionError) as error:
        raise error_class(f"{description} is no JSON: {error}"[:300]) from error


def parse_json_object(
    text: bytes,
    description: str,
    error_class: type[CheckpointError] = FormatError,
    pairs_hook: Callable[[Any], Any] | None = None,
) -> dict[str, Any]:
    """Parse a JSON object (see `parse_json`).

    Raises:
        CheckpointError: The text is not a JSON object. The class is `error_class`.

    >>> parse_json_object(b'{"a": 1}', "the text")
    {'a': 1}
    """
    content = parse_json(text, description, error_class, pairs_hook)
    if not isinstance(content, dict):
        raise error_class(f"{description} is not a JSON object", found=type(content).__name__)
    return content


MAX_INT = 1 << 62
"""Exclusive upper limit of offsets, sizes and indices."""

MIN_RUN_LENGTH = 3
"""Maximum length of progressions that are not stored as a run, because a run consists of three numbers."""


def pack_ints(values: Sequence[int] | IntArray | BoolArray) -> Any:
    """Pack integers into JSON.

    >>> pack_ints([5, 5, 5]), pack_ints([0, 64, 128, 192, 7])
    (5, [[0, 64, 4], 7])
    """
    if len(values) == 1:
        return int(values[0])  # true for nearly all arrays
    column = np.asarray(values, np.int64)
    numbers: list[int] = column.tolist()
    if numbers and (column == column[0]).all():
        return numbers[0]
    if len(numbers) <= MIN_RUN_LENGTH:
        return numbers
    steps = np.diff(column)
    bends = (np.flatnonzero(steps[1:] != steps[:-1]) + 1).tolist()  # where the step changes
    packed: list[Any] = []
    i = bend = 0
    while i < len(numbers):
        while bend < len(bends) and bends[bend] <= i:
            bend += 1
        end = bends[bend] + 1 if bend < len(bends) else len(numbers)  # end of the progression that starts here
        if end - i > MIN_RUN_LENGTH:
            packed.append([numbers[i], numbers[i + 1] - numbers[i], end - i])
            i = end
        else:
            # Only this value, because a longer run may start with the next one.
            packed.append(numbers[i])
            i += 1
    return packed


def unpack_ints(packed: Any, count: int) -> tuple[int, ...]:
    """Unpack `count` integers from `pack_ints` (see `unpack_int_array`).

    >>> unpack_ints([[0, 64, 4], 7], 5)
    (0, 64, 128, 192, 7)
    """
    if count == 1 and _is_index(packed):
        return (packed,)  # true for nearly all arrays
    return tuple(unpack_int_array(packed, count).tolist())


def unpack_int_array(packed: Any, count: int) -> IntArray:
    """Unpack `count` integers from `pack_ints`. Memory is proportional to `count`, whatever `packed` contains.

    Raises:
        FormatError: `packed` is malformed, does not contain `count` integers, or contains integers out of range.
    """
    if _is_index(packed):
        return np.full(count, packed, np.int64)
    if not isinstance(packed, list):
        raise FormatError("broken list of integers", found=str(packed)[:40])
    parts: list[IntArray] = []
    single: list[int] = []  # numbers since the last run
    length = 0
    for entry in packed:
        if _is_index(entry):
            single.append(entry)
            length += 1
        elif isinstance(entry, list) and len(entry) == 3 and all(type(n) is int for n in entry):
            first, step, steps = entry
            last = first + step * (steps - 1)
            # The length is checked before the run is expanded, because a few bytes of a malicious file could request
            # any amount of memory. If the first and the last value are in range, so are the values between them.
            if not (0 < steps <= count and _is_index(first) and _is_index(last)):
                raise FormatError("broken run of integers", found=str(entry)[:80])
            parts += [np.array(single, np.int64), first + (step if steps > 1 else 0) * np.arange(steps)]
            single = []
            length += steps
        else:
            raise FormatError("broken list of integers", found=str(entry)[:80])
        if length > count:
            break  # each further run would add up to `count` values
    if length != count:
        raise FormatError("list of integers of the wrong length", expected=count, found=length)
    return np.concatenate([*parts, np.array(single, np.int64)])


def unpack_variable_ints(packed: Any, limit: int) -> tuple[int, ...]:
    """Unpack a list of unknown length (not a single number) of at most `limit` integers.

    Raises:
        FormatError: `packed` is malformed, too long, or contains integers out of range.
    """
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
    return type(value) is int and 0 <= value < MAX_INT
