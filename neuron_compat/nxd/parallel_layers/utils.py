"""neuronx-distributed's ``parallel_layers.utils``: helper functions that scripts call."""

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
    """Raise an error if the numerator is not divisible by the denominator.

    Raises:
        ValueError: It is not divisible.
    """
    if numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """Return the exact quotient of two numbers.

    Raises:
        ValueError: The numerator is not divisible by the denominator.

    >>> divide(12, 4)
    3
    """
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def get_padding_length(numerator: int, denominator: int) -> int:
    """Return the number to add to the numerator to make it divisible by the denominator.

    >>> get_padding_length(13, 4), get_padding_length(12, 4)
    (3, 0)
    """
    return -numerator % denominator


# -- tensors


def split_tensor_along_dim(
    tensor: torch.Tensor, dim: int, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[torch.Tensor]:
    """Split a tensor into equal parts: views, or copies with `contiguous_split_chunks`.

    Raises:
        ValueError: The size is not divisible.
    """
    parts = torch.split(tensor, divide(tensor.shape[dim], num_partitions), dim)
    return tuple(p.contiguous() for p in parts) if contiguous_split_chunks else parts


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[torch.Tensor]:
    """Split a tensor along the last dim (see `split_tensor_along_dim`)."""
    return split_tensor_along_dim(tensor, tensor.dim() - 1, num_partitions, contiguous_split_chunks)


def split_tensor_along_second_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> Sequence[torch.Tensor]:
    """Split a tensor along dim 1 (see `split_tensor_along_dim`)."""
    return split_tensor_along_dim(tensor, 1, num_partitions, contiguous_split_chunks)


def cast_tensor(
    tensor: torch.Tensor, from_dtype: torch.dtype = torch.float32, to_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Cast a tensor of `from_dtype` to `to_dtype`; return others unchanged."""
    return tensor.to(to_dtype) if tensor.dtype == from_dtype else tensor


def cast_all(state: Any, from_dtype: torch.dtype = torch.float32, to_dtype: torch.dtype = torch.bfloat16) -> Any:
    """Apply `cast_tensor` to each tensor in dicts, lists and tuples."""
    return map_tensors(state, lambda tensor: cast_tensor(tensor, from_dtype, to_dtype))


def move_all_tensor_to_cpu(data: Any, convert: bool = True) -> Any:
    """Return the same dicts, lists and tuples with their XLA tensors on the CPU.

    All of them are computed first, in one graph. With ``convert=False``, they are only computed.
    """
    compute(collect_xla_tensors(data))
    return map_tensors(data, lambda t: t.cpu() if t.device.type == "xla" else t) if convert else data


# -- runtime environment


def get_local_world_size() -> int:
    """Return the number of ranks of this job on this host."""
    import torch_xla.runtime as xr

    size: int = xr.local_process_count()
    return size


def is_torch_version_greater_than_2() -> bool:
    """Return True, because this library needs torch 2.9 or newer."""
    return True


def is_pjrt_device() -> bool:
    """Return True if the program runs on Trainium (PJRT_DEVICE=NEURON), False on CPUs."""
    return os.environ.get("PJRT_DEVICE") == "NEURON"


def requires_init_pg_override() -> bool:
    """Return False, because only torch 2.0 needs another ``init_method``."""
    return False
