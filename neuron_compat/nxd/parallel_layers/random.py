"""neuronx-distributed's ``parallel_layers.random``."""

from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import here

__getattr__, __dir__ = lazily(
    __name__,
    {"neuron_compat.emulated.random": ("XLARNGStatesTracker", "get_xla_rng_tracker", "model_parallel_xla_manual_seed")},
    missing=here(__name__),
)
