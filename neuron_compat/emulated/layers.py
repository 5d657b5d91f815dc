"""Tensor-parallel layers, their parameters, and the loss, with neuronx-distributed's names and arguments.

Full weights are initialized on the CPU, and then sharded: with the same seed on all ranks they equal the weights of
`torch.nn.Linear` and `torch.nn.Embedding` after that seed, for any number of ranks and any device. Attributes of each
parameter record how it is sharded.

Sequence parallelism, and groups other than the tensor-parallel one, are unsupported and raise an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from neuron_compat.emulated import collectives, parallel_state
from neuron_compat.emulated.collectives import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from neuron_compat.emulated.model_utils import preserve_parallel_attributes
from neuron_compat.nxd.exports import SEQUENCE_PARALLEL_HINT
from xla_ckpt import UsageError

Device: TypeAlias = torch.device | str | None

ATTRIBUTES = (
    "tensor_model_parallel",
    "partition_dim",
    "partition_stride",
    "num_partitions",
    "unpadded_shape",
    "partition_sections",
)
"""Attributes of a sharded parameter. `xla_ckpt` reads them; ``unpadded_shape`` is the true shape of a padded parameter.

``partition_sections`` are sections of different sizes, or sections that several ranks hold, in the syntax of rules:
``[4096, "1024x4", "1024x4"]`` are the rows of fused queries, keys and values, where 4 ranks hold the same keys and
values.
"""


_DEFAULTS = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}
"""Attribute values of an unsharded parameter."""


def compute_padding(size: int, parts: int, stride: int, pad: bool, what: str) -> int:
    """Return the number of elements to add to `size` to make it divisible by `parts`.

    Raises:
        ValueError: It is not divisible, and `pad` is False, or padding would go into every strided block.

    >>> compute_padding(10, 4, 1, True, "num_embeddings"), compute_padding(12, 4, 1, False, "num_embeddings")
    (2, 0)
    """
    missing = -size % (parts * stride)
    if missing and not pad:
        raise ValueError(f"{what}={size} does not divide into {parts} tensor-parallel parts of {stride} blocks")
    if missing and stride > 1:
        raise ValueError(f"{what}={size} would need padding in each of its {stride} blocks, which is not supported")
    return missing


def resolve_device(device: Device) -> torch.device:
    """Return the device on which a tensor would be created."""
    return torch.empty(0, device=device).device


def cut_own_part(full: torch.Tensor, dim: int, stride: int, pad_size: int) -> torch.Tensor:
    """Return this rank's shard of a full value: padded with zeros at the end, then every tp-th block."""
    parts, rank = parallel_state.get_size("tp"), parallel_state.get_rank("tp")
    if pad_size:
        shape = list(full.shape)
        shape[dim] = pad_size
        full = torch.cat([full, full.new_zeros(shape)], dim)
    blocks = full.chunk(parts * stride, dim)
    return torch.cat([blocks[rank + i * parts] for i in range(stride)], dim)


def set_tensor_model_parallel_attributes(
    tensor: torch.Tensor, is_parallel: bool, dim: int, stride: int = 1, num_partitions: int | None = None
) -> None:
    """Set the sharding attributes of a parameter; `num_partitions` is the tensor-parallel size by default."""
    parts = parallel_state.get_size("tp") if num_partitions is None else num_partitions
    for name, value in zip(ATTRIBUTES, (is_parallel, dim, stride, parts), strict=False):
        setattr(tensor, name, value)


def param_is_not_tensor_parallel_duplicate(param: torch.Tensor) -> bool:
    """Return True if this rank holds a shard of the parameter, or is the first rank that holds the full parameter."""
    return bool(getattr(param, "tensor_model_parallel", False)) or parallel_state.get_rank("tp") == 0


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: torch.Tensor) -> None:
    """Set missing sharding attributes of a parameter to their defaults for unsharded ones."""
    for name, value in _DEFAULTS.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(destination_tensor: torch.Tensor, source_tensor: torch.Tensor) -> None:
    """Copy the sharding attributes of a parameter to another one."""
    for name in _DEFAULTS:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def create_parallel_parameter(
    full: torch.Tensor, dim: int, stride: int, pad_size: int, device: torch.device, dtype: torch.dtype
) -> torch.nn.Parameter:
    """Return this rank's shard of a full value, as a parameter with sharding attributes."""
    if full.device.type == "meta":
        shape = list(full.shape)
        shape[dim] = (shape[dim] + pad_size) // parallel_state.get_size("tp")
        value = torch.empty(shape, dtype=dtype, device="meta")
    else:
        value = cut_own_part(full, dim, stride, pad_size).to(dtype).to(device)
    parameter = torch.nn.Parameter(value)
    set_tensor_model_parallel_attributes(parameter, True, dim, stride)
    if pad_size:
        parameter.unpadded_shape = tuple(full.shape)  # type: ignore[attr-defined]
    return parameter


