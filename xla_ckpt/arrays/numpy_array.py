"""Adapter for numpy arrays."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from xla_ckpt.core import dtypes
from xla_ckpt.core.dtypes import DType, to_numpy_dtype
from xla_ckpt.core.sharding.local_array import LocalArray
from xla_ckpt.core.sharding.memory_layout import HOST_MEMORY, StridedMemory
from xla_ckpt.errors import UsageError
from xla_ckpt.loading.target import ComposedTarget, Target, with_installer
from xla_ckpt.snapshot.memory import SlabAllocator
from xla_ckpt.snapshot.shards import HostShard


def get_array_bytes(array: Any) -> memoryview:
    """Return the memory of a C-contiguous array, of any dtype."""
    return memoryview(array.reshape(-1).view(np.uint8)) if array.nbytes else memoryview(bytearray())


class NumpyAdapter:
    """An adapter for numpy arrays of numbers, in native byte order."""

    kind = "numpy"

    def can_handle(self, value: Any) -> bool:
        return (
            type(value) in (np.ndarray, np.memmap)
            and dtypes.is_known_dtype(value.dtype.name)
            and bool(value.dtype.isnative)
        )

    def get_identity(self, value: Any) -> Hashable | None:
        return (value.ctypes.data, value.dtype.name, value.shape, value.strides) if value.size else None

    def get_dtype(self, value: Any, path: str = "") -> DType:
        return dtypes.get_dtype(value.dtype.name)

    def get_form_key(self, value: Any) -> Hashable | None:
        return (value.dtype, value.shape) if type(value) is np.ndarray else None

    def get_shape(self, value: Any) -> tuple[int, ...]:
        return tuple(value.shape)

    def locate(self, value: Any, path: str = "") -> LocalArray | None:
        return None

    def get_host_shards(self, values: Sequence[tuple[Any, LocalArray]]) -> list[list[HostShard]]:
        return [[_create_host_shard(v[p.local_box.slices]) for p in local.pieces] for v, local in values]

    get_shards = get_host_shards

    def create_in_place_target(self, value: Any, local: LocalArray, *, owned: bool) -> Target:
        _check_writable(value)
        memory = _get_strided_memory(value)
        over = [memory.slice_box(piece.local_box) for piece in local.pieces]
        if value.flags.c_contiguous and local.is_filled_by(value.shape):
            return ComposedTarget(
                dtype=self.get_dtype(value),
                local=local,
                live=True,
                allocator=lambda _: [get_array_bytes(value)],
                installer=lambda: value,
                aliases=lambda: over,
            )
        fresh = self.create_target_like(value, local)

        def install() -> Any:
            loaded = fresh.install()
            for piece in local.pieces:
                np.copyto(value[piece.local_box.slices], loaded[piece.local_box.slices])
            return value

        return with_installer(fresh, install, lambda: over)

    def create_target_like(self, value: Any, local: LocalArray, dtype: DType | None = None) -> Target:
        element = dtype or self.get_dtype(value)
        return create_numpy_target(element, tuple(value.shape), to_numpy_dtype(element), local)


def _get_strided_memory(value: Any) -> StridedMemory:
    return StridedMemory(HOST_MEMORY, value.ctypes.data, tuple(value.shape), value.strides, value.itemsize)


def _check_writable(value: Any) -> None:
    """Check that a target is writable and that its elements do not share memory.

    Raises:
        UsageError: If it is read-only, or its elements share memory.
    """
    if value.flags.writeable and (value.flags.c_contiguous or _get_strided_memory(value).has_distinct_elements):
        return
    raise UsageError(
        "nothing can be loaded into this array",
        expected="an array that can be written to, with memory for each element",
        found=f"shape {list(value.shape)}, strides {list(value.strides)}"
        if value.flags.writeable
        else "read-only memory",
        hint="Give it memory of its own, with copy().",
    )


def _create_host_shard(value: Any) -> HostShard:
    plain = np.ascontiguousarray(value).reshape(value.shape)  # copies only if it was not contiguous
    return HostShard(get_array_bytes(plain), plain, immutable=not value.flags.c_contiguous)


def create_numpy_target(dtype: DType, shape: tuple[int, ...], numpy_type: np.dtype[Any], local: LocalArray) -> Target:
    """Create a target for a new array of a local shape; its padding is zero."""
    array: Any = None
    buffers: list[Any] = []

    def memory(_: SlabAllocator) -> list[memoryview]:
        nonlocal array
        if local.is_filled_by(shape):
            array = np.empty(shape, numpy_type)
            return [get_array_bytes(array)]
        array = np.zeros(shape, numpy_type)
        buffers.extend(np.empty(p.local_box.shape, numpy_type) for p in local.pieces)
        return [get_array_bytes(b) for b in buffers]

    def install() -> Any:
        for piece, buffer in zip(local.pieces, buffers, strict=False):
            np.copyto(array[piece.local_box.slices], buffer)
        return array

    return ComposedTarget(
        dtype=dtype,
        local=local,
        live=False,
        allocator=memory,
        installer=install,
    )
