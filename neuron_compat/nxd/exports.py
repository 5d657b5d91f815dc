"""Names of neuronx-distributed: the module that defines each supported one, and hints for unsupported ones. Pure.

`attach_exports` builds the ``__getattr__`` and ``__dir__`` of a module from `EXPORTS` and `UNSUPPORTED` (names of
neuronx-distributed 0.18). Names that a module defines itself are not listed. Importing an unsupported module, or
getting an unsupported name, raises `xla_ckpt.UsageError` with the hint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from neuron_compat.groups import NXD_NAMES
from neuron_compat.lazy_imports import attach_lazy_names, raise_unsupported, select_missing_names

KEEP_NXD_HINT = (
    "Keep neuronx_distributed for it, and import the checkpoint functions alone from neuron_compat.nxd "
    "(docs/from-nxd.md)."
)
FINALIZE_HINT = "Saves in flight are kept by the library: nxd.finalize_checkpoint() waits for them."
TAGS_HINT = "xla_ckpt.list_tags, latest_tag and has_checkpoint say what a directory holds."
ADDRESS_HINT = "Give nxd.save_checkpoint the path of a directory, or the address of a bucket (s3://bucket/run)."
CONVERT_HINT = "xla-ckpt convert changes topology and layout, and xla-ckpt export writes Hugging Face's files."
NO_STAGES_HINT = "It is for pipeline stages, which models here are not divided into."
JOIN_LOGITS_HINT = "Join the logits (gather_output=True), and call torch's own log_softmax."
KERNELS_HINT = "They are for Trainium: use torch's own operations here."
TRACE_HINT = "It compiles models for Trainium's inference: call the model itself here."
LAYER_NORM_HINT = "torch.nn.LayerNorm and torch.nn.RMSNorm do here, where sequences are not split."
SHARDING_HINT = (
    "Checkpoints say how arrays are split by attributes of parameters (set_tensor_model_parallel_attributes)."
)
RANKS_HINT = "initialize_model_parallel arranges all ranks; get_*_replica_groups and get_*_group have them."
CONTEXT_PARALLEL_HINT = "Context parallelism needs ring attention, which is a kernel for Trainium."
SEQUENCE_PARALLEL_HINT = (
    "Sequences are not split here: leave out sequence parallelism, the results are the same up to rounding."
)
INTERNAL_HINT = "It is a part of neuronx-distributed's own works: write what you need of it into your program."
TORCH_XLA_HINT = "Ask torch_xla: torch_xla.sync(), torch_xla.device(), torch_xla.core.xla_model.master_print."
EXPERTS_HINT = (
    "Give experts a ZeroRedundancyOptimizer of torch_xla's, with parallel_state's "
    "sharding_groups=get_expert_data_parallel_replica_groups(), and save and load it as "
    "extras={'experts': xla_ckpt.PerRank(optimizer)}."
)

_UNSUPPORTED_BY_HINT: dict[str, dict[str, str]] = {
    FINALIZE_HINT: {"": "CheckpointIOState", "trainer.checkpoint": "CheckpointIOState"},
    KEEP_NXD_HINT: {
        "": "experimental inference lightning operators pipeline quantization",
        "modules": "attention lora moe qkv_linear_utils rms_norm",
        "parallel_layers": "pad",
        "parallel_layers.layers": "BaseParallelConv Conv2dWithInputGradAllReduce InputChannelParallelConv2d "
        "OutputChannelParallelConv2d conv2d_with_weight_grad_allreduce",
        "parallel_layers.mappings": "enter_expert_parallel_region exit_expert_parallel_region "
        "scatter_input_channels_to_tensor_model_parallel_region",
        "parallel_layers.parallel_state": "destroy_token_shuffle_group get_expert_parallel_rank_from_global_rank "
        "get_experts_for_expert_parallel_rank get_token_shuffle_group get_token_shuffle_group_size "
        "get_token_shuffle_replica_groups initialize_token_shuffle_group",
        "utils": "activation_checkpoint",
    },
    TRACE_HINT: {
        "": "BaseNxDModel ModelBuilder NxDModel NxDParallelState TorchScriptNxDModel "
        "convert_nxd_model_to_torchscript_model shard_checkpoint trace",
        "parallel_layers.checkpointing": "get_sharded_model_dict",
        "parallel_layers.layers": "SPMDRank",
        "parallel_layers.mappings": "round_robin_scatter_to_process_group_spmd scatter_to_process_group_spmd",
        "parallel_layers.parallel_state": "gather_python_object get_aot_mode get_speculative_draft_group "
        "get_speculative_draft_replica_groups initialize_speculative_draft_group set_aot_mode",
        "parallel_layers.utils": "indices_split_along_dim initialize_fallback_parallel_state",
        "utils": "medusa_utils sampling tensor_capture tensor_replacement",
        "utils.model_utils": "check_delay_tracing get_delay_tracing",
    },
    KERNELS_HINT: {
        "kernels": "kernel_utils",
        "kernels.flash_attn": "NKIAttnFunc get_flash_attn_kernels",
        "kernels.ring_attention_kernel": "NkiRingAttnFunc get_seq_tile_size",
    },
    CONVERT_HINT: {
        "scripts": "yaml_converter",
        "optimizer": "zero_dcp_utils",
        "optimizer.convert_zero_checkpoints": "get_parallel_info is_full is_xser merge_optim_dp_checkpoints "
        "split_and_save_ckpts",
    },
    EXPERTS_HINT: {
        "optimizer": "NeuronEPZero1Optimizer",
        "optimizer.zero_redundancy_optimizer": "NeuronEPZero1Optimizer",
    },
    NO_STAGES_HINT: {
        "trainer": "PostPartitionHooks hooks post_partition_hooks",
        "trainer.trainer": "filter_to_local_parameter_group",
        "parallel_layers.parallel_state": "create_pg_with_ranks get_next_rank_group get_next_rank_replica_groups "
        "get_pipeline_model_parallel_sr_group get_pp_gloo_group get_prev_rank_group get_prev_rank_replica_groups "
        "get_tcp_store initialize_pp_gloo_groups is_tcp_store_available",
    },
    TAGS_HINT: {
        "trainer.checkpoint": "create_checkpoint_storage",
        "trainer.checkpoint_storage": "create_checkpoint_storage",
    },
    ADDRESS_HINT: {
        "trainer.checkpoint_storage": "BaseCheckpointStorage FilesysCheckpointStorage S3CheckpointStorage "
        "is_slow_down_error wait_decrementing_with_jitter",
    },
    LAYER_NORM_HINT: {"parallel_layers": "layer_norm"},
    JOIN_LOGITS_HINT: {"parallel_layers.loss_functions": "DistributedLogprob from_parallel_logits_to_logprobs"},
    SHARDING_HINT: {"parallel_layers.layers": "create_local_weight"},
    RANKS_HINT: {
        "parallel_layers": "comm",
        "parallel_layers.parallel_state": "PG_Group_Logic arrange_kv_groups ascending_descending_ring_PG_group "
        "ascending_ring_PG_group get_logic_chosen get_rank_info_str get_zero1_sharding_groups rmsg rmsg_ep "
        "set_context_model_parallel_size set_expert_model_parallel_rank set_expert_model_parallel_size "
        "set_tensor_model_parallel_rank set_tensor_model_parallel_size",
    },
    CONTEXT_PARALLEL_HINT: {
        "parallel_layers.grads": "allreduce_context_parallel_gradients",
        "parallel_layers.mappings": "reduce_from_context_model_parallel_region",
    },
    SEQUENCE_PARALLEL_HINT: {
        "parallel_layers.mappings": "gather_from_sequence_parallel_region "
        "gather_from_tensor_model_parallel_region_with_dim nonzero_partition_dim_swap "
        "reduce_scatter_to_sequence_parallel_region reduce_scatter_to_tensor_model_parallel_region_with_dim "
        "scatter_to_sequence_parallel_region",
    },
    TORCH_XLA_HINT: {"utils": "cpu_mode get_device mark_step master_print"},
    INTERNAL_HINT: {
        "modules.qkv_linear": "GQAQKVLinearWithAsyncCommunication gqa_qkv_linear_with_async_allreduce",
        "parallel_layers.checkpointing": "ensure_directory_exists",
        "parallel_layers.layers": "BaseParallelLayer BaseParallelLinear LinearWithAsyncCommunication "
        "linear_with_async_allreduce",
        "parallel_layers.utils": "EmbeddingUtility cast_if_autocast_enabled verify_casted_dtype",
        "utils": "HloMetadataLevel hardware random safetensors_utils serialization tensor_utils timeline utils",
        "utils.logger": "PackagePathFilter",
        "utils.model_utils": "LogicalNCConfig get_platform_lnc has_fake_tensors is_hf_accelerate_available "
        "is_hf_transformers_available is_nxdt_available is_nxdt_pretrained_model maybe_materalize_model "
        "recursive_filter",
    },
}
"""Hint -> module, relative to neuronx-distributed -> unsupported names in it."""

UNSUPPORTED = {
    f"{module}.{name}".lstrip("."): advice
    for advice, modules in _UNSUPPORTED_BY_HINT.items()
    for module, names in modules.items()
    for name in names.split()
}
"""Full name, without the package name -> hint."""


def get_unsupported_names(module: str) -> dict[str, str]:
    """Return {name: hint} for the unsupported names in one of `neuron_compat.nxd`'s modules."""
    return select_missing_names("neuron_compat.nxd", module, UNSUPPORTED)


