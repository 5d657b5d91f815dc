"""neuronx-distributed's ``optimizer.zero_redundancy_optimizer``."""

from neuron_compat.lazy import lazily

__getattr__, __dir__ = lazily(
    __name__,
    {"neuron_compat.emulated.nxd.zero1": ("NeuronZero1Optimizer",)},
)
