"""Whether tensors in files of torch.save are equal: their CRC-32s say so, and bytes are read where there are none."""

from __future__ import annotations

from contextlib import closing

from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.layouts.torch_save.zip_reader import TensorAt
from xla_ckpt.sharding.box import Box
from xla_ckpt.storage.base import ReadDirectory, Source

_CHUNK = 1 << 20
"""Bytes of two tensors that are compared at a time."""


def same_tensor(directory: ReadDirectory, one: TensorAt, other: TensorAt) -> bool:
    """Whether two tensors have the same type, shape and bytes. Of two that are not in C order only CRC-32s say it.

    Raises:
        CorruptCheckpointError: A file ends inside of one.
    """
    if (one.file, one.offset, one.dtype, one.shape) == (other.file, other.offset, other.dtype, other.shape):
        return one.strides == other.strides
    if (one.dtype, one.shape, one.strides) != (other.dtype, other.shape, other.strides):
        return False
    if one.crc is not None and other.crc is not None:
        return one.crc == other.crc
    size = Box.whole(one.shape).size * one.dtype.itemsize
    if one.strides is not None or not size:
        return not size
    with closing(directory.open(one.file)) as a, closing(directory.open(other.file)) as b:
        pieces = ((at, min(_CHUNK, size - at)) for at in range(0, size, _CHUNK))
        return all(_bytes(a, one, at, n) == _bytes(b, other, at, n) for at, n in pieces)


def bytes_inside(directory: ReadDirectory, at: TensorAt, first: int, nbytes: int) -> bytearray:
    """Bytes of a tensor, from the number of the first of them.

    Raises:
        CorruptCheckpointError: The file ends before them.
    """
    with closing(directory.open(at.file)) as source:
        return _bytes(source, at, first, nbytes)


def _bytes(source: Source, at: TensorAt, first: int, nbytes: int) -> bytearray:
    data = bytearray(nbytes)
    if source.read_into(memoryview(data), at.offset + first) < nbytes:
        raise CorruptCheckpointError("a file ends inside of a tensor", file=at.file)
    return data
