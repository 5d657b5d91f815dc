"""The layer of grouped-query attention against three unsplit linear layers of torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import neuron_compat
import neuron_compat.nxd as nxd
from neuron_compat.emulated import parallel_state
from neuron_compat.groups import list_kv_groups
from neuron_compat.nxd.modules.qkv_linear import GQAQKVColumnParallelLinear
from tests.jobs import run_on_ranks
from xla_ckpt import UsageError

INPUT, Q, KV = 6, 16, 8
PARAMETERS = {True: ("qkv",), False: ("q", "k", "v")}


def test_groups_of_ranks_that_hold_the_same() -> None:
    # what neuronx-distributed's documentation gives for trn1 and trn2
    assert list_kv_groups([[0, 1, 2, 3], [4, 5, 6, 7]], 2, False) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert list_kv_groups([[0, 1, 2, 3], [4, 5, 6, 7]], 2, True) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert list_kv_groups([[0, 8, 16, 24]], 2, False) == [[0, 16], [8, 24]]
    assert list_kv_groups([list(range(32))], 4, False)[:2] == [[0, 8, 16, 24], [1, 9, 17, 25]]
    assert list_kv_groups([[0, 1]], 1, False) == [[0], [1]]
    assert list_kv_groups([[0, 1]], 2, True) == [[0, 1]]


def part(whole: torch.Tensor, rank: int, copies: int = 1, adjacent: bool = False) -> torch.Tensor:
    """The rows of a whole tensor that a tensor-parallel rank has."""
    parts = parallel_state.get_tensor_model_parallel_size() // copies
    return whole.chunk(parts)[rank // copies if adjacent else rank % parts]


def parts(whole: list[torch.Tensor], rank: int, copies: int, adjacent: bool) -> list[torch.Tensor]:
    """What a rank has of queries, keys and values."""
    return [part(whole[0], rank), *(part(w, rank, copies, adjacent) for w in whole[1:])]


def coefficients(shape: torch.Size, seed: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def in_memory(values: list[Any], fused: bool) -> list[Any]:
    """Queries, keys and values as the parameters hold them."""
    return [torch.cat(values)] if fused else values


def same(found: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    found = found.detach().cpu()
    assert found.shape == expected.shape, what
    assert torch.allclose(found, expected.detach(), rtol=1e-12, atol=1e-12), what


def check(device: str, copies: int, adjacent: bool, fused: bool, bias: bool, gather: bool) -> None:
    """Weights, outputs and gradients are those of the unsplit layers."""
    what = (device, copies, adjacent, fused, bias, gather)
    rank, tp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_size()
    torch.manual_seed(5)
    layer = GQAQKVColumnParallelLinear(
        INPUT, [Q, KV], bias, gather, torch.float64, kv_size_multiplier=copies, fuse_qkv=fused,
        keep_master_weight=True, reduce_dtype=torch.float64,
    ).to(device)  # fmt: skip
    torch.manual_seed(5)
    whole = [torch.nn.Linear(INPUT, size, bias).double() for size in (Q, KV, KV)]
    weights = [w.weight for w in whole]
    own, masters = in_memory(parts(weights, rank, copies, adjacent), fused), in_memory(weights, fused)
    for name, value, master in zip(PARAMETERS[fused], own, masters, strict=True):
        held = getattr(layer, f"weight_{name}")
        assert torch.equal(held.detach().cpu(), value), what
        assert torch.equal(getattr(layer, f"master_weight_{name}"), master), what
        assert (held.tensor_model_parallel, held.partition_dim, held.partition_stride) == (True, 0, 1)
        assert held.num_partitions == tp
    q, kv = Q // tp, KV * copies // tp
    assert (layer.q_output_size_per_partition, layer.kv_output_size_per_partition) == (q, kv)
    assert (layer.output_sizes, layer.kv_size_multiplier, layer.fuse_qkv) == ([Q, KV], copies, fused)
    keys: Any = f"{KV}x{copies}{' adjacent' if adjacent else ''}" if copies > 1 else KV
    sections = [getattr(layer, f"weight_{n}").partition_sections for n in PARAMETERS[fused]]
    assert sections == ([[Q, keys, keys]] if fused else [[Q], [keys], [keys]])

    x = coefficients(torch.Size([3, 5, INPUT]), 1)
    x, mine = x.clone().requires_grad_(), x.clone().to(device).requires_grad_()
    outputs = [linear(x).movedim(-1, 0) for linear in whole]
    by_rank = [parts(outputs, r, copies, adjacent) for r in range(tp)]
    found = layer(mine)
    if gather:  # every rank has what all of them hold, and computes the same loss from it
        wanted = [torch.cat([mine[i] for mine in by_rank]) for i in range(3)]
        factors = [coefficients(w.shape, 10 + i) for i, w in enumerate(wanted)]
        sum((w * f).sum() for w, f in zip(wanted, factors, strict=True)).backward()  # type: ignore[union-attr]
    else:  # every rank has a part of its own in the loss, copies too
        wanted = by_rank[rank]
        by_rank_factors = [[coefficients(w.shape, 10 * r + i) for i, w in enumerate(by_rank[r])] for r in range(tp)]
        factors = by_rank_factors[rank]
        every = zip(itertools.chain(*by_rank), itertools.chain(*by_rank_factors), strict=True)
        sum((w * f).sum() for w, f in every).backward()  # type: ignore[union-attr]
    for w, f in zip(wanted, found, strict=True):
        same(f.movedim(-1, 0), w, what)
    sum((o.movedim(-1, 0) * f.to(device)).sum() for o, f in zip(found, factors, strict=True)).backward()  # type: ignore[union-attr]
    assert x.grad is not None
    assert mine.grad is not None
    same(mine.grad, x.grad, what)
    gradients(layer, whole, "weight", split=True, adjacent=adjacent)
    if bias:
        gradients(layer, whole, "bias", split=not gather, adjacent=adjacent)
    assert set(layer.state_dict()) == {
        f"{kind}_{n}" for n in PARAMETERS[fused] for kind in ("weight", "bias")[: 1 + bias]
    }


def gradients(layer: Any, whole: list[torch.nn.Linear], kind: str, split: bool, adjacent: bool) -> None:
    copies, fused = layer.kv_size_multiplier, layer.fuse_qkv
    rank = parallel_state.get_tensor_model_parallel_rank()
    held, grads = [getattr(w, kind) for w in whole], [getattr(w, kind).grad for w in whole]
    if split:
        held, grads = parts(held, rank, copies, adjacent), parts(grads, rank, copies, adjacent)
    for name, value, grad in zip(PARAMETERS[fused], in_memory(held, fused), in_memory(grads, fused), strict=True):
        own = getattr(layer, f"{kind}_{name}")
        assert torch.equal(own.detach().cpu(), value), (kind, name)
        assert getattr(own, "tensor_model_parallel", False) is split
        same(own.grad, grad, (kind, name))


def layers(rank: int, device: str, tp: int) -> None:
    if device == "xla":
        neuron_compat.emulate()
    for copies, adjacent in ((1, False), (2, False), (2, True), (tp, False)):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
        if adjacent:
            parallel_state.initialize_kv_group(copies, sequential_ranks_in_group=True)
        for fused, bias, gather in itertools.product((True, False), repeat=3):
            check(device, copies, adjacent and copies < tp, fused, bias, gather)
        the_group(rank, copies, adjacent)
        parallel_state.destroy_model_parallel()


def the_group(rank: int, copies: int, adjacent: bool) -> None:
    groups = parallel_state.get_kv_shared_replica_groups()
    assert groups == list_kv_groups(parallel_state.get_tensor_model_parallel_replica_groups(), copies, adjacent)
    assert parallel_state.get_kv_shared_group(as_list=True) == groups
    assert parallel_state.get_kv_shared_group_size() == copies
    assert dist.get_process_group_ranks(parallel_state.get_kv_shared_group()) == next(g for g in groups if rank in g)
    parallel_state.initialize_kv_group(copies)  # what every layer does
    with pytest.raises(RuntimeError, match=r"share keys and values already, not of 8 ranks.*destroy_kv_group"):
        parallel_state.initialize_kv_group(8)
    parallel_state.destroy_kv_group()
    with pytest.raises(AssertionError, match="initialize_kv_group"):
        parallel_state.get_kv_shared_group_size()


@pytest.mark.parametrize(("device", "tp"), [("cpu", 4), pytest.param("xla", 2, marks=pytest.mark.xla)])
def test_forward_and_backward_equal_the_unsplit_layers(device: str, tp: int) -> None:
    run_on_ranks(layers, 4, device, tp, xla=device == "xla")


def sums_of_low_precision(rank: int) -> None:
    """Gradients of copies are summed in `reduce_dtype`, and stay equal."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, kv_shared_group_size=2)
    assert parallel_state.get_kv_shared_replica_groups() == [[0, 1]]
    torch.manual_seed(1)
    layer = GQAQKVColumnParallelLinear(1, [2, 1], False, False, torch.bfloat16, kv_size_multiplier=2, fuse_qkv=False)
    _, k, _ = layer(torch.ones(1, 1, 1, dtype=torch.bfloat16))
    (k * (256 if rank else 1)).sum().backward()
    assert layer.weight_k.grad.item() == 256  # 257, rounded once


