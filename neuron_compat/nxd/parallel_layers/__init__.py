"""Tensor-parallel layers, the state of the ranks, and the older checkpoint calls: neuronx-distributed's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import here

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

__getattr__, __dir__ = lazily(
    __name__,
    {
        "layers": ("ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear"),
        "checkpointing": ("load", "save"),
        "grads": ("bucket_allreduce_gradients", "clip_grad_norm"),
        "parallel_state": ("initialize_model_parallel",),
        "random": ("get_xla_rng_tracker", "model_parallel_xla_manual_seed"),
        "loss_functions": ("parallel_cross_entropy",),
        "mappings": (
            "copy_to_tensor_model_parallel_region",
            "gather_from_tensor_model_parallel_region",
            "reduce_from_tensor_model_parallel_region",
            "scatter_to_tensor_model_parallel_region",
        ),
        "utils": (
            "copy_tensor_model_parallel_attributes",
            "move_model_to_device",
            "set_defaults_if_not_set_tensor_model_parallel_attributes",
            "set_tensor_model_parallel_attributes",
            "split_tensor_along_last_dim",
        ),
    },
    ["checkpointing", "grads", "layers", "loss_functions", "mappings", "parallel_state", "random", "utils"],
    missing=here(__name__),
)
