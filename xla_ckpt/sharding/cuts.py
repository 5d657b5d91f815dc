"""Which elements of one tensor dim a process holds after several mesh dims have cut it, one after another. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.local_array import Piece, chunk_bounds

IndexRange = tuple[int, int]
"""Half-open, like the bounds of a box."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How one mesh dim cuts a tensor dim, as seen by one process."""

    parts: int
    """Size of the mesh dim."""

    index: int
    """Coordinate of the process along it."""

    factor: int = 1
    """Chunks that are made before each of them is cut into `parts`; more than 1 for a strided shard."""


def held(size: int, cuts: Sequence[Cut]) -> list[IndexRange]:
    """The elements of a tensor dim that a process holds, in the order of its local tensor; no interval is empty.

    `cuts` come in the order of the mesh dims. A strided cut whose factor says that later mesh dims have cut before it
    is applied after those (see `mesh_order`): FSDP2 really cuts what tensor parallelism has left, which for sizes that
    do not divide is not the same as cutting in the order of the mesh. Any other strided cut is interleaved: the process
    holds its part of every chunk.

    >>> held(13, [Cut(2, 1, factor=2), Cut(2, 0)])  # FSDP over tensor parallelism: 7 of 13 rows, then the last 3 of 7
    [(4, 7)]
    >>> held(12, [Cut(2, 0, factor=3)])  # a fused projection of three parts
    [(0, 2), (4, 6), (8, 10)]
    """
    nested = mesh_order(cuts)
    if nested is None:
        return _in_turn(size, cuts)
    low, high = 0, size
    for i in nested:
        low, high = chunk_bounds(low, high, cuts[i].parts, cuts[i].index)
    return [(low, high)] if low < high else []


def mesh_order(cuts: Sequence[Cut]) -> tuple[int, ...] | None:
    """Positions of the cuts in the order in which each one cuts the whole of what those before it left.

    The factor of a strided cut is the number of parts that later mesh dims have made before. None if some factor is not
    such a number: then no order of plain cuts gives the same.

    >>> mesh_order([Cut(2, 0, factor=2), Cut(2, 0)]), mesh_order([Cut(2, 0, factor=3)])
    ((1, 0), None)
    """
    order: list[int] = []
    # From the last mesh dim to the first, because a factor speaks of mesh dims behind its own: those are in `order`.
    for i in reversed(range(len(cuts))):
        place = _place_after(cuts[i].factor, [cuts[j].parts for j in order])
        if place is None:
            return None
        order.insert(place, i)
    return tuple(order)


def spec_of(named: Sequence[tuple[str, Cut]]) -> tuple[object, ...] | None:
    """What cuts a tensor dim, outermost first, as `Sharding.spec` has it."""
    if not named:
        return None
    nested = mesh_order([cut for _, cut in named])
    if nested is None and len(named) == 1:
        return named[0][0], named[0][1].factor
    return tuple(named[i][0] for i in nested or range(len(named)))


def _place_after(factor: int, parts: Sequence[int]) -> int | None:
    """How many of the first cuts together make `factor` parts; None if no number of them does."""
    product = 1
    for count, more in enumerate(parts):
        if product == factor:
            return count
        product *= more
    return len(parts) if product == factor else None


def uneven(size: int, cuts: Sequence[Cut]) -> Iterator[tuple[int, Cut]]:
    """(elements that it cuts, cut) of each interleaved cut that does not divide those elements into equal blocks."""
    if mesh_order(cuts) is not None:
        return
    for i, cut in enumerate(cuts):
        left = _length(_in_turn(size, cuts[:i]))
        if cut.factor > 1 and left % (cut.factor * cut.parts):
            yield left, cut


def interleaved(size: int, cut: Cut) -> list[IndexRange]:
    """One part of each of `factor` chunks.

    >>> [interleaved(5, Cut(2, i, factor=2)) for i in range(2)]
    [[(0, 2), (3, 4)], [(2, 3), (4, 5)]]
    """
    chunks = (chunk_bounds(0, size, cut.factor, k) for k in range(cut.factor))
    parts = (chunk_bounds(low, high, cut.parts, cut.index) for low, high in chunks)
    return [(low, high) for low, high in parts if low < high]


def pieces_of(dims: Sequence[Sequence[IndexRange]]) -> tuple[tuple[Piece, ...], tuple[int, ...]]:
    """The pieces of a local tensor, and its shape. In each tensor dim it holds these intervals, one behind the other.

    >>> pieces, shape = pieces_of([[(0, 2), (4, 6)], [(3, 6)]])
    >>> [f"{p.local} is {p.box}" for p in pieces], shape
    (['[0:2, 0:3] is [0:2, 3:6]', '[2:4, 0:3] is [4:6, 3:6]'], (4, 3))
    """
    pieces = []
    # Every combination of one interval of each dim is a rectangle, in the local tensor as in the global one.
    for choice in product(*(list(_packed(intervals)) for intervals in dims)):
        local = Box(tuple(at for at, _, _ in choice), tuple(at + high - low for at, low, high in choice))
        box = Box(tuple(low for _, low, _ in choice), tuple(high for _, _, high in choice))
        pieces.append(Piece(local, box))
    return tuple(pieces), tuple(_length(intervals) for intervals in dims)


def _packed(intervals: Sequence[IndexRange]) -> Iterator[tuple[int, int, int]]:
    """(start in the local tensor, low, high) of each interval."""
    at = 0
    for low, high in intervals:
        yield at, low, high
        at += high - low


def _in_turn(size: int, cuts: Sequence[Cut]) -> list[IndexRange]:
    """What is left of a tensor dim after the cuts, in the order of the mesh dims."""
    left: list[IndexRange] = [(0, size)] if size else []
    for cut in cuts:
        # A cut sees what is left as one sequence. The intervals that it chooses there are translated back.
        kept: list[IndexRange] = []
        for low, high in interleaved(_length(left), cut):
            kept.extend(_at(left, low, high))
        left = _merged(kept)
    return left


def _at(intervals: Sequence[IndexRange], first: int, last: int) -> Iterator[IndexRange]:
    """Where the elements ``first <= i < last`` lie of the sequence that these intervals make up."""
    passed = 0  # elements of the sequence in front of the interval
    for low, high in intervals:
        start, stop = max(first, passed), min(last, passed + high - low)
        if start < stop:
            yield low + start - passed, low + stop - passed
        passed += high - low


def _merged(intervals: Sequence[IndexRange]) -> list[IndexRange]:
    """The intervals, neighbours joined: fewer pieces are fewer entries in the manifest and fewer reads."""
    joined: list[IndexRange] = []
    for low, high in intervals:
        if joined and joined[-1][1] == low:
            joined[-1] = joined[-1][0], high
        else:
            joined.append((low, high))
    return joined


def _length(intervals: Sequence[IndexRange]) -> int:
    return sum(high - low for low, high in intervals)
