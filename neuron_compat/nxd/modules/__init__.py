"""Modules that are made of tensor-parallel layers: neuronx-distributed's names."""

from neuron_compat.nxd.homes import names_of

__all__ = ["GQAQKVColumnParallelLinear"]

__getattr__, __dir__ = names_of(__name__)
