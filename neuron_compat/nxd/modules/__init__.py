"""Modules that are made of tensor-parallel layers: neuronx-distributed's names."""

from __future__ import annotations

from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import here

__all__ = ["GQAQKVColumnParallelLinear"]

__getattr__, __dir__ = lazily(__name__, {"qkv_linear": __all__}, ["qkv_linear"], missing=here(__name__))
