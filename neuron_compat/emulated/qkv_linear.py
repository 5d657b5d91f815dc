"""Fused query, key and value projection for grouped-query attention, with neuronx-distributed's names and arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from neuron_compat.emulated import parallel_state
from neuron_compat.emulated.collectives import (
    copy_to_kv_shared_region,
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from neuron_compat.emulated.layers import (
    Device,
    InitMethod,
    PartitionedModule,
    check_supported,
    draw_linear,
    resolve_device,
    set_tensor_model_parallel_attributes,
)
from xla_ckpt.facade import Section

QKV: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Triple: TypeAlias = tuple[Any, Any, Any]
"""Parameters of queries, keys and values, or None."""


class GQAQKVColumnParallelLinear(PartitionedModule):
    """Three linear layers of one input, whose outputs are the queries, keys and values of grouped-query attention.

    With n tensor-parallel ranks, every rank holds 1/n of the rows of the queries. There may be fewer key/value heads
    than ranks: with `kv_size_multiplier` m, m ranks hold each row of keys and values, so that a rank holds m/n of them.
    `parallel_state.initialize_kv_group` determines which ranks hold the same rows; the first layer calls it, and
    ``kv_copies_adjacent`` is True if these ranks are adjacent. A checkpoint contains keys and values once.

    Parameters of a rank: with `fuse_qkv`, ``weight_qkv`` [q + 2 kv, input_size], which contains its queries, then its
    keys, then its values, and ``bias_qkv``; otherwise ``weight_q``, ``weight_k``, ``weight_v`` and ``bias_q``,
    ``bias_k``, ``bias_v``. q and kv are ``q_output_size_per_partition`` and ``kv_output_size_per_partition``. With
    `gather_output`, the biases are replicated; otherwise they are sharded like the weights.

    The gradients of copies are summed over the ranks that hold them, so that copies stay equal and training matches the
    unsharded layers. Initial weights equal the weights of three `torch.nn.Linear` layers that are created one after
    the other, for queries, keys and values, after the same seed, for any number of ranks, `kv_size_multiplier` and
    `fuse_qkv`.

    **Which heads are paired.** The layer does not know heads; it assigns equal parts to each rank. Let H be the number
    of query heads and K the number of key/value heads, and let every rank pair its own heads: its i-th query head with
    its ``(i // (H / (K m)))``-th key/value head. Query head h, in the order of the rows of all ranks one after the
    other, which is the order in a checkpoint, is then paired with this key/value head:

    - ``(h % (H/m)) // (H / (K m))``, if ranks r, r + n/m, ... hold the same rows. With m = 1 this is Hugging Face's
    order:
      H/K consecutive query heads for each key/value head. It depends on m, not on n. A checkpoint is therefore valid on
      any number of ranks with the same m, and, if K = 1, with any m.
    - With ``initialize_kv_group(m, sequential_ranks_in_group=True)``, adjacent ranks hold the same rows. If a rank
    holds
      one key/value head (n = K m), this is Hugging Face's order for any m. Otherwise the order depends on m and on n.

    If the order changes, the rows of the queries and the columns of the projection after the attention must be
    permuted. Loads do not do that, because they do not know the heads (they warn if m differs): ``xla-ckpt convert
    --config config.json`` does. If a rank has all key/value heads (n = m), the model may also use the order of the
    checkpoint instead of its own.

    Args:
        input_size: Number of input features.
        output_sizes: Number of features of all queries, and of all keys (the same as of all values).
        bias: True adds biases.
        gather_output: Return the concatenated outputs of all ranks. Keys and values then occur m times.
        init_method: Initializes a full weight; by default as `torch.nn.Linear` does. Called for queries, keys and
            values.
        sequence_parallel_enabled: Unsupported.
        keep_master_weight: Keep the full weights and biases as ``master_weight_qkv``, ``master_bias_qkv``, or
            ``master_weight_q`` and so on, with keys and values once.
        kv_size_multiplier: Number of ranks that hold each row of keys and values.
        fuse_qkv: Store the three weights in one parameter.
        reduce_dtype: Dtype in which gradients are summed over ranks.

    Raises:
        ValueError: The sizes are not divisible, or there are not two of them.
        RuntimeError: Other layers have another `kv_size_multiplier`.
        xla_ckpt.UsageError: An argument requests an unsupported feature.
    """

    def __init__(
        self,
        input_size: int,
        output_sizes: Sequence[int],
        bias: bool = True,
        gather_output: bool = True,
        dtype: torch.dtype = torch.float32,
        device: Device = None,
        init_method: InitMethod | None = None,
        sequence_parallel_enabled: bool = False,
        keep_master_weight: bool = False,
        kv_size_multiplier: int = 1,
        fuse_qkv: bool = True,
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        check_supported(sequence_parallel_enabled)
        super().__init__()
        parts = parallel_state.get_size("tp")
        _check_sizes(output_sizes, parts, kv_size_multiplier)
        parallel_state.initialize_kv_group(kv_size_multiplier)
        self.input_size, self.output_sizes = input_size, list(output_sizes)
        self.gather_output = gather_output
        self.dtype = dtype
        self.device = resolve_device(device)
        self.arg_init_method = init_method
        self.keep_master_weight = keep_master_weight
        self.sequence_parallel_enabled = sequence_parallel_enabled
        self.use_bias = bias
        self.fuse_qkv = fuse_qkv
        self.reduce_dtype = reduce_dtype
        self.kv_size_multiplier = kv_size_multiplier
        self.q_output_size_per_partition = self.output_sizes[0] // parts
        self.kv_output_size_per_partition = self.output_sizes[1] * kv_size_multiplier // parts
        self._kv_part, self.kv_copies_adjacent = _find_kv_part()
        outputs = (self.output_sizes[0], self.output_sizes[1], self.output_sizes[1])
        drawn = [draw_linear((input_size, size), bias, init_method, self.device) for size in outputs]
        self._create_parameters("weight", [weight for weight, _ in drawn], split=True)
        self._create_parameters("bias", [value for _, value in drawn if value is not None], split=not gather_output)

    def _create_parameters(self, kind: str, whole: list[torch.Tensor], split: bool) -> None:
        """Create the weights or biases from full queries, keys and values; set them to None for an empty list."""
        for end in ("qkv", "q", "k", "v"):
            self.register_parameter(f"{kind}_{end}", None)
            setattr(self, f"master_{kind}_{end}", None)
        if not whole:
            return
        parts = self._cut_own_parts(whole) if split else whole
        sections = [self._get_section(part) for part in range(3)]
        if self.fuse_qkv:
            parameters = {"qkv": (torch.cat(parts), torch.cat(whole), sections)}
        else:
            parameters = {
                end: (part, full, [s]) for end, part, full, s in zip("qkv", parts, whole, sections, strict=True)
            }
        for end, (part, full, own) in parameters.items():
            parameter = torch.nn.Parameter(part.to(self.dtype, copy=True).to(self.device))
            if split:
                set_tensor_model_parallel_attributes(parameter, True, 0)
                parameter.partition_sections = [s.spec for s in own]  # type: ignore[attr-defined]
            self.register_parameter(f"{kind}_{end}", parameter)
            if self.keep_master_weight:
                setattr(self, f"master_{kind}_{end}", full.to(self.dtype))

    def _get_section(self, part: int) -> Section:
        """Return the rows of all queries (0), keys (1) or values (2), with the number of ranks that hold each."""
        if part == 0:
            return Section(self.output_sizes[0])
        return Section(self.output_sizes[1], self.kv_size_multiplier, self.kv_copies_adjacent)

    def _cut_own_parts(self, whole: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's rows of full queries, keys and values, as views."""
        queries, keys, values = whole
        q, kv = self.q_output_size_per_partition, self.kv_output_size_per_partition
        rank = parallel_state.get_rank("tp")
        return [
            queries.narrow(0, q * rank, q),
            keys.narrow(0, kv * self._kv_part, kv),
            values.narrow(0, kv * self._kv_part, kv),
        ]

    def forward(self, input: torch.Tensor) -> QKV:  # noqa: A002  # neuronx-distributed's name
        """Return queries, keys and values, [..., features], of this rank, or with `gather_output` of all ranks."""
        entered = copy_to_tensor_model_parallel_region(input, self.reduce_dtype)
        weights, biases = self._copy_to_kv_region(self._split_fused("weight")), self._split_fused("bias")
        if not self.gather_output:
            return _apply_linear(entered, weights, self._copy_to_kv_region(biases))
        q, k, v = map(gather_from_tensor_model_parallel_region, _apply_linear(entered, weights, (None, None, None)))
        if not self.use_bias:
            return q, k, v
        return q + biases[0], k + self._repeat_bias(biases[1]), v + self._repeat_bias(biases[2])

    def _split_fused(self, kind: str) -> Triple:
        """Return the weights or biases of queries, keys and values; None for missing ones."""
        fused: torch.Tensor | None = getattr(self, f"{kind}_qkv")
        if fused is None:
            return getattr(self, f"{kind}_q"), getattr(self, f"{kind}_k"), getattr(self, f"{kind}_v")
        q, kv = self.q_output_size_per_partition, self.kv_output_size_per_partition
        if kind == "bias" and self.gather_output:
            q, kv = self.output_sizes
        return fused.narrow(0, 0, q), fused.narrow(0, q, kv), fused.narrow(0, q + kv, kv)

    def _copy_to_kv_region(self, parts: Triple) -> Triple:
        """Sum the gradients of keys and values over the ranks that hold copies, in the backward pass."""
        q, k, v = parts
        if self.kv_size_multiplier == 1 or q is None:
            return parts
        return q, copy_to_kv_shared_region(k, self.reduce_dtype), copy_to_kv_shared_region(v, self.reduce_dtype)

    def _repeat_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """Return a full bias of keys or values, with its rows repeated in the order of the ranks that hold them."""
        copies = self.kv_size_multiplier
        if not self.kv_copies_adjacent:
            return bias.repeat(copies)
        return bias.reshape(-1, 1, self.kv_output_size_per_partition).expand(-1, copies, -1).reshape(-1)


def _apply_linear(value: torch.Tensor, weights: Triple, biases: Triple) -> QKV:
    """Return the queries, keys and values of an input."""
    q, k, v = (functional.linear(value, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    return q, k, v


def _check_sizes(output_sizes: Sequence[int], parts: int, copies: int) -> None:
    """Raise an error for output sizes that are not divisible into parts."""
    if len(output_sizes) != 2:
        raise ValueError(f"output_sizes={list(output_sizes)} are not two: all queries, and all keys")
    q, kv = output_sizes
    if copies < 1 or parts % copies:
        raise ValueError(f"kv_size_multiplier={copies} does not divide {parts} tensor-parallel ranks")
    if q % parts:
        raise ValueError(f"output_sizes[0]={q} does not divide into {parts} tensor-parallel parts")
    if kv % (parts // copies):
        raise ValueError(
            f"output_sizes[1]={kv} does not divide into {parts // copies} parts: {parts} tensor-parallel ranks, and "
            f"kv_size_multiplier={copies}"
        )


def _find_kv_part() -> tuple[int, bool]:
    """Return the index of this rank's part of keys and values, and True if adjacent ranks hold the same part."""
    first = parallel_state.get_tensor_model_parallel_src_rank()
    ranks = next(g for g in parallel_state.get_replica_groups("tp") if g[0] == first)
    sharing = [g for g in parallel_state.get_replica_groups("kv") if g[0] in ranks]
    me = ranks[parallel_state.get_rank("tp")]
    part = next(i for i, g in enumerate(sharing) if me in g)
    return part, len(sharing) > 1 and sharing[0][1:2] == ranks[1:2]
