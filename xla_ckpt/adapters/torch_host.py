"""torch tensors outside of XLA: CPU memory in place, other devices (CUDA, ...) through a copy."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from xla_ckpt import dtypes
from xla_ckpt.adapters.base import Placement, Target
from xla_ckpt.adapters.replicas import replicated
from xla_ckpt.dtypes import DType
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.layout.box import Box
from xla_ckpt.plan.leaf import Leaf, whole_leaf
from xla_ckpt.snapshot.memory import Slabs
from xla_ckpt.snapshot.take import HostShard

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, torch.nn.UninitializedParameter)
"""Tensor classes that are nothing but a dense tensor."""


def dtype_of(tensor: torch.Tensor, path: str = "") -> DType:
    """The element type of a tensor.

    Raises:
        UnsupportedStateError: It is quantized, or of a type that cannot be stored.
    """
    try:
        return dtypes.dtype(str(tensor.dtype).removeprefix("torch."))
    except UnsupportedStateError as error:
        error.at(leaf=path)
        raise


def torch_dtype(dtype: DType) -> torch.dtype | None:
    """Torch's type of this name; None if it has none."""
    found = getattr(torch, dtype.name, None)
    return found if isinstance(found, torch.dtype) else None


def check_dense(tensor: torch.Tensor, path: str) -> None:
    """Refuse what has no plain array of elements.

    Raises:
        UnsupportedStateError: Sparse, on the meta device, nested, or a tensor subclass that nobody here knows.
    """
    if torch.nn.parameter.is_lazy(tensor):
        what = "a lazy parameter that has no shape yet"
    elif type(tensor) not in PLAIN:
        what = f"a {type(tensor).__name__}"
    elif tensor.layout is not torch.strided:
        what = f"a tensor of layout {tensor.layout}"
    elif tensor.device.type == "meta":
        what = "a tensor on the meta device, which has no elements"
    elif tensor.is_nested:
        what = "a nested tensor"
    else:
        return
    raise UnsupportedStateError(f"{what} cannot be stored", leaf=path, hint="Convert it to a dense tensor first.")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, of any dtype. The tensor must be kept while it is used."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())).cast("B")


def tensor_from(memory: Any, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A CPU tensor in memory from `Slabs`, without a copy; it keeps the memory alive."""
    if len(memory) == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.from_numpy(memory).view(dtype).reshape(tuple(shape))


class TorchHost:
    """Dense torch tensors that are not on an XLA device."""

    kind = "torch"

    def accepts(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def identity(self, value: torch.Tensor) -> Hashable | None:
        if value.layout is not torch.strided or value.device.type == "meta" or value.numel() == 0:
            return None
        return value.device, value.data_ptr(), value.dtype, value.shape, value.stride(), value.is_conj(), value.is_neg()

    def leaf(self, path: str, value: torch.Tensor, placement: Placement) -> Leaf:
        check_dense(value, path)
        return replicated(whole_leaf(path, dtype_of(value, path), tuple(value.shape)), placement)

    def host(self, values: Sequence[torch.Tensor]) -> list[list[HostShard]]:
        return [[self._host(v.detach())] for v in values]

    @staticmethod
    def _host(value: torch.Tensor) -> HostShard:
        shared = value.device.type == "cpu" and value.is_contiguous() and not (value.is_conj() or value.is_neg())
        plain = value if shared else value.cpu().resolve_conj().resolve_neg().contiguous()
        private = plain.data_ptr() != value.data_ptr() if value.device.type == "cpu" else True
        return HostShard(bytes_of(plain), plain, immutable=private)

    def into(self, value: torch.Tensor, *, owned: bool) -> Target:
        if value.device.type != "cpu" or not value.is_contiguous() or value.is_conj() or value.is_neg():
            fresh = self.like(value)

            def install() -> torch.Tensor:
                with torch.no_grad():
                    return value.copy_(fresh.install())

            return Target(fresh.dtype, fresh.shape, fresh.boxes, False, fresh.memory, install)
        shape = tuple(value.shape)
        return Target(dtype_of(value), shape, (Box.whole(shape),), True, lambda _: [bytes_of(value)], lambda: value)

    def like(self, value: torch.Tensor) -> Target:
        return fresh(dtype_of(value), tuple(value.shape), value.dtype, value.device)


def fresh(dtype: DType, shape: tuple[int, ...], torch_type: torch.dtype, device: torch.device | None = None) -> Target:
    """A target that makes a new tensor."""
    made = torch.empty(0)

    def memory(_: Slabs) -> list[memoryview]:
        nonlocal made
        made = torch.empty(shape, dtype=torch_type)
        return [bytes_of(made)]

    return Target(
        dtype, shape, (Box.whole(shape),), False, memory,
        lambda: made if device is None or device.type == "cpu" else made.to(device),
    )  # fmt: skip
