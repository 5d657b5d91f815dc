"""Training in 16 bits: an optimizer steps float32 copies of the parameters (master weights), and scales the loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from neuron_compat.emulated import collectives, grads
from neuron_compat.emulated.smp.loss_scale import DynamicLossScaler, Scaler
from neuron_compat.smp import job

distributed: Any = torch.distributed

NARROW = (torch.float16, torch.bfloat16)


class MasterWeights:
    """The master weights of an optimizer's 16-bit parameters, which take their place in its groups.

    Attributes:
        pairs: (parameter, its master weight), group by group.
        overflow: Whether the gradients of the last step had an overflow: then the optimizer does not step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Scaler) -> None:
        self.scaler = scaler
        self.overflow = False
        self.used_scale = scaler.loss_scale
        self.pairs: list[list[tuple[torch.nn.Parameter, torch.nn.Parameter]]] = []
        for group in optimizer.param_groups:
            self.pairs.append([])
            for number, parameter in enumerate(group["params"]):
                if parameter.dtype not in NARROW:
                    continue
                master = torch.nn.Parameter(parameter.detach().float(), parameter.requires_grad)
                vars(master).update(vars(parameter))  # how it is split
                group["params"][number] = master
                if parameter in optimizer.state:
                    optimizer.state[master] = optimizer.state.pop(parameter)
                self.pairs[-1].append((parameter, master))

    def __iter__(self) -> Iterator[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        return (pair for group in self.pairs for pair in group)

    @torch.no_grad()
    def take_gradients(self, others: Sequence[torch.nn.Parameter]) -> None:
        """Give the master weights the gradients of their parameters, without the loss scale.

        Args:
            others: Parameters of the optimizer that have no master weight: their gradients are scaled, too.
        """
        self.used_scale = self.scaler.loss_scale
        gradients = [p.grad for p, _ in self if p.grad is not None] + [p.grad for p in others if p.grad is not None]
        # As in SMP, nobody looks for an overflow where nothing would follow from it.
        follows = isinstance(self.scaler, DynamicLossScaler)
        self.overflow = follows and any_rank(any(not bool(torch.isfinite(g).all()) for g in gradients))
        self.scaler.update_scale(self.overflow)
        for narrow, master in self:
            master.grad = None if narrow.grad is None or self.overflow else narrow.grad.float() / self.used_scale

    @torch.no_grad()
    def give_weights(self) -> None:
        """Give the parameters the values of their master weights."""
        for narrow, master in self:
            narrow.copy_(master)

    @torch.no_grad()
    def take_weights(self) -> None:
        """Give the master weights the values of their parameters, after a load of the model."""
        for narrow, master in self:
            master.copy_(narrow)

    def forget_gradients(self) -> None:
        """Remove the gradients of parameters and master weights."""
        for pair in self:
            for parameter in pair:
                parameter.grad = None


def masters_of(optimizer: Any) -> MasterWeights | None:
    """The master weights of a `DistributedOptimizer`; None if it has none, or is none."""
    masters: MasterWeights | None = getattr(getattr(optimizer, "_smp", None), "masters", None)
    return masters


def any_rank(here: bool) -> bool:
    """Whether something is so on any rank of the job. All of them make the same call."""
    if job.size() == 1:
        return here
    said = torch.tensor([here], dtype=torch.int32, device="cpu")
    distributed.all_reduce(said, op=distributed.ReduceOp.MAX, group=job.process_group("world"))
    return bool(said.item())


@torch.no_grad()
def clip(parameters: Sequence[torch.nn.Parameter], max_norm: float, norm_type: float = 2.0) -> float:
    """Scale gradients down so that their norm, over the whole model, is `max_norm` at most; the norm before.

    What is split counts on each tensor-parallel rank, all else once.
    """
    total, _ = grads.own_part(parameters, norm_type, force_spmd=True)
    infinite = math.isinf(norm_type)
    collectives.reduce_in_place([total], collectives.ranks_of("tp"), collectives.MAX if infinite else collectives.SUM)
    norm = total if infinite else total.pow(1 / norm_type)
    return float(grads.clip_grads_with_norm(parameters, norm, max_norm))
