"""neuronx-distributed's ``trainer.trainer``."""

from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import here

__getattr__, __dir__ = lazily(
    __name__,
    {
        "neuron_compat.emulated.nxd.trainer": (
            "neuronx_distributed_config",
            "initialize_parallel_model",
            "initialize_parallel_optimizer",
            "initialize_optimizer_from_class",
        )
    },
    missing=here(__name__),
)