class PartitionedModule(torch.nn.Module):
    """Module whose parameters keep their attributes when it is moved to another device or dtype.

    torch creates new parameters for the move from the CPU to XLA, and would drop the attributes.
    """

    weight: torch.nn.Parameter
    pad_size: int

    def fill_weight(self, whole: torch.Tensor) -> None:
        """Fill a full weight with initial values."""
        raise NotImplementedError

    @torch.no_grad()
    def init_weight_cpu(self) -> None:
        """Initialize the weight again. ``param_init_fn`` of a model from the meta device calls it, as in NxD.

        With the same seed on all ranks, each rank gets its shard of the same full weight, as in the constructor.
        """
        said: Any = self.weight
        dim, stride = said.partition_dim, said.partition_stride
        shape = list(self.weight.shape)
        shape[dim] = shape[dim] * parallel_state.get_size("tp") - self.pad_size
        whole = torch.empty(shape, device="cpu")
        self.fill_weight(whole)
        self.weight.copy_(cut_own_part(whole, dim, stride, self.pad_size))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PartitionedModule:
        with preserve_parallel_attributes(self):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


InitMethod = Callable[[torch.Tensor], Any]


def check_supported(sequence_parallel: bool, group: Any = None) -> None:
    """Raise an error for unsupported features.

    Raises:
        xla_ckpt.UsageError: Sequence parallelism, or a group other than `parallel_state`'s, is requested.
    """
    if sequence_parallel:
        raise UsageError("sequence_parallel_enabled=True is not there", hint=SEQUENCE_PARALLEL_HINT)
    if group is not None and group is not parallel_state.get_process_group("tp"):
        raise UsageError("a tensor_model_parallel_group other than parallel_state's is not supported")


def draw_weight(weight: torch.Tensor, init_method: InitMethod | None) -> None:
    """Initialize a weight with `init_method`, or as `torch.nn.Linear` does if it is None."""
    if init_method is None:
        torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    else:
        init_method(weight)