def refuse_unsupported_import(module: str) -> None:
    """Raise an error with a hint for the import of an unsupported module, or of a module below it.

    Raises:
        xla_ckpt.UsageError: The module is unsupported.
    """
    parts = module.removeprefix("neuron_compat.nxd.").split(".")
    for name in (".".join(parts[:n]) for n in range(1, len(parts) + 1)):
        if name in UNSUPPORTED:
            raise_unsupported(module, UNSUPPORTED[name])


_PACKAGE = "neuron_compat.nxd"

_SETUP_NAMES = "initialize_parallel_model initialize_parallel_optimizer neuronx_distributed_config"
_CHECKPOINT_NAMES = "finalize_checkpoint has_checkpoint load_checkpoint save_checkpoint"
_PARTITION_NAMES = (
    "copy_tensor_model_parallel_attributes set_defaults_if_not_set_tensor_model_parallel_attributes "
    "set_tensor_model_parallel_attributes"
)
_REGION_NAMES = (
    "copy_to_tensor_model_parallel_region gather_from_tensor_model_parallel_region "
    "reduce_from_tensor_model_parallel_region scatter_to_tensor_model_parallel_region"
)
_PARALLEL_STATE_NAMES = {
    f"get_{name}_{what}" for name in NXD_NAMES.values() for what in ("group", "replica_groups", "size", "rank")
} - {"get_kv_shared_size", "get_kv_shared_rank"}  # which neuronx-distributed does not have

