"""neuronx-distributed's ``optimizer.zero_redundancy_optimizer``."""

from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import here

__getattr__, __dir__ = lazily(
    __name__, {"neuron_compat.emulated.nxd.zero1": ("NeuronZero1Optimizer",)}, missing=here(__name__)
)
