"""neuronx-distributed's ZeRO-1 optimizer; torch_xla is loaded when it is first used."""

from __future__ import annotations

from neuron_compat.lazy import lazily
from neuron_compat.nxd.instead import here

__all__ = ["NeuronZero1Optimizer"]

__getattr__, __dir__ = lazily(__name__, {"zero_redundancy_optimizer": __all__}, missing=here(__name__))
