"""Mapping of one rank's local tensor to the global array, in pieces.

Every kind of parallelism is converted to this form.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import sub

from xla_ckpt.core.sharding.box import Box


@dataclass(frozen=True, slots=True)
class PieceCopy:
    """Copy number of a piece that several ranks hold, although they hold different parts of the rest of the array."""

    index: int
    """Index of this copy, from 0."""

    count: int
    """Number of copies, among ranks that are otherwise equal."""

    group: Hashable
    """Identifier of the group of ranks that hold the copies."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a local tensor that is also a box of the global array.

    Raises:
        ValueError: The boxes have different shapes.
    """

    local_box: Box
    """Box in the local tensor."""

    global_box: Box
    """Box in the global array, of the same shape."""

    local_device: int = 0
    """Index of the local device that holds the elements."""

    copy: PieceCopy | None = None
    """Copy number of this piece, or None if the piece has no more copies than the whole array."""

    def __post_init__(self) -> None:
        if self.local_box.shape != self.global_box.shape:
            raise ValueError(f"{self.local_box} of a local tensor cannot be {self.global_box} of the global one")

    def compute_parent_box(self, local_shape: Sequence[int]) -> Box:
        """Return the box of a whole local tensor of this shape in the global array, extrapolated from this piece.

        >>> str(Piece(Box((0, 1), (2, 2)), Box((4, 1), (6, 2))).compute_parent_box((2, 3)))
        '[4:6, 0:3]'
        """
        start = tuple(map(sub, self.global_box.start, self.local_box.start))
        return Box(start, tuple(first + n for first, n in zip(start, local_shape, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalArray:
    """A local tensor and the position of its elements in the global array. Elements that no piece covers are padding.

    xla-ckpt never stores padding in native files.
    """

    shape: tuple[int, ...]
    """Global shape (elements)."""

    pieces: tuple[Piece, ...]
    """Disjoint pieces. Empty if the rank holds no part of the array."""

    replica: int = 0
    """Index of this replica."""

    replicas: int = 1
    """Number of replicas in the job."""

    group: Hashable = None
    """Identifier of the set of holders (see `xla_ckpt.core.plan.leaf.LocalShard`). Pieces with a `copy` have more
    holders."""

    spec: tuple[object, ...] | None = None
    """Sharding per tensor dim (see `Sharding.spec`), for display and for `explain`."""

    boxes: tuple[Box, ...] = field(init=False, repr=False, compare=False)
    """Distinct global boxes of the pieces. Cached, because a load reads them several times per array."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "boxes", tuple(dict.fromkeys(piece.global_box for piece in self.pieces)))

    def is_filled_by(self, shape: Sequence[int]) -> bool:
        """Return True if a local tensor of this shape is a single piece without padding, as nearly all tensors are."""
        return len(self.pieces) == 1 and self.pieces[0].local_box == Box.from_shape(shape)

    def slice_rows(self, low: int, high: int) -> tuple[Piece, ...]:
        """Return the pieces of a tensor that holds only the rows ``low <= i < high`` of the local tensor.

        >>> array = LocalArray(shape=(6, 2), pieces=(Piece(Box.from_shape((3, 2)), Box((3, 0), (6, 2))),))
        >>> [(str(p.local_box), str(p.global_box)) for p in array.slice_rows(1, 3)]
        [('[0:2, 0:2]', '[4:6, 0:2]')]
        """
        return tuple(_slice_rows(self.pieces, low, high))


def _slice_rows(pieces: Iterable[Piece], low: int, high: int) -> Iterable[Piece]:
    for piece in pieces:
        first, last = max(piece.local_box.start[0], low), min(piece.local_box.stop[0], high)
        if first < last:
            shift = piece.global_box.start[0] - piece.local_box.start[0]
            yield replace(
                piece,
                local_box=piece.local_box.slice_dim(0, first - low, last - low),
                global_box=piece.global_box.slice_dim(0, first + shift, last + shift),
            )


@functools.lru_cache(maxsize=4096)
def create_unsharded(shape: tuple[int, ...]) -> LocalArray:
    """Return the local array of an unsharded, unreplicated tensor, shared by all tensors of a shape."""
    box = Box.from_shape(shape)
    return LocalArray(shape=shape, pieces=(Piece(box, box),))


def compute_chunk_bounds(low: int, high: int, parts: int, index: int) -> tuple[int, int]:
    """Return one of `parts` chunks of a range, as `torch.chunk` and DTensor split it: the last ones may be short or
    empty.

    >>> [compute_chunk_bounds(0, 5, 4, i) for i in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    size = -(-(high - low) // parts)
    first = min(low + index * size, high)
    return first, min(first + size, high)