EXPORTS: dict[str, dict[str, str]] = {
    "": {"trainer.checkpoint": _CHECKPOINT_NAMES, "trainer.trainer": _SETUP_NAMES},
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
        "mappings": _REGION_NAMES,
        "utils": f"{_PARTITION_NAMES} move_model_to_device split_tensor_along_last_dim",
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
    "parallel_layers.loss_functions": {"neuron_compat.emulated.layers": "parallel_cross_entropy"},
    "parallel_layers.mappings": {"neuron_compat.emulated.collectives": f"copy_to_kv_shared_region {_REGION_NAMES}"},
    "parallel_layers.parallel_state": {
        "neuron_compat.emulated.parallel_state": f"{' '.join(sorted(_PARALLEL_STATE_NAMES))} initialize_model_parallel "
        "initialize_kv_group get_kv_shared_group_size destroy_kv_group model_parallel_is_initialized "
        "destroy_model_parallel get_world_group get_tensor_model_parallel_src_rank get_data_parallel_src_rank "
        "get_pipeline_model_parallel_next_rank get_pipeline_model_parallel_prev_rank "
        "get_context_model_parallel_src_tgt_pairs is_global_rank_zero",
    },
    "parallel_layers.random": {
        "neuron_compat.emulated.random": "XLARNGStatesTracker get_xla_rng_tracker model_parallel_xla_manual_seed",
    },
    "parallel_layers.utils": {
        "neuron_compat.emulated.model_utils": "move_model_to_device",
        "neuron_compat.emulated.layers": f"{_PARTITION_NAMES} param_is_not_tensor_parallel_duplicate",
    },
    "scripts": {},
    "scripts.checkpoint_converter": {},
    "trainer": {"checkpoint": _CHECKPOINT_NAMES, "trainer": _SETUP_NAMES},
    "trainer.checkpoint": {},
    "trainer.checkpoint_storage": {},
    "trainer.model": {"neuron_compat.emulated.nxd.trainer": "NxDModel"},
    "trainer.optimizer": {"neuron_compat.emulated.nxd.trainer": "NxDOptimizer"},
    "trainer.trainer": {"neuron_compat.emulated.nxd.trainer": f"{_SETUP_NAMES} initialize_optimizer_from_class"},
    "utils": {},
    "utils.adamw_fp32_optim_params": {},
    "utils.batch_utils": {
        "neuron_compat.emulated.nxd.trainer": "get_batch_on_this_context_parallel_rank shift_labels",
    },
    "utils.logger": {},
    "utils.model_utils": {
        "neuron_compat.emulated.model_utils": "is_hf_pretrained_model analyze_shared_parameters retie_shared_weights "
        "preserve_shared_weights preserve_parallel_attributes move_model_to_device init_on_device reinit_model "
        "get_model_sequential",
    },
}
"""Module, relative to neuronx-distributed -> module that defines names of it -> the names."""


def attach_exports(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of the module with this ``__name__`` (see `attach_lazy_names`).

    >>> load, names = attach_exports("neuron_compat.nxd.utils")
    >>> load("logger").__name__, "logger" in names()
    ('neuron_compat.nxd.utils.logger', True)
    """
    below = f"{module}.".removeprefix(f"{_PACKAGE}.")
    inside = [name.removeprefix(below) for name in EXPORTS if name.startswith(below) and name]
    submodules = [name for name in inside if "." not in name]
    return attach_lazy_names(module, EXPORTS[below.rstrip(".")], submodules, missing=get_unsupported_names(module))
