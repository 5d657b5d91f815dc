"""Gradients of a distributed model: average over replicas, global norm, and clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch

from neuron_compat.emulated import parallel_state
from neuron_compat.emulated.collectives import MAX, SUM, Groups, get_rank_groups, get_world_groups, reduce_in_place
from xla_ckpt import UsageError
from xla_ckpt.facade import parse_section

Tensor: TypeAlias = torch.Tensor


def param_is_not_shared(param: Tensor) -> bool:
    """Return True if no other pipeline stage has this parameter, too (``param.shared``)."""
    return not getattr(param, "shared", False)


# -- norm and clipping


def get_grad_norm(
    parameters: Iterable[Tensor] | Tensor,
    norm_type: float = 2,
    zero1_optimizer: bool = False,
    zero1_optimizer_groups: Groups | None = None,
    force_spmd: bool = True,
) -> Tensor:
    """Return the norm of the gradients of the whole model, as if they were one vector. Call it on all ranks.

    Each element counts once: a parameter that is replicated on tensor-parallel ranks counts once, and one that is
    ``shared`` with another pipeline stage does not count here.

    Args:
        parameters: This rank's parameters; those without a gradient count as zeros.
        norm_type: Order p of the p-norm, above 0; ``inf`` for the largest absolute value.
        zero1_optimizer: The parameters are the shards of a ZeRO-1 optimizer.
        zero1_optimizer_groups: Groups of ranks over which a parameter is sharded; by default, all ranks of the job.
        force_spmd: True: replicated parameters count with 1/tp on each tensor-parallel rank. False: they count only on
            the first one.

    Returns:
        The norm, of shape [1], in float32, or in float64 if a gradient is.

    Raises:
        xla_ckpt.UsageError: There are no parameters, `norm_type` is not above 0, or groups are given without
            `zero1_optimizer`.
    """
    parameters = _as_list(parameters)
    order = float(norm_type)
    if not parameters:
        raise UsageError("there are no parameters", hint="An iterator is used up once: call model.parameters() again.")
    if not order > 0:
        raise UsageError("norm_type has to be above 0", found=norm_type)
    if zero1_optimizer_groups is not None and not zero1_optimizer:
        raise UsageError("zero1_optimizer_groups= needs zero1_optimizer=True")
    operation = MAX if math.isinf(order) else SUM
    total, experts = sum_gradient_powers(parameters, order, force_spmd)
    everywhere = zero1_optimizer and zero1_optimizer_groups is None
    parts, ranks = ([total, experts], get_world_groups()) if everywhere else ([experts], get_rank_groups("ep"))
    reduce_in_place(parts, ranks, operation)
    total = _combine_norms(total, experts, operation)
    if not everywhere:
        for kind in ("tp", "pp"):
            reduce_in_place([total], get_rank_groups(kind), operation)
        if zero1_optimizer_groups is not None:
            reduce_in_place([total], (zero1_optimizer_groups, None), operation)
    return total if operation == MAX else total.pow(1 / order)


def clip_grad_norm(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float = 2,
    zero1_optimizer: bool = False,
    zero1_optimizer_groups: Groups | None = None,
    force_spmd: bool = True,
) -> Tensor:
    """Scale all gradients down, in place, to a norm of at most `max_norm`; return the norm before scaling.

    See `get_grad_norm` for the other arguments, and for the errors raised.
    """
    parameters = _as_list(parameters)
    norm = get_grad_norm(parameters, norm_type, zero1_optimizer, zero1_optimizer_groups, force_spmd)
    return clip_grads_with_norm(parameters, norm, max_norm)


@torch.no_grad()
def clip_grads_with_norm(parameters: Iterable[Tensor] | Tensor, total_norm: Tensor, max_norm: float) -> Tensor:
    """Scale all gradients, in place, by ``max_norm / (total_norm + 1e-6)`` if it is below 1; return the norm.

    If the norm is NaN, they are unchanged.
    """
    wanted = max_norm / (total_norm.reshape(1) + 1.0e-6)
    scale = torch.where(wanted < 1, wanted, torch.ones_like(wanted))
    for parameter in _as_list(parameters):
        if parameter.grad is not None:
            # Shape [1] keeps its precision: a 0-d tensor would first be rounded to the dtype of the gradient.
            parameter.grad.mul_(scale if parameter.grad.dim() else scale[0])
    return total_norm


def _as_list(parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


@torch.no_grad()
def sum_gradient_powers(parameters: Sequence[Tensor], order: float, force_spmd: bool) -> tuple[Tensor, Tensor]:
    """Return this rank's sums of the gradients' powers (or their maxima), without experts, and of experts."""
    wide = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
    total = torch.zeros(1, dtype=wide, device=parameters[0].device)
    experts = torch.zeros_like(total)
    alike = 1 / parallel_state.get_size("tp")
    if not force_spmd:
        alike = float(parallel_state.get_rank("tp") == 0)
    for parameter in parameters:
        if parameter.grad is None or not parameter.grad.numel() or not param_is_not_shared(parameter):
            continue
        sizes = parameter.grad.detach().to(wide).abs()
        into = experts if getattr(parameter, "expert_model_parallel", False) else total
        if math.isinf(order):
            into.copy_(torch.maximum(into, sizes.max()))
        elif getattr(parameter, "tensor_model_parallel", False):
            counts = count_row_holders(parameter)
            into.add_((sizes.pow(order) if counts is None else divide_rows(sizes.pow(order), counts)).sum())
        elif alike:
            into.add_(sizes.pow(order).sum() * alike)
    return total, experts


def count_row_holders(parameter: Tensor) -> Tensor | None:
    """Return the number of tensor-parallel ranks that hold each row of this rank's shard; None if always one."""
    sections = [parse_section(s) for s in getattr(parameter, "partition_sections", ())]
    if all(s.copies == 1 for s in sections):
        return None
    ranks = parallel_state.get_size("tp")
    rows = [(s.size or 0) * s.copies // ranks for s in sections]
    return torch.cat([torch.full((n,), float(s.copies), device="cpu") for n, s in zip(rows, sections, strict=True)])


def divide_rows(sizes: Tensor, counts: Tensor) -> Tensor:
    """Divide each row by its count."""
    return sizes / counts.reshape(-1, *[1] * (sizes.dim() - 1)).to(device=sizes.device, dtype=sizes.dtype)


def _combine_norms(total: Tensor, experts: Tensor, operation: str) -> Tensor:
    """Return the sum or the maximum of the two, depending on the operation."""
    return torch.maximum(total, experts) if operation == MAX else total + experts


# -- reductions


def bucket_allreduce_gradients(grads_list: Iterable[Tensor], reduce_over_ep_group: bool = False) -> None:
    """Average gradients over all replicas, in place. Call it on all ranks.

    With experts, two calls are needed, as in neuronx-distributed: one for all gradients, which divides by the number of
    data-parallel ranks and sums over the replicas of experts, and one with `reduce_over_ep_group` for those of all
    other parameters, which also sums them over the expert-parallel ranks.
    """
    gradients = list(grads_list)
    size = 1 if reduce_over_ep_group else parallel_state.get_size("dp")
    by_type: dict[torch.dtype, list[Tensor]] = {}
    with torch.no_grad():
        for gradient in gradients:
            if size > 1:
                gradient.div_(size)
            by_type.setdefault(gradient.dtype, []).append(gradient)
        for same_type in by_type.values():
            reduce_in_place(same_type, get_rank_groups("ep" if reduce_over_ep_group else "edp"), SUM)


def allreduce_sequence_parallel_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Sum the gradients of parameters with ``sequence_parallel_enabled`` over the tensor-parallel ranks, in place."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parallel = [p for p in parameters if getattr(p, "sequence_parallel_enabled", False)]
    gradients = [getattr(p, "main_grad", None) if p.grad is None else p.grad for p in parallel]
    with torch.no_grad():
        reduce_in_place([g for g in gradients if g is not None], get_rank_groups("tp"), SUM)
