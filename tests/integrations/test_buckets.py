"""Runs under trainers whose root lies in a bucket, killed and resumed: the losses are as if unbroken."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import xla_ckpt
from tests.buckets.content import names_below
from tests.integrations import hf_job, lightning_job
from tests.integrations.environment import needs
from tests.integrations.test_resumed import compare
from tests.integrations.test_torchtitan import job, same

if TYPE_CHECKING:
    from tests.buckets.s3_server import S3Server


@pytest.fixture
def bucket(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of an empty bucket."""
    monkeypatch.setenv("XLA_CKPT_LEASE", "take")  # else who goes on would wait until the killed job is silent
    return f"s3://{s3.new_bucket()}"


@needs("accelerate")
def test_the_trainer_of_transformers(bucket: str, tmp_path: Path) -> None:
    tags = compare(tmp_path, hf_job.transformers, {}, {"kill_after": 11}, bucket)
    assert len(tags) == 2  # num_kept_ckpts


@needs("lightning", "torchdata")
def test_lightning(bucket: str, tmp_path: Path) -> None:
    options = {"every_n_steps": 2, "stateful": True}
    assert len(compare(tmp_path, lightning_job.lightning, options, {"kill_after": 11}, bucket)) == 2


@needs("lightning", "s3fs")
def test_the_checkpoint_io_of_lightning(bucket: str, tmp_path: Path) -> None:
    compare(tmp_path, lightning_job.lightning, {"io": True}, {"kill_after": 9}, bucket)


@needs("accelerate")
def test_accelerate(bucket: str, tmp_path: Path) -> None:
    tags = compare(tmp_path, lightning_job.accelerate, {}, {"kill_after": 9}, bucket)
    assert tags == ["step_3", "step_7", "step_11"]


@needs("torchtitan", "torch.distributed._local_tensor", "s3fs")
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_torchtitan(bucket: str, mode: str) -> None:
    options: dict[str, Any] = {"async_mode": mode, "keep_latest_k": 2}
    unbroken = job(f"{bucket}/a", 2, 10, **options)
    job(f"{bucket}/b", 2, 4, **options)
    resumed = job(f"{bucket}/b", 2, 10, **options)
    for rank in range(2):
        assert resumed[rank][:2] == (True, 100 * rank + 10)
        assert resumed[rank][2] == unbroken[rank][2][4:]
        assert same(resumed[rank][3], unbroken[rank][3])
    folder = f"{bucket}/b/checkpoint"
    tags = xla_ckpt.list_tags(folder)
    assert tags[-3:] == ["step-6", "step-8", "step-10"], "the last save removes none"
    assert "step-2" not in tags
    assert not names_below(f"{folder}/step-2"), "torchtitan deletes all of a step"
    assert all(xla_ckpt.verify(folder, tag).ok for tag in tags)


@needs("torchtitan", "torch.distributed._local_tensor", "s3fs")
def test_a_run_of_torchtitans_own_manager_goes_on_with_ours_and_back(bucket: str) -> None:
    unbroken = job(f"{bucket}/a", 2, 6, theirs=True, reseed=True)
    losses: list[list[float]] = [[], []]
    for steps, theirs in ((2, True), (4, False), (6, True)):
        for rank, (resumed, at, more, _) in enumerate(job(f"{bucket}/b", 2, steps, theirs=theirs, reseed=True)):
            assert (resumed, at) == (steps > 2, 100 * rank + steps)
            losses[rank] += more
    assert losses == [rank[2] for rank in unbroken]
