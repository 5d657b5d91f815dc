"""The tensor-parallel layers against the unsplit ones of torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import neuron_compat
from neuron_compat.nxd.parallel_layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    parallel_state,
)
from tests.jobs import run_on_ranks
from xla_ckpt import UsageError


def part(full: torch.Tensor, dim: int, stride: int = 1) -> torch.Tensor:
    """What this rank has of a whole value, padded."""
    tp, me = parallel_state.get_tensor_model_parallel_size(), parallel_state.get_tensor_model_parallel_rank()
    missing = -full.shape[dim] % (tp * stride)
    if missing:
        shape = list(full.shape)
        shape[dim] = missing
        full = torch.cat([full, torch.zeros(shape)], dim)
    return torch.cat(full.chunk(tp * stride, dim)[me::tp], dim)


def last(value: torch.Tensor) -> torch.Tensor:
    return part(value, -1)


def itself(value: torch.Tensor) -> torch.Tensor:
    return value


def same(found: torch.Tensor, expected: torch.Tensor, what: str, exact: bool = False) -> None:
    found = found.detach().cpu()
    assert found.shape == expected.shape, what
    assert torch.equal(found, expected) if exact else torch.allclose(found, expected, rtol=1e-5, atol=1e-6), what


Function = Callable[[torch.Tensor], torch.Tensor]


def check(
    device: str, made: Callable[[], Any], reference: Callable[[], torch.nn.Module], inputs: torch.Tensor,
    splits: dict[str, tuple[int, ...]], own_output: Function = itself, own_input: Function = itself,
) -> None:  # fmt: skip
    """Weights, outputs and gradients of a split layer are those of the whole one."""
    tp = parallel_state.get_tensor_model_parallel_size()
    torch.manual_seed(5)
    layer = made()
    if layer.weight.device.type != device:
        layer.to(device)
    torch.manual_seed(5)
    whole = reference()
    for name, parameter in whole.named_parameters():
        split = splits.get(name)
        held = getattr(layer, name)
        same(held, parameter.detach() if split is None else part(parameter.detach(), *split), name, exact=True)
        if split is None:
            assert not hasattr(held, "tensor_model_parallel")
        else:
            dim, stride = (*split, 1)[:2]
            assert held.tensor_model_parallel is True
            assert (held.partition_dim, held.partition_stride, held.num_partitions) == (dim, stride, tp)
            padded = parameter.shape[dim] % (tp * stride) != 0
            assert getattr(held, "unpadded_shape", None) == (tuple(parameter.shape) if padded else None)
    x = inputs.clone()
    mine = own_input(inputs).clone().to(device)
    if x.is_floating_point():
        x.requires_grad_()
        mine.requires_grad_()
    y, out = whole(x), layer(mine)
    same(out, own_output(y.detach()), "output")
    weights = torch.linspace(-1, 1, y.numel()).reshape(y.shape)
    (y * weights).sum().backward()
    (out * own_output(weights).to(device)).sum().backward()
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        split = splits.get(name)
        expected = parameter.grad if split is None else part(parameter.grad, *split)
        same(getattr(layer, name).grad, expected, f"{name}.grad")
    if x.is_floating_point():
        assert mine.grad is not None
        assert x.grad is not None
        same(mine.grad, own_input(x.grad), "input gradient")


def layers(rank: int, device: str, tp: int) -> None:
    if device == "xla":
        neuron_compat.emulate()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
    linear_layers(functools.partial(check, device), device, x)
    embeddings(functools.partial(check, device))
    an_mlp(device, x)
    if device == "cpu":
        sums_of_double_precision()
    what_is_refused()


def linear_layers(check: Callable[..., None], device: str, x: torch.Tensor) -> None:
    column, row, whole = ColumnParallelLinear, RowParallelLinear, torch.nn.Linear
    rows: dict[str, tuple[int, ...]] = {"weight": (0,), "bias": (0,)}
    fused: dict[str, tuple[int, ...]] = {"weight": (0, 3), "bias": (0, 3)}
    check(lambda: column(8, 12, gather_output=False), lambda: whole(8, 12), x, rows, last)
    check(lambda: column(8, 12), lambda: whole(8, 12), x, {"weight": (0,)})
    check(
        lambda: column(8, 12, bias=False, device=torch.device(device)), lambda: whole(8, 12, bias=False), x[0],
        {"weight": (0,)},
    )  # fmt: skip
    check(lambda: column(8, 24, stride=3), lambda: whole(8, 24), x, {"weight": (0, 3)})
    check(
        lambda: column(8, 24, stride=3, gather_output=False), lambda: whole(8, 24), x, fused, lambda y: part(y, -1, 3)
    )
    check(lambda: column(8, 11, pad=True), lambda: whole(8, 11), x, {"weight": (0,)})
    check(lambda: column(8, 11, pad=True, gather_output=False), lambda: whole(8, 11), x, rows, last)
    check(lambda: row(8, 6), lambda: whole(8, 6), x, {"weight": (1,)})
    check(lambda: row(8, 6, input_is_parallel=True), lambda: whole(8, 6), x, {"weight": (1,)}, own_input=last)
    check(lambda: row(7, 6, pad=True), lambda: whole(7, 6), x[..., :7], {"weight": (1,)})


def embeddings(check: Callable[..., None]) -> None:
    split, whole = ParallelEmbedding, torch.nn.Embedding
    words = torch.tensor([[0, 9, 3, 3], [7, 11, 10, 0]])
    check(lambda: split(12, 6), lambda: whole(12, 6), words, {"weight": (0,)})
    check(lambda: split(13, 6, pad=True), lambda: whole(13, 6), words, {"weight": (0,)})
    check(lambda: split(12, 6, padding_idx=3), lambda: whole(12, 6, padding_idx=3), words, {"weight": (0,)})
    check(lambda: split(12, 8, shard_across_embedding=True), lambda: whole(12, 8), words, {"weight": (1,)})
    check(lambda: split(12, 7, shard_across_embedding=True, pad=True), lambda: whole(12, 7), words, {"weight": (1,)})


def an_mlp(device: str, x: torch.Tensor) -> None:
    """Column, then row; sums of low precision are made in high precision."""
    torch.manual_seed(9)
    up, down = ColumnParallelLinear(8, 16, gather_output=False), RowParallelLinear(16, 8, input_is_parallel=True)
    torch.manual_seed(9)
    whole = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        up.to(device=device, dtype=dtype), down.to(device=device, dtype=dtype)
        assert up.weight.partition_dim == 0
        assert down.weight.partition_dim == 1
        assert up.bias.tensor_model_parallel
        mine = x.clone().to(device=device, dtype=dtype).requires_grad_()
        reference = x.clone().requires_grad_()
        out = down(torch.tanh(up(mine)))
        assert out.dtype == dtype
        out.sum().backward()
        want = whole(reference)
        want.sum().backward()
        assert mine.grad is not None
        assert (out.detach().cpu().float() - want).abs().max() < limit * 4
        assert (mine.grad.cpu().float() - reference.grad).abs().max() < limit * 4


def sums_of_double_precision() -> None:
    """They are made in float32, as neuronx-distributed makes them, unless `reduce_dtype` says otherwise."""
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(3, 8)
    for options, least, most in (({}, 1e-12, 1e-5), ({"reduce_dtype": torch.float64}, 0.0, 1e-14)):
        torch.manual_seed(9)
        whole = torch.nn.Linear(8, 8, bias=False, dtype=torch.float64)
        layer = RowParallelLinear(8, 8, bias=False, dtype=torch.float64, **options)
        layer.weight.data = part(whole.weight.data, 1)
        difference = (layer(x) - whole(x)).abs().max().item()
        assert least <= difference <= most, difference


def what_is_refused() -> None:
    with pytest.raises(UsageError, match="scale_grad_by_freq"):
        ParallelEmbedding(12, 4, scale_grad_by_freq=True)
    for wrong, words in (
        (lambda: ColumnParallelLinear(8, 11), "output_size=11"),
        (lambda: RowParallelLinear(7, 8), "input_size=7"),
        (lambda: ParallelEmbedding(13, 4), "num_embeddings=13"),
        (lambda: ColumnParallelLinear(8, 13, stride=3, pad=True), "padding in each of its 3 blocks"),
    ):
        with pytest.raises(ValueError, match=words):
            wrong()


@pytest.mark.parametrize(("device", "tp"), [("cpu", 4), pytest.param("xla", 2, marks=pytest.mark.xla)])
def test_forward_and_backward_equal_the_unsplit_layer(device: str, tp: int) -> None:
    run_on_ranks(layers, 4, device, tp, xla=device == "xla")


@pytest.fixture
def alone() -> Iterator[None]:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()


def test_one_process_needs_no_process_group(alone: None) -> None:
    torch.manual_seed(3)
    layer = ColumnParallelLinear(4, 6, keep_master_weight=True, skip_bias_add=True)
    torch.manual_seed(3)
    whole = torch.nn.Linear(4, 6)
    x = torch.randn(2, 4)
    output, bias = layer(x)
    assert torch.equal(output + bias, whole(x))
    assert layer.master_weight is not None
    assert torch.equal(layer.master_weight, whole.weight)
    assert layer.weight.num_partitions == 1
    row = RowParallelLinear(4, 6, bias=False, init_method=torch.nn.init.ones_)
    assert torch.equal(row(x), x.sum(-1, keepdim=True).expand(2, 6))
    assert ParallelEmbedding(7, 3)(torch.tensor([6])).shape == (1, 3)
    meta = RowParallelLinear(4, 6, device="meta")
    assert meta.weight.is_meta
    assert meta.weight.partition_dim == 1


def test_what_is_not_there_says_so(alone: None) -> None:
    with pytest.raises(UsageError, match="sequence_parallel_enabled"):
        ColumnParallelLinear(4, 4, sequence_parallel_enabled=True)
    with pytest.raises(UsageError, match="input_is_parallel=True"):
        RowParallelLinear(4, 4, stride=2)
    with pytest.raises(UsageError, match="max_norm"):
        ParallelEmbedding(4, 4, max_norm=1.0)
