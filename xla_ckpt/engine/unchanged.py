"""Arrays that an earlier save of this process has stored from the same buffer: nobody ever writes to a buffer of XLA.

What is remembered of an array holds its buffer, as another one could have its number else. So it is of arrays alone
that the program does not train, one save of each, and it goes with the array itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from xla_ckpt.sharding.local_array import LocalArray
from xla_ckpt.tags.root import Root


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """An array that the program says it does not train, as a save has it."""

    array: weakref.ref[Any]
    buffer: Hashable | None
    """Equal to that of another time if it is the same one, which it holds; None where bytes may change in place."""

    local: LocalArray
    """Which elements they are."""


@dataclass(frozen=True, slots=True)
class _Saved:
    array: weakref.ref[Any]
    """Forgets this when the program has let go of the array."""

    what: tuple[Hashable, LocalArray, str]
    """Buffer, elements, leaf path."""

    where: tuple[str, str, int]
    """Root, tag, number of the commit."""


_saved: dict[int, _Saved] = {}
"""By the number of the array."""


def note_saved(root: Root, tag: str, sequence: int, fixed: Mapping[str, Fixed]) -> None:
    """A tag that is committed has these arrays."""
    for leaf, its in fixed.items():
        array = its.array()
        if array is None or its.buffer is None:
            continue
        alive = weakref.ref(array, partial(_gone, id(array)))
        _saved[id(array)] = _Saved(alive, (its.buffer, its.local, leaf), (root.path, tag, sequence))


def _gone(number: int, _: object) -> None:
    """The program has let go of an array: nothing else holds its buffer for longer."""
    _saved.pop(number, None)


def unchanged_since(root: Root, tag: str, sequence: int, fixed: Mapping[str, Fixed]) -> frozenset[str]:
    """Leaf paths of the arrays of which this tag has the bytes, as it was saved from the same buffers."""
    where = (root.path, tag, sequence)
    same = set()
    for leaf, its in fixed.items():
        array = its.array()
        earlier = None if array is None else _saved.get(id(array))
        if earlier is not None and (earlier.what, earlier.where) == ((its.buffer, its.local, leaf), where):
            same.add(leaf)
    return frozenset(same)


def forget_saved() -> None:
    """Hold no buffers any more."""
    _saved.clear()
