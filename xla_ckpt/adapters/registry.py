"""Which adapter answers for a value. Frameworks that the program has not loaded are not loaded to find out."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from xla_ckpt.adapters.base import ArrayAdapter, Placement, Target
from xla_ckpt.adapters.numpy_array import Numpy, numpy_dtype
from xla_ckpt.adapters.numpy_array import fresh as fresh_numpy
from xla_ckpt.adapters.torch_host import TorchHost, torch_dtype
from xla_ckpt.adapters.torch_host import fresh as fresh_torch
from xla_ckpt.dtypes import DType, dtype
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.plan.leaf import Leaf
from xla_ckpt.snapshot.take import HostShard

_TORCH_HOST: ArrayAdapter = TorchHost()
_NUMPY: ArrayAdapter = Numpy()
_loaded: dict[str, ArrayAdapter] = {}


def _xla() -> ArrayAdapter:
    if "xla" not in _loaded:
        from xla_ckpt.adapters.xla import Xla

        _loaded["xla"] = Xla()
    return _loaded["xla"]


def _jax() -> ArrayAdapter:
    if "jax" not in _loaded:
        from xla_ckpt.adapters.jax_array import Jax

        _loaded["jax"] = Jax()
    return _loaded["jax"]


def adapter_of(value: Any) -> ArrayAdapter | None:
    """The adapter of an array; None for anything else."""
    if isinstance(value, torch.Tensor):
        return _xla() if value.device.type == "xla" else _TORCH_HOST
    if _NUMPY.accepts(value):
        return _NUMPY
    if "jax" in sys.modules and type(value).__module__.startswith(("jax", "jaxlib")) and _jax().accepts(value):
        return _jax()
    return None


def array_kind(value: Any) -> str | None:
    """The kind of an array, as the skeleton names it; None for anything else."""
    adapter = adapter_of(value)
    return None if adapter is None else adapter.kind


@dataclass(frozen=True, slots=True)
class Described:
    """The arrays of a state: each one once, where it is, and who is the same as whom."""

    leaves: tuple[Leaf, ...]
    values: Mapping[str, Any]
    """The array of each leaf."""

    aliases: Mapping[str, str]
    """Leaf path of a shared array -> leaf path under which it is described."""


def describe(arrays: Mapping[str, Any], placement: Placement) -> Described:
    """Describe the arrays of a flattened state.

    Raises:
        UnsupportedStateError: One of them cannot be stored.
    """
    first: dict[Any, str] = {}
    values: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    leaves: list[Leaf] = []
    for path, value in arrays.items():
        adapter = _require(value, path)
        leaf = adapter.leaf(path, value, placement)
        identity = adapter.identity(value)
        if identity is not None and (same := first.setdefault(identity, path)) != path:
            aliases[path] = same
            continue
        values[path] = value
        leaves.append(leaf)
    return Described(tuple(leaves), values, aliases)


def host_shards(values: Mapping[str, Any]) -> dict[tuple[str, int], HostShard]:
    """The bytes of all local shards, by (leaf path, shard). One batch for each kind of array."""
    batches: dict[int, tuple[ArrayAdapter, list[str]]] = {}
    for path, value in values.items():
        adapter = _require(value, path)
        batches.setdefault(id(adapter), (adapter, []))[1].append(path)
    shards: dict[tuple[str, int], HostShard] = {}
    for adapter, paths in batches.values():
        for path, held in zip(paths, adapter.host([values[p] for p in paths]), strict=True):
            shards |= {(path, i): shard for i, shard in enumerate(held)}
    return shards


def _require(value: Any, path: str) -> ArrayAdapter:
    adapter = adapter_of(value)
    if adapter is None:
        raise UnsupportedStateError(f"{type(value).__name__} is no array", leaf=path)
    return adapter


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """An array to be restored, by its description: what `restore` takes in place of an array.

    The element type decides what is made: a torch dtype (or its name) a CPU tensor, a numpy dtype a numpy array, and
    with a `sharding` from jax a jax array.
    """

    shape: tuple[int, ...]
    """Global shape (elements)."""

    dtype: Any
    """``torch.float32``, ``"float32"`` or ``np.dtype("float32")``."""

    sharding: Any = None
    """None, or a jax sharding."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))

    def target(self) -> Target:
        """Memory for it."""
        if self.sharding is not None:
            from xla_ckpt.adapters.jax_array import fresh_jax

            return fresh_jax(self.shape, numpy_dtype(dtype(_name(self.dtype))), self.sharding)
        if isinstance(self.dtype, str | torch.dtype):
            return new_array(dtype(_name(self.dtype)), self.shape, "torch")
        return new_array(dtype(_name(self.dtype)), self.shape, "numpy")


def _name(given: Any) -> str:
    if isinstance(given, str | torch.dtype):
        return str(given).removeprefix("torch.")
    import numpy as np

    return str(np.dtype(given).name)


def is_spec(value: Any) -> bool:
    """Whether `value` describes an array: an `ArraySpec`, or a `jax.ShapeDtypeStruct`."""
    return isinstance(value, ArraySpec) or type(value).__name__ == "ShapeDtypeStruct"


def target_like(value: Any) -> Target:
    """A target that makes a new array like an array or a description."""
    if isinstance(value, ArraySpec):
        return value.target()
    if is_spec(value):
        from xla_ckpt.adapters.jax_array import fresh_jax

        return fresh_jax(tuple(value.shape), value.dtype, getattr(value, "sharding", None))
    return _require(value, "").like(value)


def target_into(value: Any, *, owned: bool) -> Target:
    """A target that overwrites an array."""
    return _require(value, "").into(value, owned=owned)


def new_array(element: DType, shape: tuple[int, ...], kind: str, device: torch.device | None = None) -> Target:
    """A target that makes a new array of a kind, in host memory unless a torch device is named.

    A jax array becomes one again if jax is loaded and has the type; else a numpy array.
    """
    if kind == "torch" and (torch_type := torch_dtype(element)) is not None:
        if device is not None and device.type == "xla":
            return _xla().like(torch.empty(shape, dtype=torch_type, device=device))
        return fresh_torch(element, shape, torch_type, device)
    if kind == "jax" and "jax" in sys.modules:
        import jax

        from xla_ckpt.adapters.jax_array import fresh_jax

        numpy_type = numpy_dtype(element)
        if jax.dtypes.canonicalize_dtype(numpy_type) == numpy_type:
            return fresh_jax(shape, numpy_type, None)
    return fresh_numpy(element, shape, numpy_dtype(element))
