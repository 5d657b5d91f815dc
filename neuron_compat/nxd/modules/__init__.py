"""Modules that are made of tensor-parallel layers: neuronx-distributed's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import KEEP_NXD

if TYPE_CHECKING:
    from neuron_compat.nxd.modules import qkv_linear as qkv_linear
    from neuron_compat.nxd.modules.qkv_linear import GQAQKVColumnParallelLinear as GQAQKVColumnParallelLinear

__all__ = ["GQAQKVColumnParallelLinear"]

__getattr__, __dir__ = lazily(
    __name__, {"qkv_linear": __all__}, ["qkv_linear"], missing=dict.fromkeys(("lora", "moe"), KEEP_NXD)
)
