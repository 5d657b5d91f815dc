"""neuronx-distributed's ``parallel_layers.utils``: small functions that scripts call."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from neuron_compat.nxd.exports import attach_exports
from xla_ckpt.facade import collect_xla_tensors, compute, map_tensors

__getattr__, __dir__ = attach_exports(__name__)


# -- numbers


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Refuse a number that another one does not divide.

    Raises:
        ValueError: It does not.
    """
    if numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """The quotient of two numbers.

    Raises:
        ValueError: There is a rest.

    >>> divide(12, 4)
    3
    """
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def get_padding_length(numerator: int, denominator: int) -> int:
    """What to add to a number so that another one divides it.

    >>> get_padding_length(13, 4), get_padding_length(12, 4)
    (3, 0)
    """
    return -numerator % denominator


# -- tensors


def split_tensor_along_dim(
    tensor: torch.Tensor, dim: int, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[torch.Tensor]:
    """A tensor in equal parts: views, or copies with `contiguous_split_chunks`.

    Raises:
        ValueError: It does not divide.
    """
    parts = torch.split(tensor, divide(tensor.shape[dim], num_partitions), dim)
    return tuple(p.contiguous() for p in parts) if contiguous_split_chunks else parts


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[torch.Tensor]:
    """`split_tensor_along_dim` of the last one."""
    return split_tensor_along_dim(tensor, tensor.dim() - 1, num_partitions, contiguous_split_chunks)


def split_tensor_along_second_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[torch.Tensor]:
    """`split_tensor_along_dim` of dim 1."""
    return split_tensor_along_dim(tensor, 1, num_partitions, contiguous_split_chunks)


def cast_tensor(
    tensor: torch.Tensor, from_dtype: torch.dtype = torch.float32, to_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """A tensor of `from_dtype` as `to_dtype`; any other as it is."""
    return tensor.to(to_dtype) if tensor.dtype == from_dtype else tensor


def cast_all(state: Any, from_dtype: torch.dtype = torch.float32, to_dtype: torch.dtype = torch.bfloat16) -> Any:
    """`cast_tensor` of each tensor in dicts, lists and tuples."""
    return map_tensors(state, lambda tensor: cast_tensor(tensor, from_dtype, to_dtype))


def move_all_tensor_to_cpu(data: Any, convert: bool = True) -> Any:
    """The same dicts, lists and tuples with the XLA tensors in them on the CPU.

    All of them are computed first, in one graph. With ``convert=False`` nothing else is done.
    """
    compute(collect_xla_tensors(data))
    return map_tensors(data, lambda t: t.cpu() if t.device.type == "xla" else t) if convert else data


# -- where the program runs


def get_local_world_size() -> int:
    """Number of ranks of this job on this host."""
    import torch_xla.runtime as xr

    size: int = xr.local_process_count()
    return size


def is_torch_version_greater_than_2() -> bool:
    """True: this library needs torch 2.9 or newer."""
    return True


def is_pjrt_device() -> bool:
    """Whether the program runs on Trainium (PJRT_DEVICE=NEURON): False on CPUs."""
    return os.environ.get("PJRT_DEVICE") == "NEURON"


def requires_init_pg_override() -> bool:
    """False: only torch 2.0 needs another ``init_method``."""
    return False
