"""A cache of XLA buffers that an earlier save has stored, by which unchanged arrays need no digest.

XLA buffers are immutable, so an array with the same buffer has the same bytes. An entry keeps its buffer alive, because
otherwise another buffer could get its id. Therefore only arrays that the program does not train are cached, from one
save each, and the entry is removed together with the array.
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
    """A parameter that the program does not train, at the time of a save."""

    array: weakref.ref[Any]
    buffer: Hashable | None
    """The buffer, which it keeps alive; equal to itself at another time. None if the bytes can change in place."""

    local: LocalArray
    """Local elements of the array."""


@dataclass(frozen=True, slots=True)
class _SavedBuffer:
    array: weakref.ref[Any]
    """Weak reference whose callback removes the entry when the program drops the array."""

    content: tuple[Hashable, LocalArray, str]
    """Buffer, local elements, leaf path."""

    commit: tuple[str, str, int]
    """Root, tag, sequence number."""


_saved: dict[int, _SavedBuffer] = {}
"""Id of an array -> its entry."""


def record_saved_buffers(root: Root, tag: str, sequence: int, parameters: Mapping[str, FrozenParameter]) -> None:
    """Record that a committed tag contains these arrays."""
    for leaf, its in parameters.items():
        array = its.array()
        if array is None or its.buffer is None:
            continue
        alive = weakref.ref(array, partial(_forget, id(array)))
        _saved[id(array)] = _SavedBuffer(alive, (its.buffer, its.local, leaf), (root.path, tag, sequence))


def _forget(number: int, _: object) -> None:
    """Remove the entry of an array that the program has dropped, and with it the reference to its buffer."""
    _saved.pop(number, None)


def find_unchanged_leaves(
    root: Root, tag: str, sequence: int, parameters: Mapping[str, FrozenParameter]
) -> frozenset[str]:
    """Return the leaf paths of arrays with the same buffers as when this tag was saved."""
    where = (root.path, tag, sequence)
    same = set()
    for leaf, its in parameters.items():
        array = its.array()
        earlier = None if array is None else _saved.get(id(array))
        if earlier is not None and (earlier.content, earlier.commit) == ((its.buffer, its.local, leaf), where):
            same.add(leaf)
    return frozenset(same)


def clear_saved_buffers() -> None:
    """Drop all entries and their buffers."""
    _saved.clear()
