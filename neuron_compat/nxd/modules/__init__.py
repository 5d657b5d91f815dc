"""Modules built from tensor-parallel layers, with neuronx-distributed's names."""

from neuron_compat.nxd.exports import attach_exports

__all__ = ["GQAQKVColumnParallelLinear"]

__getattr__, __dir__ = attach_exports(__name__)
