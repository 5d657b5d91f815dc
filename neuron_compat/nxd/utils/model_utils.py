"""neuronx-distributed's ``utils.model_utils``."""

from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import here

__getattr__, __dir__ = lazily(
    __name__,
    {
        "neuron_compat.emulated.moving": (
            "is_hf_pretrained_model",
            "analyze_shared_parameters",
            "retie_shared_weights",
            "preserve_shared_weights",
            "preserve_parallel_attributes",
            "move_model_to_device",
            "init_on_device",
            "reinit_model",
            "get_model_sequential",
        )
    },
    missing=here(__name__),
)
