"""neuronx-distributed's ZeRO-1 optimizer; torch_xla is imported on first use."""

from neuron_compat.nxd.exports import attach_exports

__all__ = ["NeuronZero1Optimizer"]

__getattr__, __dir__ = attach_exports(__name__)
