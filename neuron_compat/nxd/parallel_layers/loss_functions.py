"""neuronx-distributed's ``parallel_layers.loss_functions``."""

from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import here

__getattr__, __dir__ = lazily(
    __name__, {"neuron_compat.emulated.loss": ("parallel_cross_entropy",)}, missing=here(__name__)
)
