"""Tensor-parallel layers and the state that says which rank is what, with neuronx-distributed's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuron_compat.lazy import lazily

if TYPE_CHECKING:
    from neuron_compat.nxd.parallel_layers import layers as layers
    from neuron_compat.nxd.parallel_layers import mappings as mappings
    from neuron_compat.nxd.parallel_layers import parallel_state as parallel_state
    from neuron_compat.nxd.parallel_layers.layers import ColumnParallelLinear as ColumnParallelLinear
    from neuron_compat.nxd.parallel_layers.layers import ParallelEmbedding as ParallelEmbedding
    from neuron_compat.nxd.parallel_layers.layers import RowParallelLinear as RowParallelLinear

__all__ = ["ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear"]

__getattr__, __dir__ = lazily(__name__, {"layers": __all__}, ["layers", "mappings", "parallel_state"])