def draw_linear(
    sizes: tuple[int, int], bias: bool, init_method: InitMethod | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return weight [out, in] and bias [out] of an unsharded layer of (in, out), initialized as in `torch.nn.Linear`.

    They are drawn in float32 on the CPU for all devices except the meta device.
    """
    inputs, outputs = sizes
    where = "meta" if device.type == "meta" else "cpu"
    weight = torch.empty(outputs, inputs, device=where)
    drawn = torch.empty(outputs, device=where) if bias else None
    with torch.no_grad():
        draw_weight(weight, init_method)
        if drawn is not None:
            bound = 1 / math.sqrt(inputs) if inputs else 0.0
            torch.nn.init.uniform_(drawn, -bound, bound)
    return weight, drawn


class _ParallelLinear(PartitionedModule):
    """Base class of the two linear layers. Both accept the arguments after `device` by keyword.

    Args:
        sizes: Sizes of the inputs and the outputs.
        dim: Sharded dim of the weight: 0 for the outputs, 1 for the inputs.
        splits_bias: True shards the bias, too.
        stride: Number of blocks of the weight that a rank holds, every tp-th one, instead of contiguous rows or
            columns.
        init_method: Initializes the full weight; by default as `torch.nn.Linear` does.
        sequence_parallel_enabled: Must be False.
        sequence_dimension: Without effect.
        keep_master_weight: Keep the full weight as ``master_weight``.
        skip_bias_add: Return a pair of the output and the bias.
        pad: Pad a size that is not divisible with zeros; the parameter's ``unpadded_shape`` is the true shape.
        tensor_model_parallel_group: Must be the group of `parallel_state`.
        reduce_dtype: Dtype of sums over ranks.
    """

    def __init__(
        self,
        sizes: tuple[int, int],
        dim: int,
        splits_bias: bool,
        bias: bool,
        dtype: torch.dtype,
        device: Device,
        *,
        stride: int = 1,
        init_method: InitMethod | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,  # neuronx-distributed's signature
        keep_master_weight: bool = False,
        skip_bias_add: bool = False,
        pad: bool = False,
        tensor_model_parallel_group: Any = None,
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        check_supported(sequence_parallel_enabled, tensor_model_parallel_group)
        super().__init__()
        self.input_size, self.output_size = sizes
        self.add_bias = bias
        self.dtype = dtype
        self.device = resolve_device(device)
        self.stride = stride
        self.arg_init_method = init_method
        self.keep_master_weight = keep_master_weight
        self.skip_bias_add = skip_bias_add
        self.pad = pad
        self.reduce_dtype = reduce_dtype
        self.master_weight: torch.Tensor | None = None
        split = ("output_size", "input_size")[dim]
        self.pad_size = compute_padding(getattr(self, split), parallel_state.get_size("tp"), stride, pad, split)
        weight, whole_bias = draw_linear(sizes, bias, self.fill_weight, self.device)
        self.weight = create_parallel_parameter(weight, dim, stride, self.pad_size, self.device, dtype)
        setattr(self, split, getattr(self, split) + self.pad_size)
        setattr(self, f"{split}_per_partition", self.weight.shape[dim])
        if whole_bias is None:
            self.register_parameter("bias", None)
        elif splits_bias:
            self.bias = create_parallel_parameter(whole_bias, 0, stride, self.pad_size, self.device, dtype)
        else:
            self.bias = torch.nn.Parameter(whole_bias.to(dtype).to(self.device))

    def fill_weight(self, whole: torch.Tensor) -> None:
        draw_weight(whole, self.arg_init_method)
        if self.keep_master_weight:
            self.master_weight = whole.to(self.dtype)

    def _add_bias(self, output: torch.Tensor) -> Any:
        """Return the output plus the bias; with `skip_bias_add`, return both."""
        bias: Any = self.bias
        if self.skip_bias_add:
            return output, bias
        return output if bias is None else output + bias


class ColumnParallelLinear(_ParallelLinear):
    """Linear layer with sharded outputs: every rank holds rows of the weight (dim 0).

    The bias is sharded, too, unless `gather_output` is True, which concatenates the outputs of all ranks. `options` are
    neuronx-distributed's other arguments, see `_ParallelLinear`.

    Raises:
        ValueError: `output_size` is not divisible by the tensor-parallel size, and `pad` is False.
        xla_ckpt.UsageError: An argument requests an unsupported feature.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: Device = None,
        **options: Any,
    ) -> None:
        super().__init__((input_size, output_size), 0, not gather_output, bias, dtype, device, **options)
        self.gather_output = gather_output

    def forward(self, input: torch.Tensor, *_: Any) -> Any:  # noqa: A002  # neuronx-distributed's name
        """Return the full output or this rank's part of it; with `skip_bias_add`, a pair of it and the bias."""
        entered = copy_to_tensor_model_parallel_region(input, self.reduce_dtype)
        output = functional.linear(entered, self.weight)
        if self.gather_output:
            output = gather_from_tensor_model_parallel_region(output)
            output = self._restore_order(output).narrow(-1, 0, self.output_size - self.pad_size)
        return self._add_bias(output)

    def _restore_order(self, output: torch.Tensor) -> torch.Tensor:
        """Reorder gathered outputs as in the full weight, because ranks hold every tp-th block of a strided one."""
        if self.stride == 1:
            return output
        parts = self.output_size // self.weight.shape[0]
        blocks = output.reshape(*output.shape[:-1], parts, self.stride, -1)
        return blocks.transpose(-3, -2).reshape(output.shape)


