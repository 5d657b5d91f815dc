"""Synchronize ranks that hold the same parameters: broadcast them before a step, and average gradients after it.

In every step, the ranks of the job first agree on a `StepPlan`, so that no rank waits for one that cannot begin, and a
rank without further data (`DistributedModel.join`) participates without a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from neuron_compat.emulated import collectives
from neuron_compat.emulated.smp.mixed_precision import HALF_PRECISION_DTYPES
from neuron_compat.groups import list_rank_groups
from neuron_compat.smp import job, tensor_transport
from neuron_compat.smp.errors import SMPUnsupportedError
from neuron_compat.smp.state_entries import StateEntry
from neuron_compat.smp.tensor_transport import find_owner_rank
from xla_ckpt.facade import move_to_host

distributed: Any = torch.distributed


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Agreement of the ranks of the job for one step."""

    broadcasts: bool
    """True if parameters and buffers are broadcast from the first rank: in the first step, or after a load."""
    reduces: bool
    """True if gradients are averaged at the end."""
    failed: bool
    """True if a rank cannot begin."""
    alive: tuple[int, ...]
    """Ranks that have a batch."""


def agree_on_step(
    *, broadcasts: bool = False, reduces: bool = False, failed: bool = False, alive: bool = True
) -> StepPlan:
    """Agree on a step with all ranks of the job. Call it on all ranks; each may set any of the flags."""
    here = job.get_rank_info()
    if here.mesh.size == 1:
        return StepPlan(broadcasts, reduces, failed, (0,) if alive else ())
    said = torch.zeros(3 + here.mesh.size, dtype=torch.int32, device="cpu")
    said[:3] = torch.tensor([broadcasts, reduces, failed], device="cpu")
    said[3 + here.rank] = alive
    distributed.all_reduce(said, group=job.get_process_group("world"))
    sums = said.tolist()
    living = tuple(rank for rank in range(here.mesh.size) if sums[3 + rank])
    return StepPlan(bool(sums[0]), bool(sums[1]), bool(sums[2]), living)


def find_first_alive(kind: str, alive: Sequence[int]) -> int:
    """Return the global rank of the first member in this process's group with a batch, or of the first member."""
    ranks = job.get_rank_info().groups[kind]
    return next((rank for rank in ranks if rank in alive), ranks[0])


@torch.no_grad()
def broadcast_from_owners(entries: Sequence[StateEntry]) -> None:
    """Broadcast the parameters and buffers of each partition from its owner to the other pipeline ranks."""
    if job.pp_size() == 1:
        return
    for entry in _list_unique_tensors(entries):
        source = find_owner_rank(entry.owners[0], job.tp_rank())
        broadcast_in_place(entry.value, source, "pp")


@torch.no_grad()
def broadcast_from_replica(entries: Sequence[StateEntry], alive: Sequence[int]) -> None:
    """Broadcast parameters and buffers to all data-parallel ranks from the first of them that has a batch.

    Values sharded over tensor-parallel ranks come from a rank with the same shard, all others from any of them.
    """
    for entry in _list_unique_tensors(entries):
        kind = "rdp" if entry.is_split else "dp"
        if len(job.get_rank_info().groups[kind]) > 1:
            broadcast_in_place(entry.value, find_first_alive(kind, alive), kind)


def _list_unique_tensors(entries: Sequence[StateEntry]) -> list[StateEntry]:
    """Return the entries that are tensors, each tensor once."""
    return list({id(e.value): e for e in entries if e.is_tensor}.values())


@torch.no_grad()
def broadcast_in_place(value: torch.Tensor, source: int, kind: str) -> None:
    """Broadcast a value from one rank of a group, in place. Call it on all ranks of the group."""
    sent = move_to_host([value])[0] if source == job.rank() else None
    received = tensor_transport.broadcast_tensor(sent, value.shape, value.dtype, source, kind)
    if source != job.rank():
        value.detach().copy_(received)


# -- gradients


@torch.no_grad()
def average_gradients(parameters: Sequence[torch.nn.Parameter], kind: str, had_backward: bool) -> None:
    """Average gradients over the ranks of a group. Call it on all ranks of the group.

    A gradient that exists only on some ranks counts as zeros on the others; if it exists on none, it remains None.
    16-bit gradients are summed in float32. If no rank `had_backward` since the last average, nothing is done.
    """
    have = [had_backward, *(p.grad is not None for p in parameters)]
    present = torch.tensor(have, dtype=torch.int32, device="cpu")
    distributed.all_reduce(present, group=job.get_process_group(kind))
    someone, *counts = present.tolist()
    if not someone:
        return
    groups = [list(g) for g in list_rank_groups(job.get_rank_info().mesh, job.GROUP_KINDS[kind])]
    ranks = groups, job.get_process_group(kind)
    for parameter, count in zip(parameters, counts, strict=True):
        if count and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if count and parameter.grad is not None:
            gradient = parameter.grad.float() if parameter.dtype in HALF_PRECISION_DTYPES else parameter.grad
            parameter.grad.copy_(collectives.sum_over_ranks(gradient, ranks) / len(groups[0]))


def check_gradients_dense(named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    """Raise an error for sparse gradients.

    Raises:
        SMPUnsupportedError: A gradient is sparse.
    """
    for name, parameter in named:
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise SMPUnsupportedError(
                "sparse gradients are not averaged", leaf=name, hint="Make the embedding with sparse=False."
            )
