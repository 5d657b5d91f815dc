"""Which adapter answers for a torch tensor, and what makes new ones. Imported where the program has imported torch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from xla_ckpt.arrays.base import ArrayAdapter
from xla_ckpt.arrays.chunks import is_checkpointable
from xla_ckpt.arrays.composite import name_of
from xla_ckpt.arrays.torch_elements import DENSE, PLAIN, is_plain, is_xla, torch_dtype, type_name
from xla_ckpt.arrays.torch_host import TorchHost, making_tensors
from xla_ckpt.dtypes import DType
from xla_ckpt.engine.target import Target
from xla_ckpt.manifest.forms import ArrayForm
from xla_ckpt.sharding.local_array import LocalArray, whole

if TYPE_CHECKING:
    from xla_ckpt.arrays.xla import Xla

_TORCH_HOST = TorchHost()


@functools.cache
def _xla(spmd: bool) -> Xla:
    from xla_ckpt.arrays.xla import Xla

    return Xla(spmd=spmd)


@functools.cache
def _spmd() -> ArrayAdapter:
    from xla_ckpt.arrays.spmd import Spmd

    return Spmd()


@functools.cache
def _dtensor() -> ArrayAdapter:
    from xla_ckpt.arrays.dtensor import DTensors

    return DTensors(_plain_torch)


@functools.cache
def _checkpointable() -> ArrayAdapter:
    from xla_ckpt.arrays.checkpointable import CheckpointableTensors

    return CheckpointableTensors(_plain_torch)


@functools.cache
def _sharded_tensor() -> ArrayAdapter:
    from xla_ckpt.arrays.sharded_tensor import ShardedTensors

    return ShardedTensors(_plain_torch)


def _plain_torch(value: torch.Tensor) -> ArrayAdapter:
    return TorchAdapters()._plain(value)


def uses_spmd() -> bool:
    """Whether torch_xla runs in SPMD mode."""
    runtime: Any = sys.modules.get("torch_xla.runtime")
    return runtime is not None and bool(runtime.is_spmd())


class TorchAdapters:
    """The adapters of the tensors of one call.

    Whether torch_xla runs in SPMD mode is asked once: it asks the environment, which takes longer than all the rest.
    """

    def __init__(self) -> None:
        self._spmd = uses_spmd()
        self._facts: dict[Any, tuple[str, LocalArray]] = {}

    def of(self, value: Any) -> ArrayAdapter | None:
        """The adapter of a tensor; None for anything else, and for a tensor that consists of several."""
        if type(value) in PLAIN:  # as nearly all arrays
            if value.__dict__ and is_checkpointable(value):
                return _checkpointable()
            if value.is_xla:
                return self._on_xla(value) if self._spmd else _xla(False)
            if is_plain(value):
                return _TORCH_HOST
        if not isinstance(value, torch.Tensor):
            return None
        if type(value).__name__ == "XLAShardedTensor":
            return self._on_xla(value)
        if "torch.distributed.tensor" in sys.modules and _dtensor().accepts(value):
            return _dtensor()
        if "torch.distributed._shard.sharded_tensor" in sys.modules and _sharded_tensor().accepts(value):
            return _sharded_tensor()
        if name_of(value) is not None:
            return None
        return _checkpointable() if is_checkpointable(value) else self._plain(value)

    def _plain(self, value: torch.Tensor) -> ArrayAdapter:
        return self._on_xla(value) if is_xla(value) else _TORCH_HOST

    def _on_xla(self, value: torch.Tensor) -> ArrayAdapter:
        return _spmd() if self._spmd and _spmd().accepts(value) else _xla(self._spmd)

    def whole_target(self, value: Any, form: ArrayForm, *, owned: bool) -> Target | None:
        """See `Adapters.whole_target`."""
        if type(value) not in DENSE:
            return None
        dtype, shape = value.dtype, value.shape
        facts = self._facts.get((dtype, shape))
        if facts is None:
            facts = self._facts[dtype, shape] = (type_name(dtype), whole(tuple(shape)))
        name, local = facts
        if name != form.dtype.name or local.shape != form.shape or 0 in local.shape:
            return None
        adapter = _TORCH_HOST if value.is_cpu else _xla(self._spmd) if is_xla(value) else None
        return None if adapter is None else adapter.over_whole(value, form.dtype, local, owned=owned)


def making_new_tensors(
    element: DType, shape: tuple[int, ...], local: LocalArray, device: torch.device | None = None
) -> Callable[[], Target] | None:
    """What makes targets, each of them for a new tensor, in host memory unless a device is named.

    None if torch has no such type.
    """
    torch_type = torch_dtype(element)
    if torch_type is None:
        return None
    if device is not None and device.type == "xla":
        from xla_ckpt.arrays.xla import fresh_xla

        return functools.partial(fresh_xla, element, shape, torch_type, device, local)
    return making_tensors(element, shape, torch_type, device, local)


def number_tensor(pattern: Any, number: float) -> torch.Tensor:
    """A plain number as a tensor, of the type of a tensor, or of the one that a description names."""
    if isinstance(pattern, torch.Tensor):
        return torch.tensor(number, dtype=pattern.dtype, device=pattern.device)
    return torch.tensor(number, dtype=getattr(torch, str(pattern.dtype).removeprefix("torch.")), device="cpu")
