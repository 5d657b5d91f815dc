"""Gradients over ranks: their mean, their norm and clipping, against torch's own on the whole model."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

import neuron_compat
from neuron_compat.nxd.parallel_layers import grads
from neuron_compat.nxd.parallel_layers import parallel_state as ps
from tests import xla
from tests.jobs import run_on_ranks
from xla_ckpt import UsageError

ORDERS = (2, 1, 3.0, math.inf)


def whole_gradients() -> dict[str, torch.Tensor]:
    """Of a model with a layer that is split, a norm that all ranks have, and experts [expert, row]."""
    numbers = torch.Generator().manual_seed(0)
    sizes = {"split": (8, 4), "norm": (5,), "experts": (4, 3)}
    return {name: torch.randn(size, generator=numbers) for name, size in sizes.items()}


def own(name: str, value: torch.Tensor, device: str) -> torch.nn.Parameter:
    """This rank's part of a parameter, with its gradient."""
    if name == "split":
        value = value.chunk(ps.get_tensor_model_parallel_size())[ps.get_tensor_model_parallel_rank()]
    if name == "experts":
        value = value.chunk(ps.get_expert_model_parallel_size())[ps.get_expert_model_parallel_rank()]
    parameter: Any = torch.nn.Parameter(torch.zeros_like(value, device=device))
    parameter.tensor_model_parallel = name == "split"
    if name == "experts":
        parameter.expert_model_parallel = True
    parameter.grad = value.to(device, copy=True)
    return parameter


def clipped_as_one_vector(device: str) -> None:
    whole = whole_gradients()
    for order in ORDERS:
        for force_spmd in (True, False):
            unsplit = [torch.nn.Parameter(torch.zeros_like(v)) for v in whole.values()]
            for parameter, gradient in zip(unsplit, whole.values(), strict=True):
                parameter.grad = gradient.clone()
            want = torch.nn.utils.clip_grad_norm_(unsplit, 0.5, order)
            mine = {name: own(name, value, device) for name, value in whole.items()}
            norm = grads.clip_grad_norm((p for p in mine.values()), 0.5, order, force_spmd=force_spmd)
            assert norm.shape == (1,)
            assert torch.allclose(norm.cpu(), want, rtol=1e-5), (order, norm, want)
            for (name, found), clipped in zip(mine.items(), unsplit, strict=True):
                expected = own(name, clipped.grad, device).grad
                assert torch.allclose(found.grad.cpu(), expected.cpu(), rtol=1e-5), (name, order)
    small = {name: own(name, value * 1e-3, device) for name, value in whole.items()}
    before = copy.deepcopy({name: p.grad.cpu() for name, p in small.items()})
    grads.clip_grad_norm(list(small.values()), 0.5)
    assert all(torch.equal(small[name].grad.cpu(), before[name]) for name in small)


def special_parameters(device: str) -> None:
    tp = ps.get_tensor_model_parallel_size()
    ones: Any = torch.nn.Parameter(torch.zeros(4, device=device))
    ones.grad = torch.ones(4, device=device)
    assert grads.get_grad_norm(ones).item() == pytest.approx(2.0)  # all ranks have it, and it counts once
    ones.tensor_model_parallel = True
    assert grads.get_grad_norm(ones).item() == pytest.approx(math.sqrt(4 * tp))
    ones.partition_sections = [2 * tp, f"2x{tp}"]  # two rows of its own, two that all have
    assert grads.get_grad_norm(ones).item() == pytest.approx(math.sqrt(2 * tp + 2))
    ones.shared = True  # with another pipeline stage, which counts it
    assert grads.get_grad_norm(ones).item() == 0
    low = torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16, device=device))
    low.grad = torch.full_like(low, 1.0)
    norm = grads.get_grad_norm([low, torch.nn.Parameter(torch.zeros(3, device=device))])  # without a gradient
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(math.sqrt(1000))  # bfloat16 would count to 256


