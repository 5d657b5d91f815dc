"""Our checkpoint manager with torchtitan's own containers, on sharded models of real ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import xla_ckpt
from tests.integrations import titan_job
from tests.integrations.environment import needs
from tests.jobs import run_on_ranks
from tests.same import same

pytestmark = needs("torchtitan", "torch.distributed._local_tensor")


def job(folder: Path | str, ranks: int, steps: int, **options: Any) -> list[titan_job.Result]:
    return run_on_ranks(titan_job.run, ranks, str(folder), steps, options)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_run_goes_on_with_the_same_losses_and_loads_on_one_rank(tmp_path: Path, mode: str) -> None:
    unbroken = job(tmp_path / "a", 2, 6, async_mode=mode)
    assert xla_ckpt.list_tags(tmp_path / "a" / "checkpoint") == ["step-2", "step-4", "step-6"]
    job(tmp_path / "b", 2, 4, async_mode=mode)
    resumed = job(tmp_path / "b", 2, 6, async_mode=mode)
    for rank in range(2):
        assert not unbroken[rank][0]
        assert resumed[rank][:2] == (True, 100 * rank + 6)
        assert resumed[rank][2] == unbroken[rank][2][4:]
        assert same(resumed[rank][3], unbroken[rank][3])
    (alone,) = run_on_ranks(titan_job.alone, 1, str(tmp_path / "b"))
    assert alone[0]
    assert same(alone[3], unbroken[0][3])
    assert xla_ckpt.verify(tmp_path / "b" / "checkpoint").ok


@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_a_run_changes_its_manager_and_goes_on_with_the_same_losses(tmp_path: Path, first: str) -> None:
    unbroken = job(tmp_path / "a", 2, 6, theirs=True, reseed=True)
    losses: list[list[float]] = [[], []]
    for steps, theirs in ((2, first == "theirs"), (4, first == "ours"), (6, first == "theirs")):
        for rank, (resumed, at, more, _) in enumerate(job(tmp_path / "b", 2, steps, theirs=theirs, reseed=True)):
            assert resumed is (steps > 2)
            assert at == 100 * rank + steps
            losses[rank] += more
    assert losses == [rank[2] for rank in unbroken]


def test_what_a_killed_save_left_is_no_step_and_only_the_newest_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    job(tmp_path, 1, 8, keep_latest_k=2)
    assert xla_ckpt.list_tags(folder) == ["step-4", "step-6", "step-8"], "the last save removes none"
    # All of its files are there, and it has not got its name yet.
    shutil.copytree(folder / "step-8", folder / ".new-step-9")
    ((resumed, at, losses, _),) = job(tmp_path, 1, 12, keep_latest_k=2)
    assert (resumed, at, len(losses)) == (True, 12, 4)
    assert xla_ckpt.list_tags(folder) == ["step-8", "step-10", "step-12"]
