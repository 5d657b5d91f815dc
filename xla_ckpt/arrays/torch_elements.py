"""Dtypes and memory of torch tensors: checks for dense tensors, bytes, strides and views."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from xla_ckpt.core import dtypes
from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.local_array import LocalArray
from xla_ckpt.core.sharding.memory_layout import HOST_MEMORY, StridedMemory
from xla_ckpt.errors import UnsupportedStateError, UsageError

DENSE_CLASSES = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
"""Tensor classes that add nothing to a dense tensor."""


_COMPOSITE_DTYPES = frozenset(
    {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4, torch.complex32}
)
"""Dtypes of tensors with additional data, or with unnamed elements (see `arrays.composite_tensor`)."""


PLAIN_CLASSES = DENSE_CLASSES | {torch.nn.UninitializedParameter}
"""`DENSE_CLASSES`, and classes whose instances become one of them."""


def get_tensor_dtype(tensor: torch.Tensor, path: str = "") -> DType:
    """Return the dtype of a tensor.

    Raises:
        UnsupportedStateError: If it is quantized, or its dtype cannot be stored.
    """
    try:
        return _convert_dtype(tensor.dtype)
    except UnsupportedStateError as error:
        error.at(leaf=path)
        raise


@functools.cache
def _convert_dtype(dtype: torch.dtype) -> DType:
    return dtypes.get_dtype(get_dtype_name(dtype))


def get_dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype, including those without a `DType`."""
    return str(dtype).removeprefix("torch.")


def find_torch_dtype(dtype: DType) -> torch.dtype | None:
    """Return the torch dtype with the same name, or None."""
    attribute = getattr(torch, dtype.name, None)
    return attribute if isinstance(attribute, torch.dtype) else None


def is_xla_tensor(tensor: torch.Tensor) -> bool:
    """Return True for a tensor on an XLA device: five times as fast as a comparison of device names."""
    return bool(tensor.is_xla)  # type: ignore[attr-defined]  # torch's stubs leave it out


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Return True if a tensor of a torch class is dense."""
    return tensor.layout is torch.strided and tensor.dtype not in _COMPOSITE_DTYPES and not tensor.is_nested


def check_dense_tensor(tensor: torch.Tensor, path: str) -> None:
    """Check that a tensor is dense.

    Raises:
        UnsupportedStateError: If it is sparse, on the meta device, nested, or of an unknown tensor subclass.
    """
    if type(tensor) in DENSE_CLASSES and tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_nested:
        return
    if torch.nn.parameter.is_lazy(tensor):
        what = "a lazy parameter that has no shape yet"
    elif not _is_ordinary_tensor(tensor):
        what = f"a {type(tensor).__name__}"
    elif tensor.is_nested:
        what = "a nested tensor"
    elif tensor.is_meta:
        raise UnsupportedStateError(
            "a tensor on the meta device has no elements to store",
            leaf=path,
            hint="Give it some: model.to_empty(device=...), and then initialise or load the model.",
        )
    elif tensor.layout is torch.strided:
        return
    else:
        what = f"a tensor of layout {tensor.layout}"
    raise UnsupportedStateError(f"{what} cannot be stored", leaf=path, hint="Convert it to a dense tensor first.")


def _is_ordinary_tensor(tensor: torch.Tensor) -> bool:
    """Return True if a tensor consists only of its elements, or is of a subclass that only adds methods."""
    return type(tensor) in PLAIN_CLASSES or (_has_elements(tensor) and not get_tensor_attributes(tensor))


def _has_elements(tensor: torch.Tensor) -> bool:
    """Return True if a tensor of a subclass has its own elements, like a plain tensor."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def get_tensor_attributes(tensor: torch.Tensor) -> list[torch.Tensor]:
    """List the tensors that are attributes of a tensor of a subclass."""
    if type(tensor) in PLAIN_CLASSES or not _has_elements(tensor):
        return []
    return [member for member in vars(tensor).values() if isinstance(member, torch.Tensor)]


def get_tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, of any dtype. Keep the tensor while using it."""
    nbytes = tensor.nbytes
    if nbytes == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())).cast("B")


def view_as_tensor(memory: Any, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return a CPU tensor in memory from `SlabAllocator`, without a copy; it keeps the memory alive."""
    if len(memory) == 0:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return torch.from_numpy(memory).view(dtype).reshape(tuple(shape))


def copy_with_strides(value: torch.Tensor, pattern: torch.Tensor) -> torch.Tensor:
    """Copy a tensor into a new one with the strides and on the device of a pattern of the same shape.

    Fused optimizers iterate over state and parameters in memory order, which must be the same. If elements of the
    pattern share memory, or have gaps between them, the strides are those of a torch copy of it.
    """
    return torch.empty_like(pattern.detach(), dtype=value.dtype, device=pattern.device).copy_(value)


def allow_inference_writes(tensors: Iterable[torch.Tensor]) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which these tensors can be written to, as tensors of inference mode cannot outside of it."""
    return torch.inference_mode() if any(map(torch.is_inference, tensors)) else contextlib.nullcontext()


@contextlib.contextmanager
def allow_in_place_writes(tensor: torch.Tensor) -> Iterator[None]:
    """Return a context for in-place operations on a tensor of the program, without recording gradients."""
    with torch.no_grad(), allow_inference_writes([tensor]):
        yield


def check_writable_tensor(value: torch.Tensor) -> None:
    """Check that the elements of a target do not share memory, before other tensors are changed: torch would not write
    to it.

    Raises:
        UsageError: If elements share memory.
    """
    if not value.is_contiguous() and not get_strided_memory(value).has_distinct_elements:
        raise UsageError(
            "elements of this tensor share memory with each other, so that nothing can be loaded into it",
            expected="memory for each element",
            found=f"shape {list(value.shape)}, strides {list(value.stride())}",
            hint="Give it memory of its own, with clone() or contiguous().",
        )


def get_strided_memory(value: torch.Tensor) -> StridedMemory:
    """Return the memory layout of a tensor."""
    nbytes = value.element_size()
    steps = tuple(step * nbytes for step in value.stride())
    space = HOST_MEMORY if value.device.type == "cpu" else value.device
    return StridedMemory(space, value.data_ptr(), tuple(value.shape), steps, nbytes)


def get_piece_memory(value: torch.Tensor, local: LocalArray) -> list[StridedMemory]:
    """Return the memory layout of each piece of a tensor."""
    memory = get_strided_memory(value)
    return [memory.slice_box(piece.local_box) for piece in local.pieces]


def choose_torch_dtype(dtype: DType, value: torch.Tensor) -> torch.dtype:
    """Return the torch dtype of a dtype; the value's own if torch has none."""
    return find_torch_dtype(dtype) or value.dtype


def narrow_to_box(value: torch.Tensor, box: Box) -> torch.Tensor:
    """Return a view of a region of a tensor."""
    if box.shape == tuple(value.shape):
        return value
    for dim, (low, high) in enumerate(zip(box.start, box.stop, strict=True)):
        value = value.narrow(dim, low, high - low)
    return value
