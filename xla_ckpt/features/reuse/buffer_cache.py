"""A cache of XLA buffers that an earlier save has stored, by which unchanged arrays need no digest.

XLA buffers are immutable, so that an array with the same buffer has the same bytes. An entry keeps its buffer alive,
because another buffer could get its number otherwise. Therefore only arrays that the program does not train are
cached, one save of each, and the entry is removed together with the array.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from xla_ckpt.core.sharding.local_array import LocalArray
from xla_ckpt.tags.root import Root


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenParameter:
    """An array that the program says it does not train, as a save has it."""

    array: weakref.ref[Any]
    buffer: Hashable | None
    """Equal to that of another time if it is the same one, which it holds; None where bytes may change in place."""

    local: LocalArray
    """Which elements they are."""


@dataclass(frozen=True, slots=True)
class _SavedBuffer:
    array: weakref.ref[Any]
    """Forgets this when the program has let go of the array."""

    content: tuple[Hashable, LocalArray, str]
    """Buffer, elements, leaf path."""

    commit: tuple[str, str, int]
    """Root, tag, number of the commit."""


_saved: dict[int, _SavedBuffer] = {}
"""By the number of the array."""


def record_saved_buffers(root: Root, tag: str, sequence: int, parameters: Mapping[str, FrozenParameter]) -> None:
    """A tag that is committed has these arrays."""
    for leaf, its in parameters.items():
        array = its.array()
        if array is None or its.buffer is None:
            continue
        alive = weakref.ref(array, partial(_forget, id(array)))
        _saved[id(array)] = _SavedBuffer(alive, (its.buffer, its.local, leaf), (root.path, tag, sequence))


def _forget(number: int, _: object) -> None:
    """The program has let go of an array: nothing else holds its buffer for longer."""
    _saved.pop(number, None)


def find_unchanged_leaves(
    root: Root, tag: str, sequence: int, parameters: Mapping[str, FrozenParameter]
) -> frozenset[str]:
    """Leaf paths of the arrays of which this tag has the bytes, as it was saved from the same buffers."""
    where = (root.path, tag, sequence)
    same = set()
    for leaf, its in parameters.items():
        array = its.array()
        earlier = None if array is None else _saved.get(id(array))
        if earlier is not None and (earlier.content, earlier.commit) == ((its.buffer, its.local, leaf), where):
            same.add(leaf)
    return frozenset(same)


def clear_saved_buffers() -> None:
    """Hold no buffers any more."""
    _saved.clear()
