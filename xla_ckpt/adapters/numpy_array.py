"""numpy arrays."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from xla_ckpt import dtypes
from xla_ckpt.adapters.base import Placement, Target
from xla_ckpt.adapters.replicas import replicated
from xla_ckpt.dtypes import DType
from xla_ckpt.layout.box import Box
from xla_ckpt.plan.leaf import Leaf, whole_leaf
from xla_ckpt.snapshot.memory import Slabs
from xla_ckpt.snapshot.take import HostShard


def bytes_of(array: Any) -> memoryview:
    """The memory of a C-contiguous array, of any dtype."""
    return memoryview(array.reshape(-1).view(np.uint8)) if array.nbytes else memoryview(bytearray())


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Numpy's type of this name, from ml_dtypes for those that numpy does not know itself.

    Raises:
        TypeError: Neither knows it.
    """
    try:
        return np.dtype(dtype.name)
    except TypeError:
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype.name))
        return found


class Numpy:
    """numpy arrays of numbers, in native byte order."""

    kind = "numpy"

    def accepts(self, value: Any) -> bool:
        return type(value) in (np.ndarray, np.memmap) and dtypes.known(value.dtype.name) and bool(value.dtype.isnative)

    def identity(self, value: Any) -> Hashable | None:
        return (value.ctypes.data, value.dtype.name, value.shape, value.strides) if value.size else None

    def leaf(self, path: str, value: Any, placement: Placement) -> Leaf:
        return replicated(whole_leaf(path, dtypes.dtype(value.dtype.name), tuple(value.shape)), placement)

    def host(self, values: Sequence[Any]) -> list[list[HostShard]]:
        shards = []
        for value in values:
            plain = np.ascontiguousarray(value).reshape(value.shape)  # a copy exactly where it was not contiguous
            shards.append([HostShard(bytes_of(plain), plain, immutable=not value.flags.c_contiguous)])
        return shards

    def into(self, value: Any, *, owned: bool) -> Target:
        dtype, shape = dtypes.dtype(value.dtype.name), tuple(value.shape)
        if value.flags.c_contiguous and value.flags.writeable:
            return Target(dtype, shape, (Box.whole(shape),), True, lambda _: [bytes_of(value)], lambda: value)
        fresh = self.like(value)

        def install() -> Any:
            np.copyto(value, fresh.install())
            return value

        return Target(dtype, shape, fresh.boxes, False, fresh.memory, install)

    def like(self, value: Any) -> Target:
        return fresh(dtypes.dtype(value.dtype.name), tuple(value.shape), value.dtype)


def fresh(dtype: DType, shape: tuple[int, ...], numpy_type: np.dtype[Any]) -> Target:
    """A target that makes a new array."""
    made: Any = None

    def memory(_: Slabs) -> list[memoryview]:
        nonlocal made
        made = np.empty(shape, numpy_type)
        return [bytes_of(made)]

    return Target(dtype, shape, (Box.whole(shape),), False, memory, lambda: made)
