"""neuronx-distributed's ZeRO-1 optimizer; torch_xla is loaded when it is first used."""

from __future__ import annotations

from neuron_compat.lazy import lazily

__all__ = ["NeuronZero1Optimizer"]

__getattr__, __dir__ = lazily(
    __name__,
    {"zero_redundancy_optimizer": __all__},
    missing={
        "NeuronEPZero1Optimizer": "Give experts an optimizer of their own, with sharding_groups over the "
        "expert-data-parallel groups.",
    },
)
