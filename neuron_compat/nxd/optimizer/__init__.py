"""neuronx-distributed's ZeRO-1 optimizer; torch_xla is loaded when it is first used."""

from neuron_compat.nxd.homes import names_of

__all__ = ["NeuronZero1Optimizer"]

__getattr__, __dir__ = names_of(__name__)
