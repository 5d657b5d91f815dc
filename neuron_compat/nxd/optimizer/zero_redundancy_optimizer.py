"""neuronx-distributed's ``optimizer.zero_redundancy_optimizer``."""

from neuron_compat.nxd.homes import names_of

__getattr__, __dir__ = names_of(__name__)