def replicas_get_the_mean(rank: int, device: str) -> None:
    """Of a gradient that is other on each rank; experts have fewer replicas."""
    tp, world = ps.get_tensor_model_parallel_size(), torch.distributed.get_world_size()
    ranks = torch.arange(world)
    dp, ep = ps.get_data_parallel_size(), ps.get_expert_model_parallel_size()
    common, expert = (torch.full((3,), float(rank), device=device) for _ in range(2))
    low = torch.full((2,), float(rank), dtype=torch.bfloat16, device=device)
    grads.bucket_allreduce_gradients(iter([common, expert, low]))
    grads.bucket_allreduce_gradients([common, low], reduce_over_ep_group=True)
    replicas = ranks[ranks % tp == rank % tp].float()
    assert common.tolist() == [replicas.mean().item()] * 3
    assert low.tolist() == [replicas.mean().item()] * 2
    same_experts = torch.tensor(ps.get_expert_data_parallel_group(as_list=True)).float()
    own_replicas = next(r for r in same_experts if rank in r.tolist())
    assert len(own_replicas) == dp // ep
    assert expert.tolist() == [(own_replicas.sum() / dp).item()] * 3
    grads.bucket_allreduce_gradients([])


def sequence_parallel_parameters_are_summed(rank: int, device: str) -> None:
    norm: Any = torch.nn.Parameter(torch.zeros(2, device=device))
    other = torch.nn.Parameter(torch.zeros(2, device=device))
    norm.sequence_parallel_enabled = True
    norm.grad, other.grad = (torch.full((2,), float(rank), device=device) for _ in range(2))
    grads.allreduce_sequence_parallel_gradients(torch.optim.SGD([norm, other], lr=0.1))
    group = next(g for g in ps.get_tensor_model_parallel_replica_groups() if rank in g)
    assert norm.grad.tolist() == [float(sum(group))] * 2
    assert other.grad.tolist() == [float(rank)] * 2


def over_ranks(rank: int, device: str) -> None:
    if device == "xla":
        neuron_compat.emulate()
    for sizes in ({"tensor_model_parallel_size": 2}, {"expert_model_parallel_size": 2}):
        ps.initialize_model_parallel(**sizes)
        clipped_as_one_vector(device)
        special_parameters(device)
        replicas_get_the_mean(rank, device)
        sequence_parallel_parameters_are_summed(rank, device)
        ps.destroy_model_parallel()


@pytest.mark.parametrize("device", xla.DEVICES)
def test_over_four_ranks(device: str) -> None:
    run_on_ranks(over_ranks, 4, device, xla=device == "xla")


def one_rank_of_shards(rank: int) -> None:
    """As ZeRO-1 calls it: the shards of a parameter lie on dp ranks."""
    neuron_compat.emulate()
    ps.initialize_model_parallel(tensor_model_parallel_size=2)
    shard: Any = torch.nn.Parameter(torch.zeros(2, device="xla"))
    shard.grad = torch.tensor([1.0, rank], device="xla")
    shard.tensor_model_parallel = True
    want = math.sqrt(sum(1 + r * r for r in range(4)))
    for groups in (None, ps.get_data_parallel_replica_groups()):
        norm = grads.get_grad_norm([shard], zero1_optimizer=True, zero1_optimizer_groups=groups)
        assert norm.item() == pytest.approx(want)


@pytest.mark.xla
def test_shards_of_zero1() -> None:
    run_on_ranks(one_rank_of_shards, 4, xla=True)


def test_what_makes_no_sense() -> None:
    ps.initialize_model_parallel()
    try:
        parameter = torch.nn.Parameter(torch.zeros(1))
        with pytest.raises(UsageError, match="no parameters"):
            grads.get_grad_norm([])
        with pytest.raises(UsageError, match="norm_type has to be above 0: found 0"):
            grads.get_grad_norm(parameter, 0)
        with pytest.raises(UsageError, match="zero1_optimizer=True"):
            grads.clip_grad_norm(parameter, 1.0, zero1_optimizer_groups=[[0]])
        parameter.grad = torch.tensor([math.nan])
        assert grads.clip_grad_norm(parameter, 1.0).isnan().all()
    finally:
        ps.destroy_model_parallel()
