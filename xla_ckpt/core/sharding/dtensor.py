"""DTensor placements as boxes: which regions of the global array a rank has.

`find_nesting_order` decides in which order the mesh dims split a tensor dim: FSDP2 splits what tensor parallelism has
left, and torch marks that as a strided shard. Any other strided shard is interleaved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from xla_ckpt.core.sharding.box import MAX_DIMS, Box
from xla_ckpt.core.sharding.local_array import Piece, compute_chunk_bounds

IndexRange = tuple[int, int]
"""Half-open, like the bounds of a box."""


@dataclass(frozen=True, slots=True)
class DimShard:
    """How one mesh dim cuts a tensor dim, as seen by one process."""

    shard_count: int
    """Size of the mesh dim."""

    index: int
    """Coordinate of the process along it."""

    split_factor: int = 1
    """Chunks that are made before each of them is cut into `shard_count`; more than 1 for a strided shard."""


def compute_local_intervals(size: int, shards: Sequence[DimShard]) -> list[IndexRange]:
    """The elements of a tensor dim that a process holds, in the order of its local tensor; no interval is empty.

    `shards` come in the order of the mesh dims. A strided cut whose factor says that later mesh dims have cut before it
    is applied after those (see `find_nesting_order`): FSDP2 really cuts what tensor parallelism has left, which for
    sizes that do not divide is not the same as cutting in the order of the mesh. Any other strided cut is interleaved:
    the process holds its part of every chunk.

    FSDP over tensor parallelism: 7 of 13 rows, then the last 3 of 7. A fused projection of three sections:

    >>> compute_local_intervals(13, [DimShard(2, 1, split_factor=2), DimShard(2, 0)])
    [(4, 7)]
    >>> compute_local_intervals(12, [DimShard(2, 0, split_factor=3)])
    [(0, 2), (4, 6), (8, 10)]
    """
    nested = find_nesting_order(shards)
    if nested is None:
        return _apply_in_order(size, shards)
    low, high = 0, size
    for i in nested:
        low, high = compute_chunk_bounds(low, high, shards[i].shard_count, shards[i].index)
    return [(low, high)] if low < high else []


def find_nesting_order(shards: Sequence[DimShard]) -> tuple[int, ...] | None:
    """Positions of the cuts in the order in which each one cuts the whole of what those before it left.

    The factor of a strided cut is the number of parts that later mesh dims have made before. None if some factor is not
    such a number: then no order of plain cuts gives the same.

    >>> find_nesting_order([DimShard(2, 0, split_factor=2), DimShard(2, 0)])
    (1, 0)
    >>> find_nesting_order([DimShard(2, 0, split_factor=3)]) is None
    True
    """
    order: list[int] = []
    # From the last mesh dim to the first, because a factor speaks of mesh dims behind its own: those are in `order`.
    for i in reversed(range(len(shards))):
        place = _count_earlier_shards(shards[i].split_factor, [shards[j].shard_count for j in order])
        if place is None:
            return None
        order.insert(place, i)
    return tuple(order)


def build_dim_spec(named: Sequence[tuple[str, DimShard]]) -> tuple[object, ...] | None:
    """What cuts a tensor dim, outermost first, as `Sharding.spec` has it."""
    if not named:
        return None
    nested = find_nesting_order([cut for _, cut in named])
    if nested is None and len(named) == 1:
        return named[0][0], named[0][1].split_factor
    return tuple(named[i][0] for i in nested or range(len(named)))


def _count_earlier_shards(factor: int, parts: Sequence[int]) -> int | None:
    """How many of the first cuts together make `split_factor` parts; None if no number of them does."""
    product = 1
    for count, more in enumerate(parts):
        if product == factor:
            return count
        product *= more
    return len(parts) if product == factor else None


def find_uneven_shards(size: int, shards: Sequence[DimShard]) -> Iterator[tuple[int, DimShard]]:
    """(elements that it cuts, cut) of each interleaved cut that does not divide those elements into equal blocks."""
    if find_nesting_order(shards) is not None:
        return
    for i, cut in enumerate(shards):
        left = _sum_lengths(_apply_in_order(size, shards[:i]))
        if cut.split_factor > 1 and left % (cut.split_factor * cut.shard_count):
            yield left, cut


def compute_interleaved_intervals(size: int, shard: DimShard) -> list[IndexRange]:
    """One part of each of `split_factor` chunks.

    >>> [compute_interleaved_intervals(5, DimShard(2, i, split_factor=2)) for i in range(2)]
    [[(0, 2), (3, 4)], [(2, 3), (4, 5)]]
    """
    chunks = (compute_chunk_bounds(0, size, shard.split_factor, k) for k in range(shard.split_factor))
    parts = (compute_chunk_bounds(low, high, shard.shard_count, shard.index) for low, high in chunks)
    return [(low, high) for low, high in parts if low < high]


def build_pieces(dims: Sequence[Sequence[IndexRange]]) -> tuple[tuple[Piece, ...], tuple[int, ...]]:
    """The pieces of a local tensor, and its shape. In each tensor dim it holds these intervals, one behind the other.

    >>> pieces, shape = build_pieces([[(0, 2), (4, 6)], [(3, 6)]])
    >>> [f"{p.local_box} is {p.global_box}" for p in pieces], shape
    (['[0:2, 0:3] is [0:2, 3:6]', '[2:4, 0:3] is [4:6, 3:6]'], (4, 3))
    """
    pieces = []
    # Every combination of one interval of each dim is a rectangle, in the local tensor as in the global one.
    for choice in product(*(list(_assign_local_offsets(intervals)) for intervals in dims)):
        local = Box(tuple(at for at, _, _ in choice), tuple(at + high - low for at, low, high in choice))
        box = Box(tuple(low for _, low, _ in choice), tuple(high for _, _, high in choice))
        pieces.append(Piece(local, box))
    return tuple(pieces), tuple(_sum_lengths(intervals) for intervals in dims)


def _assign_local_offsets(intervals: Sequence[IndexRange]) -> Iterator[tuple[int, int, int]]:
    """(start in the local tensor, low, high) of each interval."""
    at = 0
    for low, high in intervals:
        yield at, low, high
        at += high - low


def _apply_in_order(size: int, shards: Sequence[DimShard]) -> list[IndexRange]:
    """What is left of a tensor dim after the cuts, in the order of the mesh dims."""
    left: list[IndexRange] = [(0, size)] if size else []
    for cut in shards:
        # A cut sees what is left as one sequence. The intervals that it chooses there are translated back.
        kept: list[IndexRange] = []
        for low, high in compute_interleaved_intervals(_sum_lengths(left), cut):
            kept.extend(_slice_intervals(left, low, high))
        left = _merge_adjacent(kept)
    return left


def _slice_intervals(intervals: Sequence[IndexRange], first: int, last: int) -> Iterator[IndexRange]:
    """Where the elements ``first <= i < last`` lie of the sequence that these intervals make up."""
    passed = 0  # elements of the sequence in front of the interval
    for low, high in intervals:
        start, stop = max(first, passed), min(last, passed + high - low)
        if start < stop:
            yield low + start - passed, low + stop - passed
        passed += high - low


def _merge_adjacent(intervals: Sequence[IndexRange]) -> list[IndexRange]:
    """The intervals, neighbours joined: fewer pieces are fewer entries in the manifest and fewer reads."""
    joined: list[IndexRange] = []
    for low, high in intervals:
        if joined and joined[-1][1] == low:
            joined[-1] = joined[-1][0], high
        else:
            joined.append((low, high))
    return joined


def _sum_lengths(intervals: Sequence[IndexRange]) -> int:
    return sum(high - low for low, high in intervals)


MAX_INTERLEAVED_CHUNKS = 1 << 12
"""Chunks that interleaved strided shards may make: a hostile file may name any number, and each of them takes time."""


class MeshDimPlacement(NamedTuple):
    """What one mesh dim does."""

    dim: int | None
    """The tensor dim that it cuts; None if it holds copies."""

    split_factor: int = 1
    """See `Cut`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DTensorLayout:
    """What a local tensor is of a global one."""

    global_shape: tuple[int, ...]
    """Of the global one."""

    local_shape: tuple[int, ...] | None = None
    """Shape that the local tensor has to have; None if this rank has nothing of it, whatever its local tensor is."""

    pieces: tuple[Piece, ...] = ()

    spec: tuple[object, ...] | None = None
    """See `ArrayMetadata.spec`."""

    uneven_shards: tuple[tuple[int, DimShard], ...] = ()
    """See `xla_ckpt.core.sharding.dtensor.find_uneven_shards`: versions of torch do not agree about these."""

    problem: str = ""
    """Why it cannot be told how it was cut; then there are no pieces."""


