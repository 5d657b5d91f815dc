"""neuronx-distributed's ``parallel_layers.parallel_state``."""

from neuron_compat.groups import NAMES
from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import here

_OF_EACH_KIND = {
    f"get_{name}_{what}" for name in NAMES.values() for what in ("group", "replica_groups", "size", "rank")
}

__getattr__, __dir__ = lazily(
    __name__,
    {
        "neuron_compat.emulated.parallel_state": (
            *(_OF_EACH_KIND - {"get_kv_shared_size", "get_kv_shared_rank"}),  # which neuronx-distributed has not
            "initialize_model_parallel",
            "initialize_kv_group",
            "get_kv_shared_group_size",
            "destroy_kv_group",
            "model_parallel_is_initialized",
            "destroy_model_parallel",
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
