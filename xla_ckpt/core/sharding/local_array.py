"""The map from one rank's local tensor to the global array, in pieces.

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
    """Which copy a piece is, where several ranks hold it that hold different parts of the rest."""

    index: int
    """From 0."""

    count: int
    """How many copies there are, on ranks that are otherwise alike."""

    group: Hashable
    """Names the holders among those ranks."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of a local tensor that are neighbours in the global array, too."""

    local_box: Box
    """Where they are in the local tensor."""

    global_box: Box
    """Where they are in the global array; of the same shape."""

    local_device: int = 0
    """Which local device holds them."""

    copy: PieceCopy | None = None
    """Which copy of them this is; None if they have no more copies than the whole array."""

    def __post_init__(self) -> None:
        if self.local_box.shape != self.global_box.shape:
            raise ValueError(f"{self.local_box} of a local tensor cannot be {self.global_box} of the global one")

    def compute_parent_box(self, local_shape: Sequence[int]) -> Box:
        """The box of the global array that a whole local tensor of this shape would be, if it were like this piece.

        >>> str(Piece(Box((0, 1), (2, 2)), Box((4, 1), (6, 2))).compute_parent_box((2, 3)))
        '[4:6, 0:3]'
        """
        start = tuple(map(sub, self.global_box.start, self.local_box.start))
        return Box(start, tuple(first + n for first, n in zip(start, local_shape, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalArray:
    """A local tensor, and where its elements are in the global array. What no piece covers is padding.

    Padding is never stored in files of this library.
    """

    shape: tuple[int, ...]
    """Global shape (elements)."""

    pieces: tuple[Piece, ...]
    """Disjoint. A rank that holds nothing of the array has none."""

    replica: int = 0
    """Which of the equal copies this is."""

    replicas: int = 1
    """How many copies there are in the job."""

    group: Hashable = None
    """Names the set of holders (see `xla_ckpt.core.plan.leaf.LocalShard`). Pieces with a `copy` have more of them."""

    spec: tuple[object, ...] | None = None
    """For people and for `explain`: per tensor dim None or what splits it (see `Sharding.spec`)."""

    boxes: tuple[Box, ...] = field(init=False, repr=False, compare=False)
    """The regions of the global array that the pieces are, each of them once. A load asks for them several times an
    array."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "boxes", tuple(dict.fromkeys(piece.global_box for piece in self.pieces)))

    def is_filled_by(self, shape: Sequence[int]) -> bool:
        """Whether a local tensor of this shape is one piece, and none of it padding: as nearly every tensor is."""
        return len(self.pieces) == 1 and self.pieces[0].local_box == Box.from_shape(shape)

    def slice_rows(self, low: int, high: int) -> tuple[Piece, ...]:
        """The pieces of a tensor that holds only the rows ``low <= i < high`` of the local one.

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
    """A tensor that this process holds alone: one value for all tensors of a shape."""
    box = Box.from_shape(shape)
    return LocalArray(shape=shape, pieces=(Piece(box, box),))


def compute_chunk_bounds(low: int, high: int, parts: int, index: int) -> tuple[int, int]:
    """One of `parts` chunks of a range, as `torch.chunk` and DTensor cut it: the last ones may be short or empty.

    >>> [compute_chunk_bounds(0, 5, 4, i) for i in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    size = -(-(high - low) // parts)
    first = min(low + index * size, high)
    return first, min(first + size, high)
