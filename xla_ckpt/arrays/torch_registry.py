"""Find the adapter of a torch tensor, and create targets for new tensors. Imports torch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from xla_ckpt.arrays.base import ArrayAdapter
from xla_ckpt.arrays.composite_tensor import get_composite_name
from xla_ckpt.arrays.declared_chunks import is_checkpointable
from xla_ckpt.arrays.torch_elements import (
    DENSE_CLASSES,
    PLAIN_CLASSES,
    find_torch_dtype,
    get_dtype_name,
    is_plain_tensor,
    is_xla_tensor,
)
from xla_ckpt.arrays.torch_tensor import CheckpointableTensorAdapter, TorchAdapter, create_dense_target_factory
from xla_ckpt.core.dtypes import DType
from xla_ckpt.core.manifest.arrays import ArrayMetadata
from xla_ckpt.core.sharding.local_array import LocalArray, create_unsharded
from xla_ckpt.loading.target import Target

if TYPE_CHECKING:
    from xla_ckpt.arrays.xla_tensor import XlaAdapter


_TORCH_ADAPTER = TorchAdapter()


@functools.cache
def _get_xla_adapter(spmd: bool) -> XlaAdapter:
    from xla_ckpt.arrays.xla_tensor import XlaAdapter

    return XlaAdapter(spmd=spmd)


@functools.cache
def _get_spmd_adapter() -> ArrayAdapter:
    from xla_ckpt.arrays.xla_tensor import SpmdAdapter

    return SpmdAdapter()


@functools.cache
def _get_dtensor_adapter() -> ArrayAdapter:
    from xla_ckpt.arrays.dtensor import DTensorAdapter

    return DTensorAdapter(_find_plain_adapter)


@functools.cache
def _get_checkpointable_adapter() -> ArrayAdapter:
    return CheckpointableTensorAdapter(_find_plain_adapter)


@functools.cache
def _get_sharded_tensor_adapter() -> ArrayAdapter:
    from xla_ckpt.arrays.sharded_tensor import ShardedTensorAdapter

    return ShardedTensorAdapter(_find_plain_adapter)


def _find_plain_adapter(value: torch.Tensor) -> ArrayAdapter:
    return TorchAdapterRegistry()._find_plain(value)


def is_spmd_enabled() -> bool:
    """Return True if torch_xla runs in SPMD mode."""
    runtime: Any = sys.modules.get("torch_xla.runtime")
    return runtime is not None and bool(runtime.is_spmd())


class TorchAdapterRegistry:
    """The adapters of the tensors of one call.

    SPMD mode is checked once, because torch_xla reads the environment, which would dominate the time.
    """

    def __init__(self) -> None:
        self._spmd = is_spmd_enabled()
        self._dtypes_and_places: dict[Any, tuple[str, LocalArray]] = {}

    def find(self, value: Any) -> ArrayAdapter | None:
        """Return the adapter of a tensor; None for anything else, including composite tensors."""
        if type(value) in PLAIN_CLASSES:  # as nearly all arrays
            if value.__dict__ and is_checkpointable(value):
                return _get_checkpointable_adapter()
            if value.is_xla:
                return self._find_xla(value) if self._spmd else _get_xla_adapter(False)
            if is_plain_tensor(value):
                return _TORCH_ADAPTER
        if not isinstance(value, torch.Tensor):
            return None
        if type(value).__name__ == "XLAShardedTensor":
            return self._find_xla(value)
        if "torch.distributed.tensor" in sys.modules and _get_dtensor_adapter().can_handle(value):
            return _get_dtensor_adapter()
        if "torch.distributed._shard.sharded_tensor" in sys.modules and _get_sharded_tensor_adapter().can_handle(value):
            return _get_sharded_tensor_adapter()
        if get_composite_name(value) is not None:
            return None
        return _get_checkpointable_adapter() if is_checkpointable(value) else self._find_plain(value)

    def _find_plain(self, value: torch.Tensor) -> ArrayAdapter:
        return self._find_xla(value) if is_xla_tensor(value) else _TORCH_ADAPTER

    def _find_xla(self, value: torch.Tensor) -> ArrayAdapter:
        return (
            _get_spmd_adapter()
            if self._spmd and _get_spmd_adapter().can_handle(value)
            else _get_xla_adapter(self._spmd)
        )

    def create_whole_target(self, value: Any, form: ArrayMetadata, *, owned: bool) -> Target | None:
        """See `AdapterRegistry.create_whole_target`."""
        if type(value) not in DENSE_CLASSES:
            return None
        dtype, shape = value.dtype, value.shape
        facts = self._dtypes_and_places.get((dtype, shape))
        if facts is None:
            facts = self._dtypes_and_places[dtype, shape] = (get_dtype_name(dtype), create_unsharded(tuple(shape)))
        name, local = facts
        if name != form.dtype.name or local.shape != form.shape or 0 in local.shape:
            return None
        adapter = _TORCH_ADAPTER if value.is_cpu else _get_xla_adapter(self._spmd) if is_xla_tensor(value) else None
        return None if adapter is None else adapter.create_whole_target(value, form.dtype, local, owned=owned)


def create_tensor_target_factory(
    dtype: DType, shape: tuple[int, ...], local: LocalArray, device: torch.device | None = None
) -> Callable[[], Target] | None:
    """Return a factory of targets for new tensors, in host memory unless a device is passed.

    None if torch does not support the dtype.
    """
    torch_type = find_torch_dtype(dtype)
    if torch_type is None:
        return None
    if device is not None and device.type == "xla":
        from xla_ckpt.arrays.xla_tensor import create_xla_target

        return functools.partial(create_xla_target, dtype, shape, torch_type, device, local)
    return create_dense_target_factory(dtype, shape, torch_type, device, local)


def create_number_tensor(pattern: Any, number: float) -> torch.Tensor:
    """Convert a plain number to a tensor with the dtype of a tensor or spec."""
    if isinstance(pattern, torch.Tensor):
        return torch.tensor(number, dtype=pattern.dtype, device=pattern.device)
    return torch.tensor(number, dtype=getattr(torch, str(pattern.dtype).removeprefix("torch.")), device="cpu")
