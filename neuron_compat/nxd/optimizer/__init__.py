"""neuronx-distributed's ZeRO-1 optimizer; torch_xla is loaded when it is first used."""

from neuron_compat.nxd.exports import attach_exports

__all__ = ["NeuronZero1Optimizer"]

__getattr__, __dir__ = attach_exports(__name__)
