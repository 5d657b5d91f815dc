"""Tensor-parallel layers, the state of the ranks, and the older checkpoint calls: neuronx-distributed's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuron_compat.lazy import lazily

if TYPE_CHECKING:
    from neuron_compat.nxd.parallel_layers import checkpointing as checkpointing
    from neuron_compat.nxd.parallel_layers import layers as layers
    from neuron_compat.nxd.parallel_layers import mappings as mappings
    from neuron_compat.nxd.parallel_layers import parallel_state as parallel_state
    from neuron_compat.nxd.parallel_layers.checkpointing import load as load
    from neuron_compat.nxd.parallel_layers.checkpointing import save as save
    from neuron_compat.nxd.parallel_layers.layers import ColumnParallelLinear as ColumnParallelLinear
    from neuron_compat.nxd.parallel_layers.layers import ParallelEmbedding as ParallelEmbedding
    from neuron_compat.nxd.parallel_layers.layers import RowParallelLinear as RowParallelLinear

__all__ = ["ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear", "load", "save"]

__getattr__, __dir__ = lazily(
    __name__,
    {"layers": ("ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear"), "checkpointing": ("load", "save")},
    ["checkpointing", "layers", "mappings", "parallel_state"],
)
