"""DTensor placements as boxes: the regions of the global array that a rank holds.

`find_nesting_order` computes the order in which the mesh dims split a tensor dim. FSDP2 splits the local shards of
tensor parallelism, and torch marks that as a strided shard. All other strided shards are interleaved.
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
"""Half-open range of indices, like the bounds of a box."""


@dataclass(frozen=True, slots=True)
class DimShard:
    """Split of a tensor dim by one mesh dim, as seen by one process."""

    shard_count: int
    """Size of the mesh dim."""

    index: int
    """Coordinate of the process along it."""

    split_factor: int = 1
    """Number of chunks that exist before each is split into `shard_count` parts. Greater than 1 for a strided shard."""


def compute_local_intervals(size: int, shards: Sequence[DimShard]) -> list[IndexRange]:
    """Return the ranges of a tensor dim that a process holds, in the order of its local tensor. No range is empty.

    `shards` are applied in the order of the mesh dims, with one exception: a strided shard with a `split_factor` equal
    to the number of parts that later mesh dims create is applied after these dims (see `find_nesting_order`). FSDP2
    over tensor parallelism does this. The result differs from mesh order if sizes do not divide. Any other strided
    shard is interleaved: the process holds its part of every chunk.

    FSDP over tensor parallelism, which takes rows 0 to 6 of 13 first, then the last 3 of these 7:

    >>> compute_local_intervals(13, [DimShard(2, 1, split_factor=2), DimShard(2, 0)])
    [(4, 7)]

    A fused projection with three sections:

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
    """Return the positions of the shards, ordered so that each one splits the part that the previous ones leave.

    The factor of a strided shard is the number of parts that later mesh dims have created before it. Returns None if a
    factor is not such a number, because then no order of plain splits is equivalent.

    >>> find_nesting_order([DimShard(2, 0, split_factor=2), DimShard(2, 0)])
    (1, 0)
    >>> find_nesting_order([DimShard(2, 0, split_factor=3)]) is None
    True
    """
    order: list[int] = []
    # From the last mesh dim to the first, because a factor refers to later mesh dims: these are already in `order`.
    for i in reversed(range(len(shards))):
        place = _count_earlier_shards(shards[i].split_factor, [shards[j].shard_count for j in order])
        if place is None:
            return None
        order.insert(place, i)
    return tuple(order)


def build_dim_spec(named: Sequence[tuple[str, DimShard]]) -> tuple[object, ...] | None:
    """Return the mesh dims that split a tensor dim, outermost first, as in `Sharding.spec`."""
    if not named:
        return None
    nested = find_nesting_order([cut for _, cut in named])
    if nested is None and len(named) == 1:
        return named[0][0], named[0][1].split_factor
    return tuple(named[i][0] for i in nested or range(len(named)))


def _count_earlier_shards(factor: int, parts: Sequence[int]) -> int | None:
    """Return the number of leading entries of `parts` whose product is `factor`, or None if there is no such number."""
    product = 1
    for count, more in enumerate(parts):
        if product == factor:
            return count
        product *= more
    return len(parts) if product == factor else None


def find_uneven_shards(size: int, shards: Sequence[DimShard]) -> Iterator[tuple[int, DimShard]]:
    """Yield (elements to split, shard) of each interleaved shard that does not divide them into equal blocks."""
    if find_nesting_order(shards) is not None:
        return
    for i, cut in enumerate(shards):
        left = _sum_lengths(_apply_in_order(size, shards[:i]))
        if cut.split_factor > 1 and left % (cut.split_factor * cut.shard_count):
            yield left, cut


def compute_interleaved_intervals(size: int, shard: DimShard) -> list[IndexRange]:
    """Return one part of each of `split_factor` chunks.

    >>> [compute_interleaved_intervals(5, DimShard(2, i, split_factor=2)) for i in range(2)]
    [[(0, 2), (3, 4)], [(2, 3), (4, 5)]]
    """
    chunks = (compute_chunk_bounds(0, size, shard.split_factor, k) for k in range(shard.split_factor))
    parts = (compute_chunk_bounds(low, high, shard.shard_count, shard.index) for low, high in chunks)
    return [(low, high) for low, high in parts if low < high]


