"""neuronx-distributed's ZeRO-1 optimizer; torch_xla is loaded when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neuron_compat.nxd.optimizer.zero_redundancy_optimizer import NeuronZero1Optimizer as NeuronZero1Optimizer

__all__ = ["NeuronZero1Optimizer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'neuron_compat.nxd.optimizer' has no attribute {name!r}")
    from neuron_compat.nxd.optimizer import zero_redundancy_optimizer

    return getattr(zero_redundancy_optimizer, name)