def compute_dtensor_layout(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[MeshDimPlacement],
    names: Sequence[str] | None,
) -> DTensorLayout:
    """How a DTensor was cut.

    Args:
        shape: Global shape.
        mesh_shape: Size of each mesh dim.
        coordinate: Place of the rank along each.
        placements: What each of them does.
        names: What they are called.

    Raises:
        ValueError: These contradict each other.

    >>> placements = [MeshDimPlacement(0), MeshDimPlacement(None)]
    >>> layout = compute_dtensor_layout((6, 4), (2, 2), (1, 0), placements, ("dp", "tp"))
    >>> str(layout.pieces[0].global_box), layout.local_shape, layout.spec
    ('[3:6, 0:4]', (3, 4), (('dp',), None))
    """
    names = [f"mesh{d}" for d in range(len(mesh_shape))] if names is None else names
    if (
        not len(mesh_shape) == len(coordinate) == len(placements) == len(names)
        or max(len(mesh_shape), len(shape)) > MAX_DIMS
    ):
        raise ValueError("mesh and placements do not have the same number of dims")
    cuts: list[list[tuple[str, DimShard]]] = [[] for _ in shape]
    for parts, index, placement, name in zip(mesh_shape, coordinate, placements, names, strict=True):
        if not 0 <= index < parts:
            raise ValueError("a rank stands outside of its mesh")
        if placement.dim is not None:
            if not -len(shape) <= placement.dim < len(shape) or placement.split_factor < 1:
                raise ValueError("a placement cuts what the tensor does not have")
            cuts[placement.dim % len(shape)].append((name, DimShard(parts, index, placement.split_factor)))
    by_dim = [(size, [cut for _, cut in named]) for size, named in zip(shape, cuts, strict=True)]
    if (
        prod(cut.split_factor for _, of_dim in by_dim if find_nesting_order(of_dim) is None for cut in of_dim)
        > MAX_INTERLEAVED_CHUNKS
    ):
        raise ValueError("strided shards make too many chunks")
    pieces, local = build_pieces([compute_local_intervals(size, of_dim) for size, of_dim in by_dim])
    return DTensorLayout(
        global_shape=tuple(shape),
        local_shape=local,
        pieces=pieces,
        spec=tuple(build_dim_spec(named) for named in cuts),
        uneven_shards=tuple(blocks for size, of_dim in by_dim for blocks in find_uneven_shards(size, of_dim)),
    )
