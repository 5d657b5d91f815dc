"""neuron_compat.emulate(): torch_xla's queries and collectives over all processes of a torchrun job."""

from __future__ import annotations

import pytest
import torch
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

import neuron_compat
from tests.jobs import run_on_ranks

pytestmark = pytest.mark.xla


def emulated(rank: int) -> None:
    before = xr.world_size, xm.all_reduce, xm.rendezvous
    assert xr.world_size() == 1
    with neuron_compat.emulate() as emulation:
        assert neuron_compat.emulate() is emulation
        assert (xr.world_size(), xr.global_ordinal(), xr.global_device_count(), xr.process_count()) == (4, rank, 4, 4)
        assert xm.is_master_ordinal() == (rank == 0)
        collectives(rank)
        gradients_are_averaged()
    assert (xr.world_size, xm.all_reduce, xm.rendezvous) == before
    assert xr.world_size() == 1


def two_values(rank: int) -> torch.Tensor:
    return torch.tensor([1.0, 10.0]).to("xla") * (rank + 1)


def collectives(rank: int) -> None:
    pairs, other = [[0, 1], [2, 3]], rank ^ 1
    x = two_values(rank)
    total = xm.all_reduce(xm.REDUCE_SUM, x)
    assert total.device.type == "xla"
    assert total.tolist() == [10.0, 100.0]
    assert x.tolist()[0] == rank + 1
    assert xm.all_reduce(xm.REDUCE_MAX, x, groups=pairs).tolist()[0] == max(rank, other) + 1
    held = [x.clone(), x.to(torch.bfloat16)]
    assert xm.all_reduce(xm.REDUCE_SUM, held, scale=0.5) is held
    assert held[0].tolist() == [5.0, 50.0]
    assert held[1].dtype == torch.bfloat16
    assert held[1].tolist() == [5.0, 50.0]
    gathered = xm.all_gather(x, dim=0, groups=pairs).tolist()
    assert gathered == [v * (r + 1) for r in sorted((rank, other)) for v in (1, 10)]
    # a group in another order than its ranks'
    turned = xm.all_gather(x[:1], groups=[[3, 2, 1, 0]]).tolist()
    assert turned == [4.0, 3.0, 2.0, 1.0]
    eight = torch.arange(8.0).to("xla") + rank
    part = xm.reduce_scatter(xm.REDUCE_SUM, eight, 1.0, 0, 4)
    assert part.tolist() == [4.0 * i + 6 for i in (2 * rank, 2 * rank + 1)]
    lists = xm.reduce_scatter_bucketized(xm.REDUCE_SUM, [eight, eight * 2], 0.5, 0, 2, groups=pairs, pin_layout=False)
    assert [len(v) for v in lists] == [4, 4]
    moved = xm.collective_permute(x, [[0, 1], [1, 2], [2, 3]])
    assert moved.tolist()[0] == rank
    y = torch.full((2,), float(rank)).to("xla")
    xm.collective_broadcast([y], root_ordinal=2)
    assert y.tolist() == [2.0, 2.0]
    swapped = xm.all_to_all(torch.arange(4.0).to("xla") + 10 * rank, 0, 0, 4)
    assert swapped.tolist() == [10.0 * r + rank for r in range(4)]
    assert xm.rendezvous("here", str(rank).encode()) == [b"0", b"1", b"2", b"3"]
    assert xm.mesh_reduce("mean", rank, sum) == 6
    with pytest.raises(ValueError, match=r"dim 0 of \[7\] does not divide into 4 shards"):
        xm.reduce_scatter(xm.REDUCE_SUM, eight[:7], 1.0, 0, 4)


def gradients_are_averaged() -> None:
    """As on devices."""
    model = torch.nn.Linear(2, 1, bias=False).to("xla")
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    (model(two_values(xr.global_ordinal())[None]).sum()).backward()
    xm.optimizer_step(optimizer)
    assert model.weight.tolist() == [[1 - 2.5, 1 - 25.0]]


def test_collectives_reach_all_ranks_and_undo_restores_everything() -> None:
    run_on_ranks(emulated, 4, xla=True)


def test_without_a_job_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeError, match="needs torchrun"):
        neuron_compat.emulate()


def test_unknown_names() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        neuron_compat.nothing  # noqa: B018
