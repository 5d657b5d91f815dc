"""neuronx-distributed's ``trainer.trainer``."""

from neuron_compat.nxd.homes import names_of

__getattr__, __dir__ = names_of(__name__)
