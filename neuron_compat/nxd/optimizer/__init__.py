"""neuronx-distributed's ZeRO-1 optimizer; torch_xla is loaded when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neuron_compat.lazy import lazily

if TYPE_CHECKING:
    from neuron_compat.nxd.optimizer.zero_redundancy_optimizer import NeuronZero1Optimizer as NeuronZero1Optimizer

__all__ = ["NeuronZero1Optimizer"]

__getattr__, __dir__ = lazily(
    __name__,
    {"zero_redundancy_optimizer": __all__},
    missing={
        "NeuronEPZero1Optimizer": "Give experts an optimizer of their own, with sharding_groups over the "
        "expert-data-parallel groups.",
    },
)
