"""Host memory that XLA on the CPU imports without a copy (DLPack), and frees without Python.

torch frees a DLPack capsule of a tensor by destroying the tensor, which takes the GIL. XLA frees a buffer on one of its
threads when the last graph that reads it has run. If the interpreter is shutting down by then, the GIL never becomes
available: the thread ends inside a destructor, and the process aborts after its work is done. This module therefore
builds the capsule itself: one allocation of the C library, which begins with DLPack's own structure and is freed by
``free``.

The structure is ``DLManagedTensor`` of DLPack 0.8 (dlpack.h), which torch_xla supports.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from xla_ckpt.snapshot.memory import MEMORY_ALIGNMENT, SlabAllocator
from xla_ckpt.storage.threads import HUGE_PAGE_BYTES

_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.posix_memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]
_libc.free.restype = None

_FREE_FUNCTION = ctypes.cast(_libc.free, ctypes.c_void_p).value

_new_capsule: Any = ctypes.pythonapi.PyCapsule_New
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_new_capsule.restype = ctypes.py_object

_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6
DLPACK_TYPE_CODES = {
    torch.bool: _BOOL, torch.bfloat16: _BFLOAT,
    torch.uint8: _UINT, torch.uint16: _UINT, torch.uint32: _UINT, torch.uint64: _UINT,
    torch.int8: _INT, torch.int16: _INT, torch.int32: _INT, torch.int64: _INT,
    torch.float16: _FLOAT, torch.float32: _FLOAT, torch.float64: _FLOAT,
    torch.complex64: _COMPLEX, torch.complex128: _COMPLEX,
}  # fmt: skip
"""DLPack type codes of dtypes. Other dtypes are not supported by DLPack."""

_HEADER_BYTES = 1024
"""Bytes before the elements: the structure, and the sizes of the dims."""

_MAX_DIMS = 64


_MANAGED_TENSOR = struct.Struct("@PiiiBBHPPQPP")
"""``DLManagedTensor``: data, device (type, number), dims, dtype (code, bits, lanes), shape, strides, offset of the
first byte, context of the deleter, deleter. No member needs padding."""

_CPU_DEVICE_TYPE = 1


def is_dlpack_compatible(dtype: torch.dtype, shape: Sequence[int]) -> bool:
    """Return True if a tensor has a dtype that DLPack supports, and elements."""
    return dtype in DLPACK_TYPE_CODES and len(shape) <= _MAX_DIMS and 0 not in shape


class DLPackBuffer:
    """A buffer for one contiguous tensor, which XLA may import when it is filled.

    Raises:
        MemoryError: If the memory cannot be allocated (on construction).
    """

    def __init__(self, dtype: torch.dtype, shape: Sequence[int], slabs: SlabAllocator) -> None:
        self._address = 0
        self.dtype = dtype
        self.shape = tuple(shape)
        self.nbytes = prod(self.shape) * dtype.itemsize
        address, large = ctypes.c_void_p(), self.nbytes >= HUGE_PAGE_BYTES
        alignment = HUGE_PAGE_BYTES if large else MEMORY_ALIGNMENT
        if (
            _libc.posix_memalign(ctypes.byref(address), alignment, _HEADER_BYTES + self.nbytes) != 0
            or not address.value
        ):
            raise MemoryError(f"no {self.nbytes} bytes of host memory")
        self._address = address.value
        if large:
            slabs.add_region(
                np.ctypeslib.as_array((ctypes.c_ubyte * (_HEADER_BYTES + self.nbytes)).from_address(self._address))
            )

    def __del__(self) -> None:
        if self._address:
            _libc.free(self._address)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The elements as bytes, for numpy, whose arrays keep a reference to this object."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self._address + _HEADER_BYTES, False), "version": 3}

    def as_memoryview(self) -> memoryview:
        """Return the writable bytes, with a reference to this object. Do not use them after XLA has imported the
        buffer.
        """
        elements: Any = (ctypes.c_ubyte * self.nbytes).from_address(self._address + _HEADER_BYTES)
        elements.owner = self
        return memoryview(elements).cast("B")

    def as_tensor(self) -> torch.Tensor:
        """Return the writable memory as a CPU tensor. Do not use it after XLA has imported the buffer."""
        return torch.from_numpy(np.asarray(self)).view(self.dtype).reshape(self.shape)

    def create_capsule(self) -> Any:
        """Create a DLPack capsule. Call `release_ownership` after a consumer has imported it."""
        header = _MANAGED_TENSOR.pack(
            self._address + _HEADER_BYTES,
            _CPU_DEVICE_TYPE,
            0,
            len(self.shape),
            DLPACK_TYPE_CODES[self.dtype],
            8 * self.dtype.itemsize,
            1,
            self._address + _MANAGED_TENSOR.size,
            0,  # no strides: the elements are in C order
            0,
            0,
            _FREE_FUNCTION,
        ) + struct.pack(f"@{len(self.shape)}q", *self.shape)
        ctypes.memmove(self._address, header, len(header))
        return _new_capsule(self._address, b"dltensor", None)

    def release_ownership(self) -> None:
        """Release the memory to the consumer of the capsule."""
        self._address = 0
