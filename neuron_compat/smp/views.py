"""What a rank saves of a model and of its optimizer: the partition that it owns."""

from __future__ import annotations

from typing import Any

import torch

from neuron_compat.smp import job
from xla_ckpt.state.wrappers import View


def local_model(model: Any) -> View:
    """The part of a `DistributedModel` that this rank owns, as `xla_ckpt` saves modules."""
    entries = {entry.name: entry.value for entry in model.local_entries()}
    return View(
        entries,
        parameters=[(name, value) for name, value in entries.items() if isinstance(value, torch.nn.Parameter)],
        parts=[model.module],
        put=lambda state_dict: None,
    )


def local_optimizer(model: Any, optimizer: Any) -> dict[str, Any]:
    """The state of an optimizer by parameter name: groups of the whole model, and the states of what this rank owns."""
    names: dict[int, str] = {}
    for name, parameter in model.module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    owned = {id(entry.value) for entry in model.local_entries()}
    state = {
        names[id(parameter)]: dict(held)
        for parameter, held in optimizer.state.items()
        if id(parameter) in owned and id(parameter) in names
    }
    groups = [
        {
            **{key: value for key, value in group.items() if key not in ("params", "param_names")},
            "params": [names[id(parameter)] for parameter in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


def partition_info(model: Any) -> dict[str, int]:
    """The partition of each module, under SMP's names."""
    info: dict[str, int] = model.local_state_dict(cast_to_cpu=False)["_smp_load_info"]["partition_info"]
    return info


def is_distributed_optimizer(optimizer: Any) -> bool:
    """Whether `smp.DistributedOptimizer` returned it."""
    return optimizer is job.state.optimizer or callable(getattr(optimizer, "local_state_dict", None))
