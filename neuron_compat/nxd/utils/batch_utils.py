"""neuronx-distributed's ``utils.batch_utils``."""

from neuron_compat.nxd.homes import names_of

__getattr__, __dir__ = names_of(__name__)
