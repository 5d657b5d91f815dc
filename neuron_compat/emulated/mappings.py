"""In and out of tensor-parallel regions: a collective forward, its counterpart backward.

Weights that several ranks hold copies of have a region of their own, in which the gradients of the copies are summed.

XLA tensors go through torch_xla's collectives (under `neuron_compat.emulate()` these reach all processes), others
through the process group. With one tensor-parallel rank nothing is done.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from neuron_compat.emulated import collectives, parallel_state
from neuron_compat.emulated.process_group import gathered

Tensor: TypeAlias = torch.Tensor


def _size() -> int:
    """The number of tensor-parallel ranks."""
    return parallel_state.size("tp")


def _gathered(value: Tensor, dim: int) -> Tensor:
    """The values of all ranks of the group, one after the other along `dim`."""
    if _size() == 1:
        return value
    if value.device.type == "xla":
        import torch_xla.core.xla_model as xm

        groups = parallel_state.replica_groups("tp")
        whole: Tensor = xm.all_gather(value, dim=dim % value.dim(), groups=groups, pin_layout=False)
        return whole
    return torch.cat(gathered(value, parallel_state.process_group("tp")), dim)


def _own(value: Tensor, dim: int) -> Tensor:
    """This rank's part of a value along `dim`."""
    size = _size()
    if value.shape[dim] % size:
        raise ValueError(f"dim {dim} of {list(value.shape)} does not divide into {size} tensor-parallel parts")
    return value.chunk(size, dim)[parallel_state.rank("tp")].contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, dtype: torch.dtype | None, kind: str) -> Tensor:
        ctx.dtype, ctx.kind = dtype, kind
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return collectives.summed(gradients[0], collectives.ranks_of(ctx.kind), ctx.dtype), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, value: Tensor, dtype: torch.dtype | None) -> Tensor:
        return collectives.summed(value, collectives.ranks_of("tp"), dtype)

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return _gathered(value, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _own(gradients[0], ctx.dim), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return _own(value, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _gathered(gradients[0], ctx.dim), None


def _apply(function: Any, value: Tensor, *arguments: Any) -> Tensor:
    """What a function of this module makes of a value; with one tensor-parallel rank the value itself."""
    if _size() == 1:
        return value
    output: Tensor = function.apply(value, *arguments)
    return output


def copy_to_tensor_model_parallel_region(input_: Tensor, reduce_dtype: torch.dtype | None = None) -> Tensor:
    """The same value; its gradients are summed over the group, in `reduce_dtype` if one is given."""
    return _apply(_Copy, input_, reduce_dtype, "tp")


def copy_to_kv_shared_region(weight: Tensor, reduce_dtype: torch.dtype | None = None) -> Tensor:
    """The same weight; its gradients are summed over the ranks that hold copies of it, which thus stay equal.

    The gradient of what is multiplied by the weight is not touched: each rank's counts once.
    """
    return _apply(_Copy, weight, reduce_dtype, "kv")


def reduce_from_tensor_model_parallel_region(input_: Tensor, reduce_dtype: torch.dtype | None = None) -> Tensor:
    """The sum over the group, made in `reduce_dtype` if one is given; its gradient goes to each rank as it is."""
    return _apply(_Reduce, input_, reduce_dtype)


def gather_from_tensor_model_parallel_region(input_: Tensor, dim: int = -1) -> Tensor:
    """The parts of all ranks, joined along `dim`; each rank gets the gradient of its part."""
    return _apply(_Gather, input_, dim)


def scatter_to_tensor_model_parallel_region(input_: Tensor, dim: int = -1) -> Tensor:
    """This rank's part along `dim`; the gradients of all parts are joined.

    Raises:
        ValueError: It does not divide into equal parts.
    """
    return _apply(_Scatter, input_, dim)
