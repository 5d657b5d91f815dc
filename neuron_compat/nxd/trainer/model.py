"""neuronx-distributed's ``trainer.model``."""

from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import here

__getattr__, __dir__ = lazily(__name__, {"neuron_compat.emulated.nxd.model": ("NxDModel",)}, missing=here(__name__))
