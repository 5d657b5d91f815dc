"""Compare two stored arrays within bounded memory; arrays with equal digests are not read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from xla_ckpt.core.dtypes import DType, to_numpy_dtype
from xla_ckpt.core.manifest.arrays import ArrayRecord
from xla_ckpt.core.plan.restore_plan import ReadRequest, plan_restore
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.memory_layout import split_by_span
from xla_ckpt.loading.read import read_into
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.progress import IoContext
from xla_ckpt.storage.threads import READ_THREADS

MEMORY_FACTOR = 16
"""Bytes of memory for each byte of a compared array, including both copies and their float64 values."""


@dataclass(frozen=True, slots=True)
class ArrayDiff:
    """Difference of an array from another one of the same dtype and shape."""

    elements: int = 0
    """Number of elements whose bytes differ."""

    max_abs: float = 0.0
    """Largest absolute difference of two values; inf if one of them is NaN or infinite, and the other one is not."""

    squares: float = 0.0
    """Sum of the squares of all differences."""

    base: float = 0.0
    """Sum of the squares of the first array's finite values."""

    def __add__(self, other: ArrayDiff) -> ArrayDiff:
        return ArrayDiff(
            self.elements + other.elements,
            max(self.max_abs, other.max_abs),
            self.squares + other.squares,
            self.base + other.base,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the difference as plain JSON, with infinity as a string."""
        numbers = {"max_abs": self.max_abs, "relative": self.relative}
        return {"elements": self.elements, **{k: v if math.isfinite(v) else str(v) for k, v in numbers.items()}}

    @property
    def relative(self) -> float:
        """L2 norm of the difference, relative to the L2 norm of the first array."""
        if not self.squares:
            return 0.0
        return float(np.sqrt(self.squares / self.base)) if self.base else float("inf")


def compare_arrays(
    reader_a: TagReader, leaf_a: str, reader_b: TagReader, leaf_b: str, *, max_memory: int, workers: int = READ_THREADS
) -> ArrayDiff | None:
    """Compare a stored array with another one of the same dtype and shape; None if all bytes are equal.

    All bytes that are read are verified. If the digests of both are known and equal, nothing is read.

    Raises:
        CorruptCheckpointError: A tag is damaged.
        IncompatibleCheckpointError: An array is not stored, or its sharding is unknown.
        OSError: The storage failed.
    """
    a, b = reader_a.manifest.get_array(leaf_a), reader_b.manifest.get_array(leaf_b)
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    if has_same_digests(reader_a, a, reader_b, b):
        return None
    whole, itemsize = Box.from_shape(a.shape), a.dtype.itemsize
    total = ArrayDiff()
    for part in split_by_span(whole, whole, itemsize, max(max_memory // MEMORY_FACTOR, 1)):
        slots = [memoryview(bytearray(part.size * itemsize)) for _ in range(2)]
        for reader, name, slot in ((reader_a, leaf_a, slots[0]), (reader_b, leaf_b, slots[1])):
            read_into(
                reader, plan_restore(reader.manifest, [ReadRequest(name, part, 0)]), [slot], IoContext(workers=workers)
            )
        total += compare_bytes(slots[0], slots[1], a.dtype)
    return total if total.elements else None


def has_same_bytes(
    reader: TagReader, leaf_a: str, leaf_b: str, *, max_memory: int, workers: int = READ_THREADS
) -> bool:
    """Return True if two arrays of a tag have the same dtype, shape and bytes. Raises errors as `compare_arrays`."""
    a, b = reader.manifest.find_array(leaf_a), reader.manifest.find_array(leaf_b)
    if a is None or b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return compare_arrays(reader, leaf_a, reader, leaf_b, max_memory=max_memory, workers=workers) is None


def has_same_digests(one: TagReader, a: ArrayRecord, other: TagReader, b: ArrayRecord) -> bool:
    """Return True if two arrays of the same dtype and shape are split in the same way and have equal digests.

    The comparison ends at the first shard that differs. Without digests, the result is False.
    """
    ours, theirs = list(a), list(b)
    if [(s.box, s.parent_box) for s in ours] != [(s.box, s.parent_box) for s in theirs]:
        return False  # split over other meshes: the shards contain different elements
    for shard, twin in zip(ours, theirs, strict=True):
        nbytes = (shard.parent_box or shard.box).size * a.dtype.itemsize
        known = one.get_digests(shard.file, shard.offset, nbytes)
        if known is None or known != other.get_digests(twin.file, twin.offset, nbytes):
            return False
    return True


def compare_bytes(one: memoryview, other: memoryview, dtype: DType) -> ArrayDiff:
    """Compare the values in two byte buffers.

    >>> import numpy as np
    >>> a, b = (memoryview(np.array(v, np.float32)).cast("B") for v in ([3, 4], [3, 4.5]))
    >>> compare_bytes(a, b, DType("float32", 4, "F32"))
    ArrayDiff(elements=1, max_abs=0.5, squares=0.25, base=25.0)
    """
    if dtype.packed:  # packed values are compared as bytes
        a, b = np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8)
    else:
        a, b = (np.frombuffer(data, to_numpy_dtype(dtype)) for data in (one, other))
    rows = (np.frombuffer(data, np.uint8).reshape(-1, dtype.itemsize) for data in (one, other))
    elements = int(np.count_nonzero((next(rows) != next(rows)).any(axis=1)))
    kind = np.complex128 if dtype.name.startswith("complex") else np.float64
    x, y = a.astype(kind), b.astype(kind)
    with np.errstate(invalid="ignore", over="ignore"):
        size = np.abs(x)
        base = float(np.square(size[np.isfinite(size)]).sum())
        if not elements:
            return ArrayDiff(base=base)
        apart = np.abs(x - y)
        apart[(x == y) | (np.isnan(x) & np.isnan(y))] = 0.0
        apart[np.isnan(apart)] = np.inf
        return ArrayDiff(elements, float(apart.max()), float(np.square(apart).sum()), base)
