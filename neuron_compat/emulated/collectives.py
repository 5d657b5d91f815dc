"""Collectives over rank groups, and autograd functions for tensor-parallel regions.

Tensors on XLA devices use torch_xla's collectives (under `neuron_compat.emulate()` these reach all processes), others
the process groups of `parallel_state`. Each region function runs one collective forward and its counterpart backward.
A separate region sums the gradients of weights that are copied on several ranks. With one rank they do nothing.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from neuron_compat.emulated import parallel_state
from neuron_compat.emulation import gather_tensors
from xla_ckpt import UsageError

Groups: TypeAlias = list[list[int]]

SUM, MAX = "sum", "max"

RankGroups: TypeAlias = tuple[Groups | None, Any]
"""XLA's replica groups (None: one group of all ranks), and this rank's process group (None if it has none)."""


def get_rank_groups(kind: str) -> RankGroups:
    """Return the groups of a kind: ``tp``, ``pp``, ``ep``, ``edp``, or ``kv`` (the same keys and values)."""
    groups = parallel_state.get_replica_groups(kind)
    return groups, None if len(groups[0]) == 1 else parallel_state.get_process_group(kind)


def get_world_groups() -> RankGroups:
    """Return the group of all ranks."""
    distributed: Any = torch.distributed
    return None, distributed.group.WORLD if distributed.is_initialized() else None


def sum_over_ranks(value: torch.Tensor, rank_groups: RankGroups, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the sum over the ranks of a group, computed in `dtype`, in the dtype of `value`."""
    total = value.detach().to(dtype or value.dtype, copy=True, memory_format=torch.contiguous_format)
    reduce_in_place([total], rank_groups, SUM)
    return total.to(value.dtype)


def reduce_in_place(values: list[torch.Tensor], rank_groups: RankGroups, operation: str) -> None:
    """Reduce tensors over the ranks of a group, in place."""
    groups, process_group = rank_groups
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


Tensor: TypeAlias = torch.Tensor


def _get_tp_size() -> int:
    """Return the number of tensor-parallel ranks."""
    return parallel_state.get_size("tp")


def _gather_along_dim(value: Tensor, dim: int) -> Tensor:
    """Concatenate the values of all ranks of the group along `dim`."""
    if _get_tp_size() == 1:
        return value
    if value.device.type == "xla":
        import torch_xla.core.xla_model as xm

        groups = parallel_state.get_replica_groups("tp")
        whole: Tensor = xm.all_gather(value, dim=dim % value.dim(), groups=groups, pin_layout=False)
        return whole
    return torch.cat(gather_tensors(value, parallel_state.get_process_group("tp")), dim)


def _get_own_chunk(value: Tensor, dim: int) -> Tensor:
    """Return this rank's chunk of a value along `dim`."""
    size = _get_tp_size()
    if value.shape[dim] % size:
        raise ValueError(f"dim {dim} of {list(value.shape)} does not divide into {size} tensor-parallel parts")
    return value.chunk(size, dim)[parallel_state.get_rank("tp")].contiguous()


class _CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, dtype: torch.dtype | None, kind: str) -> Tensor:
        ctx.dtype, ctx.kind = dtype, kind
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return sum_over_ranks(gradients[0], get_rank_groups(ctx.kind), ctx.dtype), None, None


class _ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, value: Tensor, dtype: torch.dtype | None) -> Tensor:
        return sum_over_ranks(value, get_rank_groups("tp"), dtype)

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class _GatherFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return _gather_along_dim(value, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _get_own_chunk(gradients[0], ctx.dim), None


class _ScatterToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return _get_own_chunk(value, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _gather_along_dim(gradients[0], ctx.dim), None


def _apply_function(function: Any, value: Tensor, *arguments: Any) -> Tensor:
    """Apply an autograd function of this module; with one tensor-parallel rank, return the value unchanged."""
    if _get_tp_size() == 1:
        return value
    output: Tensor = function.apply(value, *arguments)
    return output


def copy_to_tensor_model_parallel_region(input_: Tensor, reduce_dtype: torch.dtype | None = None) -> Tensor:
    """Return the same value; its gradients are summed over the group, in `reduce_dtype` if it is given."""
    return _apply_function(_CopyToRegion, input_, reduce_dtype, "tp")


def copy_to_kv_shared_region(weight: Tensor, reduce_dtype: torch.dtype | None = None) -> Tensor:
    """Return the same weight; its gradients are summed over the ranks that hold copies, so that these stay equal.

    The gradient of the input is unchanged: the gradient of each rank counts once.
    """
    return _apply_function(_CopyToRegion, weight, reduce_dtype, "kv")


def reduce_from_tensor_model_parallel_region(input_: Tensor, reduce_dtype: torch.dtype | None = None) -> Tensor:
    """Return the sum over the group, computed in `reduce_dtype` if it is given; its gradient is passed on unchanged."""
    return _apply_function(_ReduceFromRegion, input_, reduce_dtype)


def gather_from_tensor_model_parallel_region(input_: Tensor, dim: int = -1) -> Tensor:
    """Concatenate the parts of all ranks along `dim`; each rank gets the gradient of its part."""
    return _apply_function(_GatherFromRegion, input_, dim)


def scatter_to_tensor_model_parallel_region(input_: Tensor, dim: int = -1) -> Tensor:
    """Return this rank's part along `dim`; the gradients of all parts are concatenated.

    Raises:
        ValueError: The size is not divisible into equal parts.
    """
    return _apply_function(_ScatterToRegion, input_, dim)
