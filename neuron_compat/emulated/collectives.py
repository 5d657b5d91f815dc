"""Reductions over groups of ranks.

Tensors on XLA devices are reduced by torch_xla's collectives (under `neuron_compat.emulate()` these reach all
processes), others through the process groups of `parallel_state`.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from neuron_compat.emulated import parallel_state
from xla_ckpt import UsageError

Groups: TypeAlias = list[list[int]]

SUM, MAX = "sum", "max"

Ranks: TypeAlias = tuple[Groups | None, Any]
"""XLA's replica groups (None: one of all ranks), and this rank's process group (None: there is none for them)."""


def ranks_of(kind: str) -> Ranks:
    """The groups of a kind: ``tp``, ``pp``, ``ep``, ``edp``, or ``kv`` of those that hold the same keys and values."""
    groups = parallel_state.replica_groups(kind)
    return groups, None if len(groups[0]) == 1 else parallel_state.process_group(kind)


def world() -> Ranks:
    """All ranks of the job."""
    distributed: Any = torch.distributed
    return None, distributed.group.WORLD if distributed.is_initialized() else None


def summed(value: torch.Tensor, ranks: Ranks, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The sum over the ranks of a group, made in `dtype`, of the type of `value`."""
    total = value.detach().to(dtype or value.dtype, copy=True, memory_format=torch.contiguous_format)
    reduce_in_place([total], ranks, SUM)
    return total.to(value.dtype)


def reduce_in_place(values: list[torch.Tensor], ranks: Ranks, operation: str) -> None:
    """Reduce tensors over the ranks of a group, in place."""
    groups, process_group = ranks
    if not values or (groups is not None and len(groups[0]) == 1):
        return
    if values[0].device.type == "xla":
        import torch_xla.core.xla_model as xm

        xm.all_reduce(operation, values, groups=groups, pin_layout=False)
        return
    distributed: Any = torch.distributed
    if process_group is None:
        if groups is not None:
            raise UsageError("groups of ranks are for tensors on an XLA device", found=str(values[0].device))
        return  # one process without torch.distributed
    kind = distributed.ReduceOp.MAX if operation == MAX else distributed.ReduceOp.SUM
    for value in values:
        distributed.all_reduce(value, op=kind, group=process_group)
