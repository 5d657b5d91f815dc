"""neuronx-distributed's ``parallel_layers.mappings``."""

from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import here

__getattr__, __dir__ = lazily(
    __name__,
    {
        "neuron_compat.emulated.mappings": (
            "copy_to_tensor_model_parallel_region",
            "copy_to_kv_shared_region",
            "reduce_from_tensor_model_parallel_region",
            "gather_from_tensor_model_parallel_region",
            "scatter_to_tensor_model_parallel_region",
        )
    },
    missing=here(__name__),
)
