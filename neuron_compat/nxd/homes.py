"""The names of neuronx-distributed that are there: which module has each of them, and where it is from. Pure.

`names_of` makes a module's ``__getattr__`` and ``__dir__`` of this, and of the names that are absent
(`neuron_compat.nxd.instead`). What a module defines itself does not stand here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from neuron_compat.groups import NAMES
from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import here

_PACKAGE = "neuron_compat.nxd"

_SET_UP = "initialize_parallel_model initialize_parallel_optimizer neuronx_distributed_config"
_TAGS = "finalize_checkpoint has_checkpoint load_checkpoint save_checkpoint"
_SPLIT = (
    "copy_tensor_model_parallel_attributes set_defaults_if_not_set_tensor_model_parallel_attributes "
    "set_tensor_model_parallel_attributes"
)
_REGIONS = (
    "copy_to_tensor_model_parallel_region gather_from_tensor_model_parallel_region "
    "reduce_from_tensor_model_parallel_region scatter_to_tensor_model_parallel_region"
)
_OF_EACH_KIND = {
    f"get_{name}_{what}" for name in NAMES.values() for what in ("group", "replica_groups", "size", "rank")
} - {"get_kv_shared_size", "get_kv_shared_rank"}  # which neuronx-distributed has not

HOMES: dict[str, dict[str, str]] = {
    "": {"trainer.checkpoint": _TAGS, "trainer.trainer": _SET_UP},
    "kernels": {"flash_attn": "nki_flash_attn_func", "ring_attention_kernel": "nki_ring_attn_func"},
    "kernels.flash_attn": {},
    "kernels.ring_attention_kernel": {},
    "modules": {"qkv_linear": "GQAQKVColumnParallelLinear"},
    "modules.qkv_linear": {"neuron_compat.emulated.qkv_linear": "GQAQKVColumnParallelLinear"},
    "optimizer": {"zero_redundancy_optimizer": "NeuronZero1Optimizer"},
    "optimizer.convert_zero_checkpoints": {},
    "optimizer.zero_redundancy_optimizer": {"neuron_compat.emulated.nxd.zero1": "NeuronZero1Optimizer"},
    "overrides": {},
    "overrides.transformer_overrides": {},
    "parallel_layers": {
        "layers": "ColumnParallelLinear ParallelEmbedding RowParallelLinear",
        "checkpointing": "load save",
        "grads": "bucket_allreduce_gradients clip_grad_norm",
        "parallel_state": "initialize_model_parallel",
        "random": "get_xla_rng_tracker model_parallel_xla_manual_seed",
        "loss_functions": "parallel_cross_entropy",
        "mappings": _REGIONS,
        "utils": f"{_SPLIT} move_model_to_device split_tensor_along_last_dim",
    },
    "parallel_layers.checkpointing": {},
    "parallel_layers.grads": {
        "neuron_compat.emulated.grads": "param_is_not_shared get_grad_norm clip_grad_norm clip_grads_with_norm "
        "bucket_allreduce_gradients allreduce_sequence_parallel_gradients",
    },
    "parallel_layers.layers": {
        "neuron_compat.emulated.layers": "check_supported draw_weight whole_linear ColumnParallelLinear "
        "RowParallelLinear ParallelEmbedding",
    },
    "parallel_layers.loss_functions": {"neuron_compat.emulated.loss": "parallel_cross_entropy"},
    "parallel_layers.mappings": {"neuron_compat.emulated.mappings": f"copy_to_kv_shared_region {_REGIONS}"},
    "parallel_layers.parallel_state": {
        "neuron_compat.emulated.parallel_state": f"{' '.join(sorted(_OF_EACH_KIND))} initialize_model_parallel "
        "initialize_kv_group get_kv_shared_group_size destroy_kv_group model_parallel_is_initialized "
        "destroy_model_parallel get_world_group get_tensor_model_parallel_src_rank get_data_parallel_src_rank "
        "get_pipeline_model_parallel_next_rank get_pipeline_model_parallel_prev_rank "
        "get_context_model_parallel_src_tgt_pairs is_global_rank_zero",
    },
    "parallel_layers.random": {
        "neuron_compat.emulated.random": "XLARNGStatesTracker get_xla_rng_tracker model_parallel_xla_manual_seed",
    },
    "parallel_layers.utils": {
        "neuron_compat.emulated.moving": "move_model_to_device",
        "neuron_compat.emulated.partition": f"{_SPLIT} param_is_not_tensor_parallel_duplicate",
    },
    "scripts": {},
    "scripts.checkpoint_converter": {},
    "trainer": {"checkpoint": _TAGS, "trainer": _SET_UP},
    "trainer.checkpoint": {},
    "trainer.checkpoint_storage": {},
    "trainer.model": {"neuron_compat.emulated.nxd.model": "NxDModel"},
    "trainer.optimizer": {"neuron_compat.emulated.nxd.optimizer": "NxDOptimizer"},
    "trainer.trainer": {"neuron_compat.emulated.nxd.trainer": f"{_SET_UP} initialize_optimizer_from_class"},
    "utils": {},
    "utils.adamw_fp32_optim_params": {},
    "utils.batch_utils": {
        "neuron_compat.emulated.nxd.batches": "get_batch_on_this_context_parallel_rank shift_labels",
    },
    "utils.logger": {},
    "utils.model_utils": {
        "neuron_compat.emulated.moving": "is_hf_pretrained_model analyze_shared_parameters retie_shared_weights "
        "preserve_shared_weights preserve_parallel_attributes move_model_to_device init_on_device reinit_model "
        "get_model_sequential",
    },
}
"""Module, below neuronx-distributed -> where names of it are from -> the names."""


def names_of(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of the module whose ``__name__`` this is (see `lazily`).

    >>> load, names = names_of("neuron_compat.nxd.utils")
    >>> load("logger").__name__, "logger" in names()
    ('neuron_compat.nxd.utils.logger', True)
    """
    below = f"{module}.".removeprefix(f"{_PACKAGE}.")
    inside = [name.removeprefix(below) for name in HOMES if name.startswith(below) and name]
    submodules = [name for name in inside if "." not in name]
    return lazily(module, HOMES[below.rstrip(".")], submodules, missing=here(module))
