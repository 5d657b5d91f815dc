"""Host memory that XLA adopts on the CPU, and gives back without Python.

A DLPack capsule that torch makes of a tensor is given back by destroying the tensor, for which torch takes Python's
global lock. XLA gives a buffer back on a thread of its own, when the last graph that reads it has run. If that is while
the interpreter ends, the lock never comes: the thread is ended inside of a destructor, and the process aborts, although
its work is done. So this module makes the capsule itself. Its memory is one allocation of the C library, which begins
with DLPack's own structure, and what gives it back is ``free``.

The structure is ``DLManagedTensor`` of DLPack 0.8 (dlpack.h), which torch_xla takes.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from xla_ckpt.snapshot.memory import MEMORY_ALIGNMENT, Slabs
from xla_ckpt.storage.pool import HUGE_BYTES

_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.posix_memalign.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]
_libc.free.restype = None

_FREE = ctypes.cast(_libc.free, ctypes.c_void_p).value

_new_capsule: Any = ctypes.pythonapi.PyCapsule_New
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_new_capsule.restype = ctypes.py_object

_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6
DLPACK_CODES = {
    torch.bool: _BOOL, torch.bfloat16: _BFLOAT,
    torch.uint8: _UINT, torch.uint16: _UINT, torch.uint32: _UINT, torch.uint64: _UINT,
    torch.int8: _INT, torch.int16: _INT, torch.int32: _INT, torch.int64: _INT,
    torch.float16: _FLOAT, torch.float32: _FLOAT, torch.float64: _FLOAT,
    torch.complex64: _COMPLEX, torch.complex128: _COMPLEX,
}  # fmt: skip
"""DLPack's kinds of element types. What is not here has no name in it."""

_HEADER = 1024
"""Bytes before the elements: the structure, and the sizes of the dims."""

_MAX_DIMS = 64


_MANAGED_TENSOR = struct.Struct("@PiiiBBHPPQPP")
"""``DLManagedTensor``: data, device (type, number), dims, element type (code, bits, lanes), shape, strides, offset of
the first byte, context of the deleter, deleter. No member needs padding."""

_CPU = 1


def adoptable(dtype: torch.dtype, shape: Sequence[int]) -> bool:
    """Whether a tensor has a name in DLPack, and elements."""
    return dtype in DLPACK_CODES and len(shape) <= _MAX_DIMS and 0 not in shape


class Adoptable:
    """Memory for one contiguous tensor, which XLA may adopt when it is filled.

    Raises (on construction):
        MemoryError: There is none.
    """

    def __init__(self, dtype: torch.dtype, shape: Sequence[int], slabs: Slabs) -> None:
        self._at = 0
        self.dtype = dtype
        self.shape = tuple(shape)
        self.nbytes = prod(self.shape) * dtype.itemsize
        address, large = ctypes.c_void_p(), self.nbytes >= HUGE_BYTES
        alignment = HUGE_BYTES if large else MEMORY_ALIGNMENT
        if _libc.posix_memalign(ctypes.byref(address), alignment, _HEADER + self.nbytes) != 0 or not address.value:
            raise MemoryError(f"no {self.nbytes} bytes of host memory")
        self._at = address.value
        if large:
            slabs.add(np.ctypeslib.as_array((ctypes.c_ubyte * (_HEADER + self.nbytes)).from_address(self._at)))

    def __del__(self) -> None:
        if self._at:
            _libc.free(self._at)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """The elements as bytes, for numpy, whose arrays keep this object."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self._at + _HEADER, False), "version": 3}

    def memory(self) -> memoryview:
        """The elements as bytes, to be filled, which keep this object. They must not be used once XLA has them."""
        elements: Any = (ctypes.c_ubyte * self.nbytes).from_address(self._at + _HEADER)
        elements.owner = self
        return memoryview(elements).cast("B")

    def tensor(self) -> torch.Tensor:
        """The memory as a CPU tensor, to be filled. It must not be used any more once XLA has it."""
        return torch.from_numpy(np.asarray(self)).view(self.dtype).reshape(self.shape)

    def capsule(self) -> Any:
        """What a consumer of DLPack takes. `given` has to be called when it has."""
        header = _MANAGED_TENSOR.pack(
            self._at + _HEADER,
            _CPU,
            0,
            len(self.shape),
            DLPACK_CODES[self.dtype],
            8 * self.dtype.itemsize,
            1,
            self._at + _MANAGED_TENSOR.size,
            0,  # no strides: the elements are in C order
            0,
            0,
            _FREE,
        ) + struct.pack(f"@{len(self.shape)}q", *self.shape)
        ctypes.memmove(self._at, header, len(header))
        return _new_capsule(self._at, b"dltensor", None)

    def given(self) -> None:
        """The consumer has taken the capsule: from now on the memory is its own."""
        self._at = 0
