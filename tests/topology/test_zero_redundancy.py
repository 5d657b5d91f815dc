"""torch's ZeroRedundancyOptimizer: refused as it is, and exact by the way that the error names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import xla_ckpt
from tests.jobs import run_on_ranks

WORLD = 2


def made(seed: int) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(seed)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)))
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)


def steps(rank: int, model: torch.nn.Module, optimizer: Any) -> list[float]:
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = (model(torch.full((2, 4), 1.0 + rank)) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def refused_then_saved(rank: int, root: Path) -> None:
    model, optimizer = made(0)
    steps(rank, model, optimizer)
    with pytest.raises(xla_ckpt.UsageError, match=r"ZeroRedundancyOptimizer has the state .* on one rank alone"):
        xla_ckpt.save_checkpoint(root, "a", model, optimizer)
    assert not xla_ckpt.has_checkpoint(root)
    state: dict[str, Any] = {}
    for to in range(WORLD):
        optimizer.consolidate_state_dict(to)  # the other ranks forget what they had of it
        if to == rank:
            state = optimizer.state_dict()
    xla_ckpt.save_checkpoint(root, "a", model, state)
    expected = steps(rank, model, optimizer)

    model, optimizer = made(1)
    with pytest.raises(xla_ckpt.UsageError, match="Load into an empty dict"):
        xla_ckpt.load_checkpoint(root, "a", model, optimizer)
    held: dict[str, Any] = {}
    xla_ckpt.load_checkpoint(root, "a", model, held)
    optimizer.load_state_dict(held)
    assert steps(rank, model, optimizer) == expected


def test_on_two_ranks_and_then_into_a_plain_optimizer(tmp_path: Path) -> None:
    run_on_ranks(refused_then_saved, WORLD, tmp_path)
    stored = xla_ckpt.restore(tmp_path, "a").tree
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    xla_ckpt.load_checkpoint(tmp_path, "a", model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    for number, parameter in enumerate(model.parameters()):
        assert torch.equal(optimizer.state[parameter]["exp_avg"], stored["optimizer"]["state"][number]["exp_avg"])
        assert optimizer.state[parameter]["step"].item() == 2
