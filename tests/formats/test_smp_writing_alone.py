"""SMP's files as this library writes them, when the manifest is taken away: what they say themselves is enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.formats.same import as_theirs
from tests.formats.test_smp_writing import saved
from tests.formats.writing import as_job, as_kwargs, save_as_job, toy
from tests.same import differences
from tests.topology.state import differences as unlike_toy
from xla_ckpt import Mesh

MESHES = [Mesh(dp=2), Mesh(tp=2), Mesh(pp=2), Mesh(pp=2, dp=2, tp=2), Mesh(pp=2, tp=4)]
LOADS = [Mesh(), Mesh(dp=2, tp=2), Mesh(tp=4), Mesh(pp=2, tp=2)]


def loaded(monkeypatch: pytest.MonkeyPatch, root: Path, tag: str, mesh: Mesh, *, zero: bool = False) -> None:
    """Load it as a job over a mesh, and compare every value."""
    made = [toy(mesh, rank, zero=zero, blank=True) for rank in range(mesh.size)]

    def load(rank: int) -> list[str]:
        scheduler: dict[str, Any] = {"last_epoch": 0}
        content = xla_ckpt.load_checkpoint(root, tag, *made[rank], scheduler).user_content
        masters = True if zero else None
        found = unlike_toy(made[rank][1], made[rank][0].by_name, mesh, rank, masters=masters)
        return (
            found if (content, scheduler) == ({"step": 7}, {"last_epoch": 3}) else [*found, f"{content}, {scheduler}"]
        )

    assert as_job(monkeypatch, mesh, "load", load) == [[]] * mesh.size, (mesh, zero)


@pytest.mark.parametrize(
    "mesh", [Mesh(dp=2), Mesh(tp=2), Mesh(pp=2), Mesh(pp=2, dp=2, tp=2), Mesh(pp=2, tp=4)], ids=str
)
def test_they_load_on_any_topology(mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding, strides, numbers over all stages: nothing of it has to be known by the program."""
    as_theirs(saved(monkeypatch, mesh, tmp_path))
    assert xla_ckpt.list_tags(tmp_path) == ["a_partial"]
    assert xla_ckpt.verify(tmp_path, "a_partial").ok
    for other in LOADS:
        loaded(monkeypatch, tmp_path, "a_partial", other)


@pytest.mark.parametrize("mesh", [Mesh(dp=2, tp=2), Mesh(pp=2, dp=2), Mesh(dp=3)], ids=str)
def test_so_do_rows_that_zero1_dealt_out(mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = [toy(mesh, rank, zero=True) for rank in range(mesh.size)]
    more = {"user_content": {"step": 7}, "scheduler": {"last_epoch": 3}}
    save_as_job(monkeypatch, mesh, tmp_path, "a", lambda rank: {**as_kwargs(states[rank]), **more}, layout="smp")
    as_theirs(tmp_path / "a")
    assert xla_ckpt.verify(tmp_path, "a").ok
    loaded(monkeypatch, tmp_path, "a", Mesh(), zero=True)
    loaded(monkeypatch, tmp_path, "a", Mesh(dp=2), zero=True)
    loaded(monkeypatch, tmp_path, "a", mesh, zero=True)


def everything(root: Path, tag: str) -> Any:
    return xla_ckpt.restore(root, tag).tree


def test_without_a_program_they_are_read_whole_and_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`restore` has no model: names and splits are in the files."""
    mesh = Mesh(pp=2, dp=2, tp=2)
    folder = saved(monkeypatch, mesh, tmp_path)
    wanted = everything(tmp_path, "a_partial")
    as_theirs(folder)
    found = everything(tmp_path, "a_partial")
    config = found.pop("extras")["smp_config"]
    assert (config["pipeline_parallel_degree"], config["tensor_parallel_degree"]) == (2, 2)
    assert not differences(wanted, found, order=False)
    xla_ckpt.convert(tmp_path, tmp_path / "b", "a_partial", to="native")
    again = everything(tmp_path / "b", "a")
    assert again.pop("extras")["smp_config"] == config
    assert not differences(wanted, again, order=False)


def test_master_weights_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the optimizer has no states, which would say whose they are."""
    weights = {"a": torch.randn(3, 4), "b": torch.randn(5)}
    optimizer = {
        "state": {},
        "param_groups": [{"lr": 1.0, "params": ["b"]}, {"lr": 2.0, "params": ["a"]}],
        "master": {name: value.double() for name, value in weights.items()},
    }
    xla_ckpt.save_checkpoint(tmp_path, "a", weights, optimizer, layout="smp")
    held = torch.load(tmp_path / "a/fp16_states_0_0.pt", weights_only=True)
    assert torch.equal(held["fp32_from_fp16"][0][0], weights["b"].double())
    as_theirs(tmp_path / "a")
    found = everything(tmp_path, "a")
    assert torch.equal(found["optimizer"]["master"]["a"], weights["a"].double())
    assert torch.equal(found["optimizer"]["master"]["b"], weights["b"].double())
    assert found["extras"]["fp16_states"] == {
        "loss_scaler": None, "dynamic_loss_scale": False, "overflow": False, "first_closure_call_this_step": True,
    }  # fmt: skip
    xla_ckpt.convert(tmp_path, tmp_path, "a", to="smp", as_tag="again")
    again = torch.load(tmp_path / "again/fp16_states_0_0.pt", weights_only=True)
    assert not differences(held, again)
