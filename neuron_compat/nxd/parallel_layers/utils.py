"""neuronx-distributed's ``parallel_layers.utils``."""

from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import here

__getattr__, __dir__ = lazily(
    __name__,
    {
        "neuron_compat.emulated.nxd.parameters": (
            "cast_all",
            "cast_tensor",
            "copy_tensor_model_parallel_attributes",
            "divide",
            "ensure_divisibility",
            "get_local_world_size",
            "get_padding_length",
            "is_pjrt_device",
            "is_torch_version_greater_than_2",
            "move_all_tensor_to_cpu",
            "param_is_not_tensor_parallel_duplicate",
            "requires_init_pg_override",
            "set_defaults_if_not_set_tensor_model_parallel_attributes",
            "split_tensor_along_dim",
            "split_tensor_along_last_dim",
            "split_tensor_along_second_dim",
        ),
        "neuron_compat.emulated.moving": ("move_model_to_device",),
        "neuron_compat.emulated.partition": ("set_tensor_model_parallel_attributes",),
    },
    missing=here(__name__),
)