class RowParallelLinear(_ParallelLinear):
    """Linear layer with sharded inputs: every rank holds columns of the weight (dim 1), and the bias.

    Outputs are summed over the ranks, unless `reduce_output` is False. `options` are neuronx-distributed's other
    arguments, see `_ParallelLinear`.

    Raises:
        ValueError: `input_size` is not divisible by the tensor-parallel size, and `pad` is False.
        xla_ckpt.UsageError: An argument requests an unsupported feature.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        dtype: torch.dtype = torch.float32,
        device: Device = None,
        *,
        reduce_output: bool = True,
        **options: Any,
    ) -> None:
        if options.get("stride", 1) > 1 and not input_is_parallel:
            raise UsageError("a strided RowParallelLinear needs input_is_parallel=True")
        super().__init__((input_size, output_size), 1, False, bias, dtype, device, **options)
        self.input_is_parallel = input_is_parallel
        self.reduce_output = reduce_output

    def forward(self, input_: torch.Tensor) -> Any:
        """Return the output, on all ranks; with `skip_bias_add`, a pair of it and the bias."""
        if not self.input_is_parallel:
            padded = functional.pad(input_, (0, self.pad_size)) if self.pad_size else input_
            input_ = scatter_to_tensor_model_parallel_region(padded)
        output = functional.linear(input_, self.weight)
        if self.reduce_output:
            output = reduce_from_tensor_model_parallel_region(output, self.reduce_dtype)
        return self._add_bias(output)


class ParallelEmbedding(PartitionedModule):
    """Embedding whose rows (the vocabulary) are sharded, or its columns with `shard_across_embedding`.

    With `pad`, a size that is not divisible is padded with zeros, and the parameter's ``unpadded_shape`` is the true
    shape, so that checkpoints do not contain the padding.

    Raises:
        ValueError: The sharded size is not divisible by the tensor-parallel size, and `pad` is False.
        xla_ckpt.UsageError: An argument requests an unsupported feature.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        init_method: InitMethod = torch.nn.init.normal_,
        device: Device = None,
        dtype: torch.dtype = torch.float32,
        shard_across_embedding: bool = False,
        pad: bool = False,
        sequence_parallel_enabled: bool = False,
        tensor_model_parallel_group: Any = None,
        use_spmd_rank: bool = False,
    ) -> None:
        check_supported(sequence_parallel_enabled, tensor_model_parallel_group)
        if max_norm is not None or use_spmd_rank:
            raise UsageError("max_norm and use_spmd_rank are not there yet")
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.max_norm, self.norm_type = max_norm, norm_type
        self.scale_grad_by_freq, self.sparse = scale_grad_by_freq, sparse
        self.init_method, self.dtype = init_method, dtype
        self.shard_across_embedding, self.pad, self.stride = shard_across_embedding, pad, 1
        self.tensor_model_parallel_size = parts = parallel_state.get_size("tp")
        if scale_grad_by_freq and parts > 1 and not shard_across_embedding:
            raise UsageError("scale_grad_by_freq is not there yet where the vocabulary is split")
        self.weight_partition_dim = dim = 1 if shard_across_embedding else 0
        split = ("num_embeddings", "embedding_dim")[dim]
        self.pad_size = compute_padding(getattr(self, split), parts, 1, pad, split)
        where = resolve_device(device)
        full = torch.empty(num_embeddings, embedding_dim, device="meta" if where.type == "meta" else "cpu")
        self.whole_padding_idx = padding_idx
        with torch.no_grad():
            self.fill_weight(full)
        setattr(self, split, getattr(self, split) + self.pad_size)
        self.weight = create_parallel_parameter(full, dim, 1, self.pad_size, where, dtype)
        self.num_embeddings_per_partition, self.embedding_dim_per_partition = self.weight.shape
        rows = self.num_embeddings_per_partition
        first = 0 if shard_across_embedding else rows * parallel_state.get_rank("tp")
        self.start_index, self.end_index = first, first + rows
        index = padding_idx if padding_idx is None or padding_idx >= 0 else num_embeddings + padding_idx
        self.padding_idx = None if index is None or not first <= index < first + rows else index - first

    def fill_weight(self, whole: torch.Tensor) -> None:
        self.init_method(whole)
        if self.whole_padding_idx is not None:
            whole[self.whole_padding_idx].zero_()

    def _look_up_rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of indices in this rank's part of the vocabulary, zeros for the others."""
        return functional.embedding(
            indices, self.weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq, sparse=self.sparse
        )

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Return the full embeddings on all ranks."""
        indices = input_.long()
        if self.shard_across_embedding:
            output = gather_from_tensor_model_parallel_region(self._look_up_rows(indices))
            return output.narrow(-1, 0, self.embedding_dim - self.pad_size)
        if self.tensor_model_parallel_size == 1:
            return self._look_up_rows(indices)
        # Rows of other ranks are zeros here, so that the sum over the ranks contains each row once.
        is_own = (indices >= self.start_index) & (indices < self.end_index)
        rows = self._look_up_rows((indices - self.start_index) * is_own) * is_own.unsqueeze(-1).to(self.weight.dtype)
        return reduce_from_tensor_model_parallel_region(rows)


def parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Return the cross-entropy of each token, the same on all ranks of the group. The logits are unchanged.

    For a target outside of the vocabulary, such as -100, the result is the logarithm of the sum: mask it.

    Args:
        vocab_parallel_logits: [..., part of the vocabulary].
        target: [...], indices into the whole vocabulary.
        label_smoothing: Must be 0.

    Raises:
        xla_ckpt.UsageError: `label_smoothing` is not 0.
    """
    if label_smoothing:
        raise UsageError(
            "label_smoothing is not there where the vocabulary is split",
            hint="Join the logits (gather_output=True), and call torch's own cross_entropy.",
        )
    rows = vocab_parallel_logits.shape[-1]
    own = target - rows * parallel_state.get_rank("tp")
    is_own = (own >= 0) & (own < rows)
    highest = vocab_parallel_logits.detach().amax(-1)
    collectives.reduce_in_place([highest], collectives.get_rank_groups("tp"), collectives.MAX)
    logits = vocab_parallel_logits - highest.unsqueeze(-1)
    picked = logits.gather(-1, (own * is_own).unsqueeze(-1)).squeeze(-1) * is_own
    total = reduce_from_tensor_model_parallel_region(logits.exp().sum(-1))
    return total.log() - reduce_from_tensor_model_parallel_region(picked)
