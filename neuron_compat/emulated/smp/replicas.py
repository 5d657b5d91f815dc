"""What ranks that hold the same parameters do together in a step: the same values before it, one gradient after it.

In every step the ranks of the job first say what they are about to do (`Turn`), so that none of them waits for one that
cannot begin, and one whose data has run out (`DistributedModel.join`) takes part in it without a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from neuron_compat.emulated import collectives
from neuron_compat.emulated.smp.master_weights import NARROW
from neuron_compat.groups import rank_groups
from neuron_compat.smp import job, wire
from neuron_compat.smp.entries import Entry
from neuron_compat.smp.errors import SMPUnsupportedError
from neuron_compat.smp.gathering import holder
from xla_ckpt.facade import hosted

distributed: Any = torch.distributed


@dataclass(frozen=True, slots=True)
class Turn:
    """What the ranks of the job do in a step."""

    spreads: bool
    """Parameters and buffers are taken from the first rank: the first step, or one after a load."""
    reduces: bool
    """Gradients are averaged at the end."""
    failed: bool
    """A rank cannot begin."""
    alive: tuple[int, ...]
    """The ranks that have a batch."""


def turn(*, spreads: bool = False, reduces: bool = False, failed: bool = False, alive: bool = True) -> Turn:
    """What the ranks of the job do in this step. All of them make the same call; any of them may ask for something."""
    here = job.ranks()
    if here.mesh.size == 1:
        return Turn(spreads, reduces, failed, (0,) if alive else ())
    said = torch.zeros(3 + here.mesh.size, dtype=torch.int32, device="cpu")
    said[:3] = torch.tensor([spreads, reduces, failed], device="cpu")
    said[3 + here.rank] = alive
    distributed.all_reduce(said, group=job.process_group("world"))
    sums = said.tolist()
    living = tuple(rank for rank in range(here.mesh.size) if sums[3 + rank])
    return Turn(bool(sums[0]), bool(sums[1]), bool(sums[2]), living)


def first_alive(kind: str, alive: Sequence[int]) -> int:
    """The first rank in the world of this process' group that has a batch, or else the first of them."""
    ranks = job.ranks().groups[kind]
    return next((rank for rank in ranks if rank in alive), ranks[0])


@torch.no_grad()
def take_from_owners(entries: Sequence[Entry]) -> None:
    """Give each pipeline rank the parameters and buffers of the others' partitions, as their owners have them."""
    if job.pp_size() == 1:
        return
    for entry in _unique(entries):
        source = holder(entry.owners[0], job.tp_rank())
        take(entry.value, source, "pp")


@torch.no_grad()
def take_from_replica(entries: Sequence[Entry], alive: Sequence[int]) -> None:
    """Give all data-parallel ranks the parameters and buffers of the first of them that has a batch.

    What is split over tensor-parallel ranks comes from a rank with the same part, all else from any of them.
    """
    for entry in _unique(entries):
        kind = "rdp" if entry.is_split else "dp"
        if len(job.ranks().groups[kind]) > 1:
            take(entry.value, first_alive(kind, alive), kind)


def _unique(entries: Sequence[Entry]) -> list[Entry]:
    """The tensors among the entries, each once."""
    return list({id(e.value): e for e in entries if e.is_tensor}.values())


@torch.no_grad()
def take(value: torch.Tensor, source: int, kind: str) -> None:
    """Give the ranks of a group the value that one of them has, in place. All of them make the same call."""
    sent = hosted([value])[0] if source == job.rank() else None
    received = wire.broadcast(sent, value.shape, value.dtype, source, kind)
    if source != job.rank():
        value.detach().copy_(received)


# -- gradients


@torch.no_grad()
def average(parameters: Sequence[torch.nn.Parameter], kind: str, had_backward: bool) -> None:
    """Give all ranks of a group the mean of their gradients. All of them make the same call.

    A parameter that has a gradient on some ranks only counts as zeros on the others; one that has none on any rank
    keeps none. Those of 16 bits are summed in float32. If no rank `had_backward` since the last time, nothing is done.
    """
    have = [had_backward, *(p.grad is not None for p in parameters)]
    present = torch.tensor(have, dtype=torch.int32, device="cpu")
    distributed.all_reduce(present, group=job.process_group(kind))
    someone, *counts = present.tolist()
    if not someone:
        return
    groups = [list(g) for g in rank_groups(job.ranks().mesh, job.KINDS[kind])]
    ranks = groups, job.process_group(kind)
    for parameter, count in zip(parameters, counts, strict=True):
        if count and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if count and parameter.grad is not None:
            gradient = parameter.grad.float() if parameter.dtype in NARROW else parameter.grad
            parameter.grad.copy_(collectives.summed(gradient, ranks) / len(groups[0]))


def check_dense(named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    """Refuse sparse gradients.

    Raises:
        SMPUnsupportedError: There is one.
    """
    for name, parameter in named:
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise SMPUnsupportedError(
                "sparse gradients are not averaged", leaf=name, hint="Make the embedding with sparse=False."
            )
