"""A program that used another library has its step beside its objects: a load gives it back as the user content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.state_dict import get_state_dict

import xla_ckpt


class Own:
    """A class of the program's own, which is pickled."""


BESIDE: dict[str, Any] = {"step": 7, "args": {"lr": 0.5, "names": ["a", "b"]}, "note": None}
"""The plain values."""


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(params=["dcp", "file", "converted"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """What another library wrote, and the same as a tag of ours."""
    model, optimizer = trained()
    if request.param == "file":
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, **BESIDE, "loss": torch.ones(1)}, tmp_path / "c.pt")
        return tmp_path / "c.pt"
    states = get_state_dict(model, optimizer)
    state = dict(zip(("model", "optimizer"), states, strict=True))
    stock.save({**state, **BESIDE, "loss": torch.ones(1)}, checkpoint_id=tmp_path / "runs" / "step_7")
    if request.param == "dcp":
        return tmp_path / "runs"
    xla_ckpt.convert(tmp_path / "runs", tmp_path / "ours", to="native")
    return tmp_path / "ours"


@pytest.mark.filterwarnings("ignore")
def test_a_load_gives_plain_values_back(path: Path) -> None:
    model, optimizer = trained()
    assert xla_ckpt.load_checkpoint(path, model=model, optimizer=optimizer).user_content == BESIDE
    assert torch.equal(xla_ckpt.Checkpoints(path).read("extras/loss"), torch.ones(1)), "arrays may be large"


@pytest.mark.filterwarnings("ignore")
def test_what_an_object_takes_is_not_given_back(path: Path) -> None:
    args = {"lr": 0.0, "names": [""]}
    loaded = xla_ckpt.load_checkpoint(path, model=trained()[0], extras={"args": args})
    assert loaded.user_content == {name: value for name, value in BESIDE.items() if name != "args"}
    assert args == BESIDE["args"]


def test_a_pickled_object_beside_them_stops_no_load(tmp_path: Path) -> None:
    model, _ = trained()
    torch.save({"model": model.state_dict(), "step": 7, "args": Own()}, tmp_path / "c.pt")
    assert xla_ckpt.load_checkpoint(tmp_path / "c.pt", model=model).user_content == {"step": 7}


def test_what_was_saved_as_user_content_is_all(tmp_path: Path) -> None:
    model, _ = trained()
    xla_ckpt.save_checkpoint(tmp_path, "a", model, user_content={"step": 1}, extras={"note": {"k": 1}})
    assert xla_ckpt.load_checkpoint(tmp_path, model=model).user_content == {"step": 1}


def test_there_may_be_none(tmp_path: Path) -> None:
    model, _ = trained()
    xla_ckpt.save_checkpoint(tmp_path, "a", model, extras={"rng": xla_ckpt.RNGState()})
    assert xla_ckpt.load_checkpoint(tmp_path, model=model).user_content is None
