"""Tensor-parallel layers and the state that says which rank is what, with neuronx-distributed's names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neuron_compat.nxd.parallel_layers.layers import ColumnParallelLinear as ColumnParallelLinear
    from neuron_compat.nxd.parallel_layers.layers import ParallelEmbedding as ParallelEmbedding
    from neuron_compat.nxd.parallel_layers.layers import RowParallelLinear as RowParallelLinear

_MODULES = ("layers", "mappings", "parallel_state")

__all__ = ["ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"neuron_compat.nxd.parallel_layers.{name}")
    if name in __all__:
        return getattr(importlib.import_module("neuron_compat.nxd.parallel_layers.layers"), name)
    raise AttributeError(f"module 'neuron_compat.nxd.parallel_layers' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
