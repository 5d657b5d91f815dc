"""The tensor-parallel layers against the unsplit ones of torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from neuron_compat.nxd.parallel_layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    parallel_state,
)
from tests.jobs import job
from xla_ckpt import UsageError

LAYERS = """
import neuron_compat
from neuron_compat.nxd.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from neuron_compat.nxd.parallel_layers import parallel_state as ps
device, tp = sys.argv[1], int(sys.argv[2])
if device == "xla":
    neuron_compat.emulate()
ps.initialize_model_parallel(tensor_model_parallel_size=tp)
me = ps.get_tensor_model_parallel_rank()


def part(full, dim, stride=1):
    missing = -full.shape[dim] % (tp * stride)
    if missing:
        shape = list(full.shape)
        shape[dim] = missing
        full = torch.cat([full, torch.zeros(shape)], dim)
    return torch.cat(full.chunk(tp * stride, dim)[me::tp], dim)


def same(found, expected, what, exact=False):
    found = found.detach().cpu()
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    assert torch.equal(found, expected) if exact else torch.allclose(found, expected, rtol=1e-5, atol=1e-6), what


def check(made, reference, inputs, splits, own_output=lambda y: y, own_input=lambda x: x):
    '''Weights, outputs and gradients of a split layer are those of the whole one.'''
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
            assert (held.tensor_model_parallel, held.partition_dim, held.partition_stride, held.num_partitions) == (
                True, dim, stride, tp)
            padded = parameter.shape[dim] % (tp * stride) != 0
            assert getattr(held, "global_shape", None) == (tuple(parameter.shape) if padded else None)
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
        split = splits.get(name)
        expected = parameter.grad if split is None else part(parameter.grad, *split)
        same(getattr(layer, name).grad, expected, f"{name}.grad")
    if x.is_floating_point():
        same(mine.grad, own_input(x.grad), "input gradient")


last = lambda value: part(value, -1)
x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1))
rows = {"weight": (0,), "bias": (0,)}
check(lambda: ColumnParallelLinear(8, 12, gather_output=False), lambda: torch.nn.Linear(8, 12), x, rows, last)
check(lambda: ColumnParallelLinear(8, 12), lambda: torch.nn.Linear(8, 12), x, {"weight": (0,)})
check(lambda: ColumnParallelLinear(8, 12, bias=False, device=device), lambda: torch.nn.Linear(8, 12, bias=False), x[0],
      {"weight": (0,)})
check(lambda: ColumnParallelLinear(8, 24, stride=3), lambda: torch.nn.Linear(8, 24), x, {"weight": (0, 3)})
check(lambda: ColumnParallelLinear(8, 24, stride=3, gather_output=False), lambda: torch.nn.Linear(8, 24), x,
      {"weight": (0, 3), "bias": (0, 3)}, lambda y: part(y, -1, 3))
check(lambda: ColumnParallelLinear(8, 11, pad=True), lambda: torch.nn.Linear(8, 11), x, {"weight": (0,)})
check(lambda: ColumnParallelLinear(8, 11, pad=True, gather_output=False), lambda: torch.nn.Linear(8, 11), x, rows, last)
check(lambda: RowParallelLinear(8, 6), lambda: torch.nn.Linear(8, 6), x, {"weight": (1,)})
check(lambda: RowParallelLinear(8, 6, input_is_parallel=True), lambda: torch.nn.Linear(8, 6), x, {"weight": (1,)},
      own_input=last)
check(lambda: RowParallelLinear(7, 6, pad=True), lambda: torch.nn.Linear(7, 6), x[..., :7], {"weight": (1,)})
words = torch.tensor([[0, 9, 3, 3], [7, 11, 10, 0]])
check(lambda: ParallelEmbedding(12, 6), lambda: torch.nn.Embedding(12, 6), words, {"weight": (0,)})
check(lambda: ParallelEmbedding(13, 6, pad=True), lambda: torch.nn.Embedding(13, 6), words, {"weight": (0,)})
check(lambda: ParallelEmbedding(12, 6, padding_idx=3), lambda: torch.nn.Embedding(12, 6, padding_idx=3), words,
      {"weight": (0,)})
check(lambda: ParallelEmbedding(12, 8, shard_across_embedding=True), lambda: torch.nn.Embedding(12, 8), words,
      {"weight": (1,)})
check(lambda: ParallelEmbedding(12, 7, shard_across_embedding=True, pad=True), lambda: torch.nn.Embedding(12, 7), words,
      {"weight": (1,)})

# column, then row, as in an MLP; sums of low precision are made in high precision
torch.manual_seed(9)
up, down = ColumnParallelLinear(8, 16, gather_output=False), RowParallelLinear(16, 8, input_is_parallel=True)
torch.manual_seed(9)
whole = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
    pair = [up.to(device=device, dtype=dtype), down.to(device=device, dtype=dtype)]
    assert up.weight.partition_dim == 0 and down.weight.partition_dim == 1 and up.bias.tensor_model_parallel
    mine = x.clone().to(device=device, dtype=dtype).requires_grad_()
    reference = x.clone().requires_grad_()
    out = down(torch.tanh(up(mine)))
    assert out.dtype == dtype
    out.sum().backward()
    want = whole(reference)
    want.sum().backward()
    assert (out.detach().cpu().float() - want).abs().max() < limit * 4
    assert (mine.grad.cpu().float() - reference.grad).abs().max() < limit * 4

try:
    ParallelEmbedding(12, 4, scale_grad_by_freq=True)
except xla_ckpt.UsageError as error:
    assert "scale_grad_by_freq" in str(error)
else:
    raise AssertionError
if tp > 1:
    for wrong, words in ((lambda: ColumnParallelLinear(8, 11), "output_size=11"),
                         (lambda: RowParallelLinear(7, 8), "input_size=7"),
                         (lambda: ParallelEmbedding(13, 4), "num_embeddings=13"),
                         (lambda: ColumnParallelLinear(8, 13, stride=3, pad=True), "padding in each of its 3 blocks")):
        try:
            wrong()
        except ValueError as error:
            assert words in str(error), error
        else:
            raise AssertionError(words)
say("done")
"""


@pytest.mark.parametrize(("device", "tp"), [("cpu", 4), ("xla", 2)])
def test_forward_and_backward_equal_the_unsplit_layer(tmp_path: Path, device: str, tp: int) -> None:
    assert job(LAYERS, 4, tmp_path, device, tp) == ["done"] * 4


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
