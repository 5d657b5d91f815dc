"""Parameters that two pipeline stages have: stored once, by whom the plan of the whole state says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.formats.writing import save_as_job
from xla_ckpt import Mesh

MESH = Mesh(pp=2, dp=2)


def parameter(stage: int, nbytes: int) -> torch.Tensor:
    return torch.arange(stage, stage + nbytes // 4, dtype=torch.float32)


def model_of(stage: int) -> dict[str, torch.Tensor]:
    """Three parameters that are small enough to be written whole by one replica each; the first one is tied."""
    return {
        "embed": parameter(0, 60_000),
        f"layer{stage}.a": parameter(stage + 1, 30_000),
        f"layer{stage}.b": parameter(stage + 11, 30_000),
    }


def state_of(rank: int) -> dict[str, Any]:
    return {
        "model": model_of(MESH.coordinates(rank)["pp"]),
        "extras": {"seen": {"samples": parameter(5, 100_000)}},
        "mesh": MESH,
    }


@pytest.mark.parametrize("layout", ["native", "xser", "pt"])
@pytest.mark.parametrize("async_save", [False, True], ids=["waiting", "async"])
def test_a_tied_parameter_does_not_change_who_writes_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, async_save: bool
) -> None:
    """An asynchronous save copies what the plan names before any rank hears what the other stages have."""
    reports = save_as_job(monkeypatch, MESH, tmp_path, "a", state_of, layout=layout, async_save=async_save)
    tree = xla_ckpt.restore(tmp_path, "a").tree
    wanted = {**model_of(0), **model_of(1)}
    assert tree["model"].keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(torch.as_tensor(tree["model"][name]), value), name
    assert torch.equal(torch.as_tensor(tree["extras"]["seen"]["samples"]), parameter(5, 100_000))
    verified = xla_ckpt.verify(tmp_path, "a")
    assert verified.problems == []
    stored = sum(value.nbytes for value in wanted.values()) + 100_000
    again = 0 if layout == "native" else 60_000  # each stage's files are whole, as neuronx-distributed has them
    assert sum(report.nbytes for report in reports) == verified.nbytes == stored + again
