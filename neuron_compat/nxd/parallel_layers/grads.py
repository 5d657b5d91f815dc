"""neuronx-distributed's ``parallel_layers.grads``."""

from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import here

__getattr__, __dir__ = lazily(
    __name__,
    {
        "neuron_compat.emulated.grads": (
            "param_is_not_shared",
            "get_grad_norm",
            "clip_grad_norm",
            "clip_grads_with_norm",
            "bucket_allreduce_gradients",
            "allreduce_sequence_parallel_gradients",
        )
    },
    missing=here(__name__),
)
