"""What a rank saves of a model and of its optimizer: the partition that it owns, under the names of the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from neuron_compat.smp import comm, job
from neuron_compat.smp.optimizer_calls import OptimizerCalls
from neuron_compat.smp.optimizer_state import fp16_state, on_cpu
from xla_ckpt.facade import FP16_SET, ModelView


def local_model(model: Any) -> ModelView:
    """The part of a `DistributedModel` that this rank owns, as `xla_ckpt` saves modules."""
    entries = {entry.name: entry.value for entry in model.local_entries()}
    return ModelView(
        entries,
        parameters=[(name, value) for name, value in entries.items() if isinstance(value, torch.nn.Parameter)],
        parts=[model.module],
        put=lambda state_dict: None,
    )


def local_optimizer(optimizer: Any) -> dict[str, Any]:
    """The state of a `DistributedOptimizer` by parameter name: all groups, and the states of what this rank owns.

    With ``shard_optimizer_state`` the ranks that hold the same parameters give each other their shares of the states:
    all of them make the call. Master weights are under ``master``, by name.
    """
    runtime = optimizer._smp
    names, entries = runtime.names(optimizer), runtime.entries(optimizer)
    here = job.pp_rank()
    owned = [number for number, entry in enumerate(entries) if here in entry.owners]
    of_parameters = dict(_states(optimizer, owned))
    shared = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    groups = []
    for group, numbers in zip(optimizer.param_groups, runtime.numbers(optimizer), strict=True):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({**options, "params": [names[number] for number in numbers]})
    state = {names[number]: of_one for number, of_one in of_parameters.items() if of_one}
    packed: dict[str, Any] = {"state": {**state, **shared}, "param_groups": groups}
    if runtime.masters is not None:
        masters = runtime.masters_by_number(optimizer)
        packed["master"] = {names[n]: masters[n].detach() for n in owned if n in masters}
    return packed


def _states(optimizer: Any, owned: list[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The states of parameters by number."""
    runtime = optimizer._smp
    parameters, shares = runtime.parameters(optimizer), runtime.shares(optimizer)
    for number in owned:
        own = dict(optimizer.state.get(parameters[number], {}))
        if shares is None or job.rdp_size() == 1:
            yield number, own
        elif shares[number] == job.rdp_rank():
            yield number, comm.broadcast(on_cpu(own), comm.RDP_GROUP)
        else:
            yield number, comm.recv_from(shares[number], comm.RankType.RDP_RANK)


def scale_of(optimizer: Any) -> dict[str, Any]:
    """What is stored of the loss scale of an optimizer, as a member of `extras`; nothing without one."""
    return {FP16_SET: fp16_state(optimizer)} if job.state.cfg.fp16 and optimizer._smp.masters is not None else {}


def is_distributed_optimizer(optimizer: Any) -> bool:
    """Whether `smp.DistributedOptimizer` returned it."""
    return isinstance(optimizer, OptimizerCalls)
