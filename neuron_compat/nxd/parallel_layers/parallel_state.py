"""neuronx-distributed's ``parallel_layers.parallel_state``."""

from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import here

__getattr__, __dir__ = lazily(
    __name__,
    {
        "neuron_compat.emulated.parallel_state": (
            "initialize_model_parallel",
            "initialize_kv_group",
            "get_kv_shared_group",
            "get_kv_shared_replica_groups",
            "get_kv_shared_group_size",
            "destroy_kv_group",
            "model_parallel_is_initialized",
            "destroy_model_parallel",
            "get_tensor_model_parallel_group",
            "get_tensor_model_parallel_replica_groups",
            "get_tensor_model_parallel_size",
            "get_tensor_model_parallel_rank",
            "get_pipeline_model_parallel_group",
            "get_pipeline_model_parallel_replica_groups",
            "get_pipeline_model_parallel_size",
            "get_pipeline_model_parallel_rank",
            "get_context_model_parallel_group",
            "get_context_model_parallel_replica_groups",
            "get_context_model_parallel_size",
            "get_context_model_parallel_rank",
            "get_expert_model_parallel_group",
            "get_expert_model_parallel_replica_groups",
            "get_expert_model_parallel_size",
            "get_expert_model_parallel_rank",
            "get_data_parallel_group",
            "get_data_parallel_replica_groups",
            "get_data_parallel_size",
            "get_data_parallel_rank",
            "get_expert_data_parallel_group",
            "get_expert_data_parallel_replica_groups",
            "get_expert_data_parallel_size",
            "get_expert_data_parallel_rank",
            "get_world_group",
            "get_tensor_model_parallel_src_rank",
            "get_data_parallel_src_rank",
            "get_pipeline_model_parallel_next_rank",
            "get_pipeline_model_parallel_prev_rank",
            "get_context_model_parallel_src_tgt_pairs",
            "is_global_rank_zero",
        )
    },
    missing=here(__name__),
)
