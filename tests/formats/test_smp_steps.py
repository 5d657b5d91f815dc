"""Step counts that pipeline stages do not have in common, although their parts were saved together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import neuron_compat.smp as smp
import xla_ckpt
from tests.jobs import run_on_ranks
from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.formats.smp.save_notes import get_note_name


def stages() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))


def trains_the_first_stage_later(rank: int, root: str) -> None:
    smp.init({"pipeline_parallel_degree": 2, "auto_partition": False, "default_partition": 0, "ddp": True})
    torch.manual_seed(1)
    module = stages()
    smp.set_partition(module[0], 0)
    smp.set_partition(module[1], 1)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))

    @smp.step
    def train(model: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).square().mean()
        model.backward(loss)
        return loss

    for frozen in (True, True, False):
        module[0].requires_grad_(not frozen)
        optimizer.zero_grad()
        train(model, torch.ones(4, 3))
        optimizer.step()
    state = {"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict()}
    smp.save(state, f"{root}/c.pt")
    if rank == 0:
        torch.save({"model": module.state_dict(), "optimizer": optimizer.xla_ckpt_plain.state_dict()}, f"{root}/known")


def test_a_stage_that_is_trained_from_a_later_step_on(tmp_path: Path) -> None:
    """Notes beside the parts say that they are of one save, so different step counts are no sign of two."""
    run_on_ranks(trains_the_first_stage_later, 2, str(tmp_path))
    known = torch.load(tmp_path / "known")
    model = stages()
    optimizer = torch.optim.AdamW(model.parameters())
    xla_ckpt.load_checkpoint(tmp_path / "c.pt", None, model, optimizer)
    assert all(torch.equal(value, known["model"][name]) for name, value in model.state_dict().items())
    state = optimizer.state_dict()["state"]
    assert [float(state[n]["step"]) for n in range(4)] == [1, 1, 3, 3]
    for n, members in state.items():
        assert all(torch.equal(value, known["optimizer"]["state"][n][name]) for name, value in members.items())
    # Without a note nothing tells such parts from those of two saves.
    for file in ("c.pt_0", "c.pt_1"):
        (tmp_path / get_note_name(file)).unlink()
    with pytest.raises(CorruptCheckpointError, match="the parts are of two saves"):
        xla_ckpt.load_checkpoint(tmp_path / "c.pt", None, model, optimizer)
