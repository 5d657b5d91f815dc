"""SMP's optimizers, which need apex: each name is an error that says what to use instead."""

from __future__ import annotations

from neuron_compat.lazy import lazily

_ADAM = "Use torch.optim.AdamW (or Adam), and smp.DistributedOptimizer around it."
_OTHER = "Use an optimizer of torch.optim, such as AdamW, and smp.DistributedOptimizer around it."

__getattr__, __dir__ = lazily(
    __name__,
    {},
    missing={
        "FusedAdam": _ADAM,
        "FusedNovoGrad": _OTHER,
        "FusedLamb": _OTHER,
        "FusedLAMB": _OTHER,
        "DistributedOptimizer": "It is smp.DistributedOptimizer.",
    },
)
