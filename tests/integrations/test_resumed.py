"""Runs under trainers that are killed or told to end, and go on in a new process: the losses are as if unbroken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import xla_ckpt
from tests.integrations import hf_job, lightning_job
from tests.integrations.environment import needs
from tests.jobs import run_alone
from tests.nursery import ProcessError

KILLED = "exit code -9"


def compare(
    tmp_path: Path, job: Callable[..., Any], options: dict[str, Any], broken: dict[str, Any], roots: str = ""
) -> list[str]:
    """Run it unbroken; and broken, and resumed. The roots lie in `roots`, or beside the logs. The tags at the end."""
    a, b = (f"{roots or tmp_path}/{name}" for name in "ab")
    log_a, log_b = (str(tmp_path / name) for name in ("log_a", "log_b"))
    unbroken = run_alone(job, a, log_a, options)
    if "kill_after" in broken:
        with pytest.raises(ProcessError, match=KILLED):
            run_alone(job, b, log_b, {**options, **broken})
    else:
        assert len(run_alone(job, b, log_b, {**options, **broken})) < len(unbroken)
    before = xla_ckpt.list_tags(b)
    assert before
    resumed = run_alone(job, b, log_b, options)
    assert resumed == unbroken
    tags = xla_ckpt.list_tags(b)
    assert tags != before
    assert all(xla_ckpt.verify(b, tag).ok for tag in tags)
    return tags


@needs("accelerate")
@pytest.mark.parametrize(
    ("options", "broken"),
    [
        ({}, {"kill_after": 11}),  # inside of the second epoch
        ({"save_strategy": "epoch", "eval_strategy": "steps", "eval_steps": 3}, {"kill_after": 14}),
        (
            {"accelerator_config": {"use_seedable_sampler": False}, "gradient_accumulation_steps": 2, "save_steps": 5},
            {"stop_after": 4},  # by a preemption guard; the plain sampler draws its order from torch's generator
        ),
        pytest.param({"lora": {}}, {"kill_after": 11}, marks=needs("peft")),
        pytest.param({"lora": {"only": "adapters"}}, {"kill_after": 11}, marks=needs("peft")),
    ],
    ids=["killed in an epoch", "killed after an epoch", "told to end", "a model of peft's", "adapters alone"],
)
def test_the_trainer_of_transformers(options: dict[str, Any], broken: dict[str, Any], tmp_path: Path) -> None:
    tags = compare(tmp_path, hf_job.transformers, options, broken)
    assert len(tags) == 2  # num_kept_ckpts
    assert all(tag.startswith("checkpoint-") for tag in tags)


@needs("lightning")
@pytest.mark.parametrize(
    ("options", "broken"),
    [
        ({}, {"kill_after": 9}),
        pytest.param({"every_n_steps": 2, "stateful": True}, {"kill_after": 11}, marks=needs("torchdata")),
        ({"io": True}, {"kill_after": 9}),
    ],
    ids=["killed after an epoch", "killed in an epoch", "a CheckpointIO"],
)
def test_lightning(options: dict[str, Any], broken: dict[str, Any], tmp_path: Path) -> None:
    compare(tmp_path, lightning_job.lightning, options, broken)


@needs("accelerate")
def test_accelerate(tmp_path: Path) -> None:
    assert compare(tmp_path, lightning_job.accelerate, {}, {"kill_after": 9}) == ["step_3", "step_7", "step_11"]
