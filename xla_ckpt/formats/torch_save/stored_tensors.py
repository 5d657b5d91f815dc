"""Tensors in torch.save files as shards of a manifest, also non-contiguous ones, and equality of tensors.

Equality is determined by CRC-32s, or by reading bytes if there are none. A tensor that is not in C order (transposed,
channels last) becomes several shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import product
from math import prod

from xla_ckpt.core.manifest.arrays import ArrayRecord, Shard, create_array_record
from xla_ckpt.core.manifest.manifest import UnreadableArray
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.local_array import Piece
from xla_ckpt.core.sharding.memory_layout import compute_runs
from xla_ckpt.core.tree.values import Composite
from xla_ckpt.errors import CorruptCheckpointError, UnsupportedStateError, annotate_errors
from xla_ckpt.formats.torch_save.pickle_stubs import META_TENSOR_KIND, CompositeTensor
from xla_ckpt.formats.torch_save.zip_reader import TensorLocation
from xla_ckpt.storage.base import FileReader, ReadDirectory

_COMPARE_BYTES = 1 << 20
"""Bytes of two tensors that are compared at a time."""


def is_same_tensor(directory: ReadDirectory, one: TensorLocation, other: TensorLocation) -> bool:
    """Return True if two tensors are equal in dtype, shape and bytes; by CRC-32s only, if not in C order.

    Raises:
        CorruptCheckpointError: A file ends inside of a tensor.
    """
    if (one.file, one.offset, one.dtype, one.shape) == (other.file, other.offset, other.dtype, other.shape):
        return one.strides == other.strides
    if (one.dtype, one.shape, one.strides) != (other.dtype, other.shape, other.strides):
        return False
    if one.crc is not None and other.crc is not None:
        return one.crc == other.crc
    size = Box.from_shape(one.shape).size * one.dtype.itemsize
    if one.strides is not None or not size:
        return not size
    with closing(directory.open(one.file)) as a, closing(directory.open(other.file)) as b:
        pieces = ((at, min(_COMPARE_BYTES, size - at)) for at in range(0, size, _COMPARE_BYTES))
        return all(_read_bytes(a, one, at, n) == _read_bytes(b, other, at, n) for at, n in pieces)


def read_tensor_bytes(directory: ReadDirectory, at: TensorLocation, first: int, nbytes: int) -> bytearray:
    """Read `nbytes` bytes of a tensor, beginning at byte `first`.

    Raises:
        CorruptCheckpointError: The file ends before them.
    """
    with closing(directory.open(at.file)) as source:
        return _read_bytes(source, at, first, nbytes)


def _read_bytes(source: FileReader, at: TensorLocation, first: int, nbytes: int) -> bytearray:
    data = bytearray(nbytes)
    if source.read_into(memoryview(data), at.offset + first) < nbytes:
        raise CorruptCheckpointError("a file ends inside of a tensor", file=at.file)
    return data


MAX_BOXES = 1 << 16
"""Maximum number of boxes of one tensor. Each box is a separate read, so that more of them would take hours."""


def iterate_shards(at: TensorLocation, box: Box, number: int) -> Iterator[Shard]:
    """Yield the shards of a tensor: one, unless it is not in C order.

    Args:
        box: Region of the tensor in its array.

    Raises:
        UnsupportedStateError: There are more than `MAX_BOXES` shards.
    """
    if at.strides is None:
        yield Shard(box, number, at.offset)
        return
    with annotate_errors(file=at.file):
        for part, first in iterate_boxes(at.shape, at.strides, box.start):
            yield Shard(part, number, at.offset + first * at.dtype.itemsize)


def make_array_record(at: TensorLocation, number: int) -> ArrayRecord:
    """Return the record of a tensor that is a full array; `number` is the number of its file.

    Raises:
        UnsupportedStateError: See `iterate_shards`.
    """
    return create_array_record(at.dtype, at.shape, [*iterate_shards(at, Box.from_shape(at.shape), number)])


def list_piece_shards(at: TensorLocation, piece: Piece, number: int) -> list[Shard]:
    """Return a piece of a local tensor as shards of the file with this number.

    Raises:
        UnsupportedStateError: The tensor is not in C order, and consists of several pieces or of too many boxes.
    """
    whole = Box.from_shape(at.shape)
    if at.strides is not None:
        if piece.local_box != whole:
            raise UnsupportedStateError("a local tensor of several pieces is not stored in C order")
        return [*iterate_shards(at, piece.global_box, number)]
    where = compute_runs(piece.local_box, whole, at.dtype.itemsize)
    if where.is_contiguous:
        return [Shard(piece.global_box, number, at.offset + where.offset)]
    return [Shard(piece.global_box, number, at.offset, piece.compute_parent_box(at.shape))]


def make_composite(parts: CompositeTensor) -> Composite | UnreadableArray:
    """Compose a tensor from its records. The result is unreadable if one of them is."""
    if parts.kind == META_TENSOR_KIND:
        return UnreadableArray(
            problem="the file has no bytes of this tensor, which was on the meta device when it was saved",
            hint="Load the others without it.",
            shape=parts.about["size"],
            tensor_count=1,
        )
    unknown = next((member for member in parts.members.values() if isinstance(member, UnreadableArray)), None)
    return unknown or Composite(parts.kind, parts.members, parts.about)


def iterate_boxes(
    shape: tuple[int, ...], strides: tuple[int, ...], origin: tuple[int, ...]
) -> Iterator[tuple[Box, int]]:
    """Yield (box, offset of its first element from the first of the tensor) of boxes that partition a tensor.

    The elements of each box are contiguous in memory, in C order.

    Args:
        shape: Shape of the tensor.
        strides: Strides of the tensor (elements).
        origin: Position of the tensor in the array that it is a part of.

    Raises:
        UnsupportedStateError: There are more than `MAX_BOXES` boxes.

    >>> [(str(box), at) for box, at in iterate_boxes((2, 3), (1, 2), (0, 5))]
    [('[0:2, 5:6]', 0), ('[0:2, 6:7]', 2), ('[0:2, 7:8]', 4)]
    """
    kept = _find_whole_dims(shape, strides)
    count = prod(n for dim, n in enumerate(shape) if dim not in kept)
    if count > MAX_BOXES:
        raise UnsupportedStateError(
            "a tensor is not stored in C order, and falls into too many parts to be read where they lie",
            expected=f"at most {MAX_BOXES} parts",
            found=f"{count} of shape {list(shape)}, strides {list(strides)}",
            hint="Load it with the library that wrote it, make it contiguous, and save it anew.",
        )
    for at in product(*(range(1 if dim in kept else n) for dim, n in enumerate(shape))):
        start = tuple(a + i for a, i in zip(origin, at, strict=True))
        stop = tuple(a + (n if dim in kept else 1) for dim, (a, n) in enumerate(zip(start, shape, strict=True)))
        yield Box(start, stop), sum(i * step for i, step in zip(at, strides, strict=True))


def _find_whole_dims(shape: tuple[int, ...], strides: tuple[int, ...]) -> set[int]:
    """Return the dims that are complete in each box: from the contiguous dim outwards, as long as C order continues."""
    kept = {dim for dim, n in enumerate(shape) if n == 1}
    size, last = 1, len(shape)
    while True:
        neighbours = [dim for dim in range(last) if dim not in kept and strides[dim] == size]
        if not neighbours:
            return kept
        last = neighbours[-1]
        kept.add(last)
        size *= shape[last]
