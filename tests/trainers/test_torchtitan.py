"""Our checkpoint manager with torchtitan's own containers, on sharded models of real ranks."""

from __future__ import annotations

from pathlib import Path

import torch

import xla_ckpt
from tests.jobs import run_on_ranks
from tests.trainers import titan_job
from tests.trainers.environment import needs

pytestmark = needs("torchtitan", "torch.distributed._local_tensor")


def job(folder: Path, ranks: int, steps: int) -> list[tuple[bool, int, list[float], dict[str, torch.Tensor]]]:
    return run_on_ranks(titan_job.run, ranks, str(folder), steps)


def test_a_run_goes_on_with_the_same_losses_and_loads_on_one_rank(tmp_path: Path) -> None:
    unbroken = job(tmp_path / "a", 2, 6)
    assert [xla_ckpt.list_tags(tmp_path / "a" / "checkpoint")] == [["step-2", "step-4", "step-6"]]
    job(tmp_path / "b", 2, 4)
    resumed = job(tmp_path / "b", 2, 6)
    for rank in range(2):
        assert not unbroken[rank][0]
        assert resumed[rank][:2] == (True, 100 * rank + 6)
        assert resumed[rank][2] == unbroken[rank][2][4:]
    (alone,) = run_on_ranks(titan_job.alone, 1, str(tmp_path / "b"))
    assert alone[0]
    for name, value in alone[3].items():
        assert torch.equal(value, unbroken[0][3][name]), name
    assert xla_ckpt.verify(tmp_path / "b" / "checkpoint").ok