def test_gradients_of_copies_are_summed_in_reduce_dtype() -> None:
    run_on_ranks(sums_of_low_precision, 2)


@pytest.fixture
def alone() -> Iterator[None]:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()


def test_one_process_needs_no_process_group(alone: None) -> None:
    layer = nxd.modules.GQAQKVColumnParallelLinear(4, [8, 4], init_method=torch.nn.init.ones_)
    assert layer.fuse_qkv  # neuronx-distributed's default
    assert layer.weight_qkv.shape == (16, 4)
    assert layer.master_weight_qkv is None
    x = torch.randn(2, 4)
    q, k, v = layer(x)
    assert (q.shape, k.shape, v.shape) == ((2, 8), (2, 4), (2, 4))
    assert torch.allclose(q - layer.bias_qkv[:8], x.sum(-1, keepdim=True).expand(2, 8))
    assert torch.allclose(v - layer.bias_qkv[12:], x.sum(-1, keepdim=True).expand(2, 4))
    meta = GQAQKVColumnParallelLinear(4, [8, 4], fuse_qkv=False, device="meta")
    assert meta.weight_k.is_meta
    assert meta.weight_k.shape == (4, 4)
    with pytest.raises(AssertionError, match=r"torch\.distributed was not initialised"):
        parallel_state.get_kv_shared_group()


