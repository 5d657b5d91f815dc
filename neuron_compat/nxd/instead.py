"""The names of neuronx-distributed 0.18 that are not there, and what to do about each. Pure.

`ABSENT` has modules, and names in modules. To import the one, or what is below it, and to ask for the other, is a
`xla_ckpt.UsageError` with the advice.
"""

from __future__ import annotations

from neuron_compat.lazy import absent, below

KEEP_NXD = (
    "Keep neuronx_distributed for it, and import the checkpoint functions alone from neuron_compat.nxd "
    "(docs/from-nxd.md)."
)
FINALIZE = "Saves in flight are kept by the library: nxd.finalize_checkpoint() waits for them."
TAGS = "xla_ckpt.list_tags, latest_tag and has_checkpoint say what a directory holds."
ADDRESS = "Give nxd.save_checkpoint the path of a directory, or the address of a bucket (s3://bucket/run)."
CONVERT = "xla-ckpt convert changes topology and layout, and xla-ckpt export writes Hugging Face's files."
NO_STAGES = "It is for pipeline stages, which models here are not divided into."
JOIN_LOGITS = "Join the logits (gather_output=True), and call torch's own log_softmax."
KERNELS = "They are for Trainium: use torch's own operations here."
TRACE = "It compiles models for Trainium's inference: call the model itself here."
LAYER_NORM = "torch.nn.LayerNorm and torch.nn.RMSNorm do here, where sequences are not split."
PLACES = "Checkpoints say how arrays are split by attributes of parameters (set_tensor_model_parallel_attributes)."
RANKS = "initialize_model_parallel arranges all ranks; get_*_replica_groups and get_*_group have them."
CONTEXT = "Context parallelism needs ring attention, which is a kernel for Trainium."
SEQUENCES = "Sequences are not split here: leave out sequence parallelism, the results are the same up to rounding."
OWN = "It is a part of neuronx-distributed's own works: write what you need of it into your program."
XLA = "Ask torch_xla: torch_xla.sync(), torch_xla.device(), torch_xla.core.xla_model.master_print."
EXPERTS = (
    "Give experts a ZeroRedundancyOptimizer of torch_xla's, with parallel_state's "
    "sharding_groups=get_expert_data_parallel_replica_groups(), and save and load it as "
    "extras={'experts': xla_ckpt.PerRank(optimizer)}."
)

_BY_ADVICE: dict[str, dict[str, str]] = {
    FINALIZE: {"": "CheckpointIOState", "trainer.checkpoint": "CheckpointIOState"},
    KEEP_NXD: {
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
    TRACE: {
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
    KERNELS: {
        "kernels": "kernel_utils",
        "kernels.flash_attn": "NKIAttnFunc get_flash_attn_kernels",
        "kernels.ring_attention_kernel": "NkiRingAttnFunc get_seq_tile_size",
    },
    CONVERT: {
        "scripts": "yaml_converter",
        "optimizer": "zero_dcp_utils",
        "optimizer.convert_zero_checkpoints": "get_parallel_info is_full is_xser merge_optim_dp_checkpoints "
        "split_and_save_ckpts",
    },
    EXPERTS: {
        "optimizer": "NeuronEPZero1Optimizer",
        "optimizer.zero_redundancy_optimizer": "NeuronEPZero1Optimizer",
    },
    NO_STAGES: {
        "trainer": "PostPartitionHooks hooks post_partition_hooks",
        "trainer.trainer": "filter_to_local_parameter_group",
        "parallel_layers.parallel_state": "create_pg_with_ranks get_next_rank_group get_next_rank_replica_groups "
        "get_pipeline_model_parallel_sr_group get_pp_gloo_group get_prev_rank_group get_prev_rank_replica_groups "
        "get_tcp_store initialize_pp_gloo_groups is_tcp_store_available",
    },
    TAGS: {
        "trainer.checkpoint": "create_checkpoint_storage",
        "trainer.checkpoint_storage": "create_checkpoint_storage",
    },
    ADDRESS: {
        "trainer.checkpoint_storage": "BaseCheckpointStorage FilesysCheckpointStorage S3CheckpointStorage "
        "is_slow_down_error wait_decrementing_with_jitter",
    },
    LAYER_NORM: {"parallel_layers": "layer_norm"},
    JOIN_LOGITS: {"parallel_layers.loss_functions": "DistributedLogprob from_parallel_logits_to_logprobs"},
    PLACES: {"parallel_layers.layers": "create_local_weight"},
    RANKS: {
        "parallel_layers": "comm",
        "parallel_layers.parallel_state": "PG_Group_Logic arrange_kv_groups ascending_descending_ring_PG_group "
        "ascending_ring_PG_group get_logic_chosen get_rank_info_str get_zero1_sharding_groups rmsg rmsg_ep "
        "set_context_model_parallel_size set_expert_model_parallel_rank set_expert_model_parallel_size "
        "set_tensor_model_parallel_rank set_tensor_model_parallel_size",
    },
    CONTEXT: {
        "parallel_layers.grads": "allreduce_context_parallel_gradients",
        "parallel_layers.mappings": "reduce_from_context_model_parallel_region",
    },
    SEQUENCES: {
        "parallel_layers.mappings": "gather_from_sequence_parallel_region "
        "gather_from_tensor_model_parallel_region_with_dim nonzero_partition_dim_swap "
        "reduce_scatter_to_sequence_parallel_region reduce_scatter_to_tensor_model_parallel_region_with_dim "
        "scatter_to_sequence_parallel_region",
    },
    XLA: {"utils": "cpu_mode get_device mark_step master_print"},
    OWN: {
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
"""What to do -> module, below neuronx-distributed -> names in it."""

ABSENT = {
    f"{module}.{name}".lstrip("."): advice
    for advice, modules in _BY_ADVICE.items()
    for module, names in modules.items()
    for name in names.split()
}
"""Full name, without that of the package -> what to do."""


def here(module: str) -> dict[str, str]:
    """What is missing in one of `neuron_compat.nxd`'s modules: name -> what to do."""
    return below("neuron_compat.nxd", module, ABSENT)


def refuse(module: str) -> None:
    """Say to whoever imports a module that is not there, or what lies below it, what to do instead."""
    parts = module.removeprefix("neuron_compat.nxd.").split(".")
    for name in (".".join(parts[:n]) for n in range(1, len(parts) + 1)):
        if name in ABSENT:
            absent(module, ABSENT[name])