def build_pieces(dims: Sequence[Sequence[IndexRange]]) -> tuple[tuple[Piece, ...], tuple[int, ...]]:
    """Return the pieces of a local tensor and its shape. The local tensor concatenates the given ranges along each dim.

    >>> pieces, shape = build_pieces([[(0, 2), (4, 6)], [(3, 6)]])
    >>> [f"{p.local_box} is {p.global_box}" for p in pieces], shape
    (['[0:2, 0:3] is [0:2, 3:6]', '[2:4, 0:3] is [4:6, 3:6]'], (4, 3))
    """
    pieces = []
    # Every combination of one range per dim is a rectangle, both in the local tensor and in the global array.
    for choice in product(*(list(_assign_local_offsets(intervals)) for intervals in dims)):
        local = Box(tuple(at for at, _, _ in choice), tuple(at + high - low for at, low, high in choice))
        box = Box(tuple(low for _, low, _ in choice), tuple(high for _, _, high in choice))
        pieces.append(Piece(local, box))
    return tuple(pieces), tuple(_sum_lengths(intervals) for intervals in dims)


def _assign_local_offsets(intervals: Sequence[IndexRange]) -> Iterator[tuple[int, int, int]]:
    """Yield (start in the local tensor, low, high) of each range."""
    at = 0
    for low, high in intervals:
        yield at, low, high
        at += high - low


def _apply_in_order(size: int, shards: Sequence[DimShard]) -> list[IndexRange]:
    """Return the ranges of a tensor dim that remain after applying the shards in mesh order."""
    left: list[IndexRange] = [(0, size)] if size else []
    for cut in shards:
        # A shard treats the remaining elements as one sequence. The ranges that it selects are mapped back to the
        # tensor dim.
        kept: list[IndexRange] = []
        for low, high in compute_interleaved_intervals(_sum_lengths(left), cut):
            kept.extend(_slice_intervals(left, low, high))
        left = _merge_adjacent(kept)
    return left


def _slice_intervals(intervals: Sequence[IndexRange], first: int, last: int) -> Iterator[IndexRange]:
    """Yield the ranges of the elements ``first <= i < last`` of the concatenated intervals."""
    passed = 0  # elements of the sequence before this interval
    for low, high in intervals:
        start, stop = max(first, passed), min(last, passed + high - low)
        if start < stop:
            yield low + start - passed, low + stop - passed
        passed += high - low


def _merge_adjacent(intervals: Sequence[IndexRange]) -> list[IndexRange]:
    """Return the intervals with adjacent ones merged. Fewer pieces mean fewer manifest entries and fewer reads."""
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
"""Maximum number of chunks of interleaved strided shards. A malicious file may name any number, and each costs time."""


class MeshDimPlacement(NamedTuple):
    """Placement of a DTensor along one mesh dim."""

    dim: int | None
    """Tensor dim that the mesh dim shards, or None if it replicates."""

    split_factor: int = 1
    """See `DimShard.split_factor`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DTensorLayout:
    """Position of a local tensor in the global array."""

    global_shape: tuple[int, ...]
    """Shape of the global array (elements)."""

    local_shape: tuple[int, ...] | None = None
    """Required shape of the local tensor, or None if this rank holds no part of the array, whatever its local tensor
    is."""

    pieces: tuple[Piece, ...] = ()

    spec: tuple[object, ...] | None = None
    """Sharding of the array (see `ArrayMetadata.spec`)."""

    uneven_shards: tuple[tuple[int, DimShard], ...] = ()
    """Uneven interleaved shards (see `find_uneven_shards`). Versions of torch disagree about these."""

    problem: str = ""
    """Reason why the layout is unknown. If set, there are no pieces."""


def compute_dtensor_layout(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[MeshDimPlacement],
    names: Sequence[str] | None,
) -> DTensorLayout:
    """Compute the layout of a DTensor on one rank.

    Args:
        shape: Global shape.
        mesh_shape: Size of each mesh dim.
        coordinate: Coordinate of the rank along each mesh dim.
        placements: Placement along each mesh dim.
        names: Names of the mesh dims, or None for ``mesh0``, ``mesh1``, ...

    Raises:
        ValueError: The arguments contradict each other, or strided shards create too many chunks.

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