def test_what_does_not_divide_says_so(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="1 tensor-parallel ranks cannot be divided into groups of 2"):
        parallel_state.initialize_kv_group(2)
    parallel_state.destroy_model_parallel()
    with pytest.raises(RuntimeError, match="groups of 3"):
        parallel_state.initialize_model_parallel(kv_shared_group_size=3)
    assert not parallel_state.model_parallel_is_initialized()
    parallel_state.initialize_model_parallel()
    with pytest.raises(UsageError, match="sequence_parallel_enabled"):
        GQAQKVColumnParallelLinear(4, [8, 4], sequence_parallel_enabled=True)
    monkeypatch.setattr(parallel_state, "get_size", lambda kind: 4)
    for sizes, copies, words in (
        ([8], 1, "are not two"),
        ([8, 4], 3, "kv_size_multiplier=3 does not divide 4"),
        ([6, 4], 1, r"output_sizes\[0\]=6"),
        ([8, 3], 2, r"output_sizes\[1\]=3 does not divide into 2 parts.*kv_size_multiplier=2"),
    ):
        with pytest.raises(ValueError, match=words):
            GQAQKVColumnParallelLinear(4, sizes, kv_size_multiplier=copies)
    with pytest.raises(AssertionError, match="initialize_kv_group"):
        parallel_state.get_kv_shared_group_size()
