"""Parameters that are one rank's part of a larger one: how they are cut, and how they say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from neuron_compat.emulated import parallel_state
from neuron_compat.emulated.moving import preserve_parallel_attributes

Device: TypeAlias = torch.device | str | None

ATTRIBUTES = (
    "tensor_model_parallel",
    "partition_dim",
    "partition_stride",
    "num_partitions",
    "unpadded_shape",
    "partition_sections",
)
"""What a parameter carries. `xla_ckpt` reads them; ``unpadded_shape`` is the true shape of one that is padded.

``partition_sections`` are sections of different sizes, or such that several ranks hold, as a rule spells them:
``[4096, "1024x4", "1024x4"]`` are the rows of fused queries, keys and values, of which 4 ranks hold the same keys and
values.
"""


_DEFAULTS = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}
"""What a parameter says that is not split."""


def padding(size: int, parts: int, stride: int, pad: bool, what: str) -> int:
    """Elements to add to `size` so that it divides into `parts`.

    Raises:
        ValueError: It does not divide, and `pad` is False, or padding would go into every strided block.

    >>> padding(10, 4, 1, True, "num_embeddings"), padding(12, 4, 1, False, "num_embeddings")
    (2, 0)
    """
    missing = -size % (parts * stride)
    if missing and not pad:
        raise ValueError(f"{what}={size} does not divide into {parts} tensor-parallel parts of {stride} blocks")
    if missing and stride > 1:
        raise ValueError(f"{what}={size} would need padding in each of its {stride} blocks, which is not supported")
    return missing


def true_device(device: Device) -> torch.device:
    """The device that a tensor would be made on."""
    return torch.empty(0, device=device).device


def part_of(full: torch.Tensor, dim: int, stride: int, missing: int) -> torch.Tensor:
    """This rank's part of a whole value: padded with zeros at the end, then every tp-th block."""
    parts, rank = parallel_state.size("tp"), parallel_state.rank("tp")
    if missing:
        shape = list(full.shape)
        shape[dim] = missing
        full = torch.cat([full, full.new_zeros(shape)], dim)
    blocks = full.chunk(parts * stride, dim)
    return torch.cat([blocks[rank + i * parts] for i in range(stride)], dim)


def set_tensor_model_parallel_attributes(
    tensor: torch.Tensor, is_parallel: bool, dim: int, stride: int = 1, num_partitions: int | None = None
) -> None:
    """Have a parameter say how it is split; `num_partitions` is the tensor-parallel size by default."""
    parts = parallel_state.size("tp") if num_partitions is None else num_partitions
    for name, value in zip(ATTRIBUTES, (is_parallel, dim, stride, parts), strict=False):
        setattr(tensor, name, value)


def param_is_not_tensor_parallel_duplicate(param: torch.Tensor) -> bool:
    """Whether this rank counts for a parameter: it has a part of its own, or is the first that has all of it."""
    return bool(getattr(param, "tensor_model_parallel", False)) or parallel_state.rank("tp") == 0


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: torch.Tensor) -> None:
    """Have a parameter that says nothing say that it is not split."""
    for name, value in _DEFAULTS.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(destination_tensor: torch.Tensor, source_tensor: torch.Tensor) -> None:
    """Have a parameter say of its split what another one says."""
    for name in _DEFAULTS:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def parallel_parameter(
    full: torch.Tensor, dim: int, stride: int, missing: int, device: torch.device, dtype: torch.dtype
) -> torch.nn.Parameter:
    """This rank's part of a whole value, as a parameter with its attributes."""
    if full.device.type == "meta":
        shape = list(full.shape)
        shape[dim] = (shape[dim] + missing) // parallel_state.size("tp")
        value = torch.empty(shape, dtype=dtype, device="meta")
    else:
        value = part_of(full, dim, stride, missing).to(dtype).to(device)
    parameter = torch.nn.Parameter(value)
    set_tensor_model_parallel_attributes(parameter, True, dim, stride)
    if missing:
        parameter.unpadded_shape = tuple(full.shape)  # type: ignore[attr-defined]
    return parameter


class PartitionedModule(torch.nn.Module):
    """A module whose parameters keep their attributes on the way to another device or dtype.

    torch makes new parameters on the way from the CPU to XLA, and would leave the attributes behind.
    """

    weight: torch.nn.Parameter
    pad_size: int

    def draw(self, whole: torch.Tensor) -> None:
        """Fill a whole weight with initial values."""
        raise NotImplementedError

    @torch.no_grad()
    def init_weight_cpu(self) -> None:
        """Draw the weight anew: what ``param_init_fn`` of a model from the meta device calls, as in NxD.

        With the same seed on all ranks it is a part of the same whole weight on each of them, as in the constructor.
        """
        said: Any = self.weight
        dim, stride = said.partition_dim, said.partition_stride
        shape = list(self.weight.shape)
        shape[dim] = shape[dim] * parallel_state.size("tp") - self.pad_size
        whole = torch.empty(shape, device="cpu")
        self.draw(whole)
        self.weight.copy_(part_of(whole, dim, stride, self.pad_size))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PartitionedModule:
        with preserve_parallel_attributes(self):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self
