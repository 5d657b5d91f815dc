"""neuronx-distributed's ``parallel_layers.layers``."""

from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import here

__getattr__, __dir__ = lazily(
    __name__,
    {
        "neuron_compat.emulated.layers": (
            "check_supported",
            "draw_weight",
            "whole_linear",
            "ColumnParallelLinear",
            "RowParallelLinear",
            "ParallelEmbedding",
        )
    },
    missing=here(__name__),
)
