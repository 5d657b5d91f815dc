"""Names of SMP's apex optimizers: all unsupported; each raises an error with a hint."""

from __future__ import annotations

from neuron_compat.lazy_imports import attach_lazy_names

_ADAM_HINT = "Use torch.optim.AdamW (or Adam), and smp.DistributedOptimizer around it."
_OTHER_HINT = "Use an optimizer of torch.optim, such as AdamW, and smp.DistributedOptimizer around it."

__getattr__, __dir__ = attach_lazy_names(
    __name__,
    {},
    missing={
        "FusedAdam": _ADAM_HINT,
        "FusedNovoGrad": _OTHER_HINT,
        "FusedLamb": _OTHER_HINT,
        "FusedLAMB": _OTHER_HINT,
        "DistributedOptimizer": "It is smp.DistributedOptimizer.",
    },
)
