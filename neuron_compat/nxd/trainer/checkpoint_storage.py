"""The storages of neuronx-distributed: each name is an error that says what to use instead."""

from neuron_compat.nxd.homes import names_of

__getattr__, __dir__ = names_of(__name__)
