"""Tensors of files of torch.save as shards: those that do not lie in C order (transposed, channels last), as many."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

from xla_ckpt.errors import UnsupportedStateError, naming
from xla_ckpt.layouts.torch_save.stand_ins import META, TensorParts
from xla_ckpt.layouts.torch_save.zip_reader import TensorAt
from xla_ckpt.manifest.arrays import ArrayRecord, array_record
from xla_ckpt.manifest.records import UnknownArray
from xla_ckpt.manifest.shards import Shard
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.local_array import Piece
from xla_ckpt.sharding.ranges import runs
from xla_ckpt.tree.codec import Composite

MAX_BOXES = 1 << 16
"""Boxes of one tensor. Each is a read of its own: a tensor that falls into more of them would be read for hours."""


def shards_at(at: TensorAt, box: Box, number: int) -> Iterator[Shard]:
    """A tensor as shards: one, unless it is not in C order.

    Args:
        box: What it is of its array.

    Raises:
        UnsupportedStateError: They would be more than `MAX_BOXES`.
    """
    if at.strides is None:
        yield Shard(box, number, at.offset)
        return
    with naming(file=at.file):
        for part, first in boxes(at.shape, at.strides, box.start):
            yield Shard(part, number, at.offset + first * at.dtype.itemsize)


def record_at(at: TensorAt, number: int) -> ArrayRecord:
    """A tensor that is a whole array; `number` is that of its file.

    Raises:
        UnsupportedStateError: See `shards_at`.
    """
    return array_record(at.dtype, at.shape, [*shards_at(at, Box.whole(at.shape), number)])


def shards_of_piece(at: TensorAt, piece: Piece, number: int) -> list[Shard]:
    """A piece of a local tensor, as shards of the file of this number.

    Raises:
        UnsupportedStateError: The tensor is not in C order, and consists of several pieces or of too many boxes.
    """
    whole = Box.whole(at.shape)
    if at.strides is not None:
        if piece.local != whole:
            raise UnsupportedStateError("a local tensor of several pieces is not stored in C order")
        return [*shards_at(at, piece.box, number)]
    where = runs(piece.local, whole, at.dtype.itemsize)
    if where.contiguous:
        return [Shard(piece.box, number, at.offset + where.offset)]
    return [Shard(piece.box, number, at.offset, piece.frame(at.shape))]


def composite_of(parts: TensorParts) -> Composite | UnknownArray:
    """A tensor that consists of several, with their records in it. If one of them cannot be read, the whole cannot."""
    if parts.kind == META:
        return UnknownArray(
            problem="the file has no bytes of this tensor, which was on the meta device when it was saved",
            hint="Load the others without it.",
            shape=parts.about["size"],
            tensors=1,
        )
    unknown = next((member for member in parts.members.values() if isinstance(member, UnknownArray)), None)
    return unknown or Composite(parts.kind, parts.members, parts.about)


def boxes(shape: tuple[int, ...], steps: tuple[int, ...], origin: tuple[int, ...]) -> Iterator[tuple[Box, int]]:
    """(box, elements from the tensor's first one to the box's) of boxes that make up a tensor.

    The elements of each box follow one another in memory, in C order.

    Args:
        shape: Of the tensor.
        steps: How far apart its elements lie along each dim (elements).
        origin: Of the tensor, in the array whose part it is.

    Raises:
        UnsupportedStateError: They would be more than `MAX_BOXES`.

    >>> [(str(box), at) for box, at in boxes((2, 3), (1, 2), (0, 5))]
    [('[0:2, 5:6]', 0), ('[0:2, 6:7]', 2), ('[0:2, 7:8]', 4)]
    """
    kept = _kept(shape, steps)
    count = prod(n for dim, n in enumerate(shape) if dim not in kept)
    if count > MAX_BOXES:
        raise UnsupportedStateError(
            "a tensor is not stored in C order, and falls into too many parts to be read where they lie",
            expected=f"at most {MAX_BOXES} parts",
            found=f"{count} of shape {list(shape)}, strides {list(steps)}",
            hint="Load it with the library that wrote it, make it contiguous, and save it anew.",
        )
    for at in product(*(range(1 if dim in kept else n) for dim, n in enumerate(shape))):
        start = tuple(a + i for a, i in zip(origin, at, strict=True))
        stop = tuple(a + (n if dim in kept else 1) for dim, (a, n) in enumerate(zip(start, shape, strict=True)))
        yield Box(start, stop), sum(i * step for i, step in zip(at, steps, strict=True))


def _kept(shape: tuple[int, ...], steps: tuple[int, ...]) -> set[int]:
    """The dims that each box has whole: from the one with neighbouring elements on, as long as C order goes on."""
    kept = {dim for dim, n in enumerate(shape) if n == 1}
    size, last = 1, len(shape)
    while True:
        neighbours = [dim for dim in range(last) if dim not in kept and steps[dim] == size]
        if not neighbours:
            return kept
        last = neighbours[-1]
        kept.add(last)
        size *= shape[last]
