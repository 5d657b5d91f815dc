"""Tensor-parallel layers, parallel state, and legacy checkpoint functions, with neuronx-distributed's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuron_compat.nxd.exports import attach_exports

if TYPE_CHECKING:
    from neuron_compat.nxd.parallel_layers import checkpointing as checkpointing
    from neuron_compat.nxd.parallel_layers import grads as grads
    from neuron_compat.nxd.parallel_layers import layers as layers
    from neuron_compat.nxd.parallel_layers import mappings as mappings
    from neuron_compat.nxd.parallel_layers import parallel_state as parallel_state
    from neuron_compat.nxd.parallel_layers import random as random
    from neuron_compat.nxd.parallel_layers import utils as utils
    from neuron_compat.nxd.parallel_layers.checkpointing import load as load
    from neuron_compat.nxd.parallel_layers.checkpointing import save as save

__all__ = [
    "ColumnParallelLinear",
    "ParallelEmbedding",
    "RowParallelLinear",
    "bucket_allreduce_gradients",
    "clip_grad_norm",
    "get_xla_rng_tracker",
    "initialize_model_parallel",
    "load",
    "model_parallel_xla_manual_seed",
    "move_model_to_device",
    "save",
]

__getattr__, __dir__ = attach_exports(__name__)
