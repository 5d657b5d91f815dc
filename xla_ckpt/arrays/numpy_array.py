"""numpy arrays."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from xla_ckpt import dtypes
from xla_ckpt.dtypes import DType
from xla_ckpt.engine.numpy_types import numpy_dtype
from xla_ckpt.engine.target import ComposedTarget, Target, changed
from xla_ckpt.errors import UsageError
from xla_ckpt.sharding.local_array import LocalArray
from xla_ckpt.sharding.strided import HOST_MEMORY, Strided
from xla_ckpt.snapshot.memory import Slabs
from xla_ckpt.snapshot.shards import HostShard


def bytes_of_array(array: Any) -> memoryview:
    """The memory of a C-contiguous array, of any dtype."""
    return memoryview(array.reshape(-1).view(np.uint8)) if array.nbytes else memoryview(bytearray())


class Numpy:
    """numpy arrays of numbers, in native byte order."""

    kind = "numpy"

    def accepts(self, value: Any) -> bool:
        return type(value) in (np.ndarray, np.memmap) and dtypes.known(value.dtype.name) and bool(value.dtype.isnative)

    def identity(self, value: Any) -> Hashable | None:
        return (value.ctypes.data, value.dtype.name, value.shape, value.strides) if value.size else None

    def dtype(self, value: Any, path: str = "") -> DType:
        return dtypes.dtype(value.dtype.name)

    def look(self, value: Any) -> Hashable | None:
        return (value.dtype, value.shape) if type(value) is np.ndarray else None

    def shape(self, value: Any) -> tuple[int, ...]:
        return tuple(value.shape)

    def place(self, value: Any, path: str = "") -> LocalArray | None:
        return None

    def host(self, values: Sequence[tuple[Any, LocalArray]]) -> list[list[HostShard]]:
        return [[_host(v[p.local.slices]) for p in local.pieces] for v, local in values]

    shards = host

    def into(self, value: Any, local: LocalArray, *, owned: bool) -> Target:
        _check_writable(value)
        memory = _strided(value)
        over = [memory.cut(piece.local) for piece in local.pieces]
        if value.flags.c_contiguous and local.fills(value.shape):
            return ComposedTarget(
                dtype=self.dtype(value),
                local=local,
                live=True,
                fill=lambda _: [bytes_of_array(value)],
                finish=lambda: value,
                lies=lambda: over,
            )
        fresh = self.like(value, local)

        def install() -> Any:
            loaded = fresh.install()
            for piece in local.pieces:
                np.copyto(value[piece.local.slices], loaded[piece.local.slices])
            return value

        return changed(fresh, install, lambda: over)

    def like(self, value: Any, local: LocalArray, dtype: DType | None = None) -> Target:
        element = dtype or self.dtype(value)
        return fresh_numpy(element, tuple(value.shape), numpy_dtype(element), local)


def _strided(value: Any) -> Strided:
    return Strided(HOST_MEMORY, value.ctypes.data, tuple(value.shape), value.strides, value.itemsize)


def _check_writable(value: Any) -> None:
    """Refuse a target that numpy would not write to, or whose elements share memory."""
    if value.flags.writeable and (value.flags.c_contiguous or _strided(value).is_apart):
        return
    raise UsageError(
        "nothing can be loaded into this array",
        expected="an array that can be written to, with memory for each element",
        found=f"shape {list(value.shape)}, strides {list(value.strides)}"
        if value.flags.writeable
        else "read-only memory",
        hint="Give it memory of its own, with copy().",
    )


def _host(value: Any) -> HostShard:
    plain = np.ascontiguousarray(value).reshape(value.shape)  # a copy exactly where it was not contiguous
    return HostShard(bytes_of_array(plain), plain, immutable=not value.flags.c_contiguous)


def fresh_numpy(dtype: DType, shape: tuple[int, ...], numpy_type: np.dtype[Any], local: LocalArray) -> Target:
    """A target that makes a new array of a local shape; its padding is zero."""
    array: Any = None
    buffers: list[Any] = []

    def memory(_: Slabs) -> list[memoryview]:
        nonlocal array
        if local.fills(shape):
            array = np.empty(shape, numpy_type)
            return [bytes_of_array(array)]
        array = np.zeros(shape, numpy_type)
        buffers.extend(np.empty(p.local.shape, numpy_type) for p in local.pieces)
        return [bytes_of_array(b) for b in buffers]

    def install() -> Any:
        for piece, buffer in zip(local.pieces, buffers, strict=False):
            np.copyto(array[piece.local.slices], buffer)
        return array

    return ComposedTarget(
        dtype=dtype,
        local=local,
        live=False,
        fill=memory,
        finish=install,
    )
