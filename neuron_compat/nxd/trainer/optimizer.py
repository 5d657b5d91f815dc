"""neuronx-distributed's ``trainer.optimizer``."""

from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import here

__getattr__, __dir__ = lazily(
    __name__, {"neuron_compat.emulated.nxd.optimizer": ("NxDOptimizer",)}, missing=here(__name__)
)
