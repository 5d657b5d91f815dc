"""Tied weights: one parameter of two names in a job of one stage, and one of each name in the stages of a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.jobs import run_on_ranks

STAGES = (("embed", "first"), ("last", "head"))


def trained(names: tuple[str, ...], value: float, *, tied: bool = True) -> tuple[Any, Any]:
    """A model of these layers and its optimizer, after a step in which `embed` and `head` have the same gradient."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3, bias=False) for name in names})
    for layer in model.values():
        torch.nn.init.constant_(layer.weight, value)
    if tied and {"embed", "head"} <= model.keys():
        model["head"].weight = model["embed"].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    return model, optimizer


def states(model: Any, optimizer: Any) -> dict[str, list[list[float]]]:
    """Each weight, and its first moment, by all of its names."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: [p.flatten().tolist(), optimizer.state[p]["exp_avg"].flatten().tolist()] for name, p in named}


def saves_stages(rank: int, root: Path, layout: str) -> dict[str, list[list[float]]]:
    model, optimizer = trained(STAGES[rank], 0.5)
    xla_ckpt.save_checkpoint(root, "stages", model, optimizer, mesh="pp=2", layout=layout)
    return states(model, optimizer)


def loads_stages(rank: int, root: Path) -> dict[str, list[list[float]]]:
    model, optimizer = trained(STAGES[rank], 0.25)
    xla_ckpt.load_checkpoint(root, "whole", model, optimizer, mesh="pp=2")
    return states(model, optimizer)


@pytest.mark.parametrize("layout", ["native", "xser", "pt"])
def test_from_stages_to_one_and_back(tmp_path: Path, layout: str) -> None:
    want: dict[str, Any] = {}
    for stage in run_on_ranks(saves_stages, 2, tmp_path, layout):
        want |= stage
    model, optimizer = trained(("embed", "first", "last", "head"), 0.25)
    report = xla_ckpt.load_checkpoint(tmp_path, "stages", model, optimizer).report
    assert states(model, optimizer) == want
    assert report.skipped == ()
    xla_ckpt.save_checkpoint(tmp_path, "whole", model, optimizer, layout=layout)
    got: dict[str, Any] = {}
    for stage in run_on_ranks(loads_stages, 2, tmp_path):
        got |= stage
    assert got == want


def test_the_name_of_the_parameter_may_be_the_other_one(tmp_path: Path) -> None:
    model, optimizer = trained(("embed", "first", "last", "head"), 0.5)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer)
    other, mine = trained(("head", "first", "last", "embed"), 0.25)  # whose first name is head
    xla_ckpt.load_checkpoint(tmp_path, "a", other, mine)
    assert states(other, mine) == states(model, optimizer)


def test_parameters_that_are_no_longer_one_do_not_share_a_state(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", *trained(("embed", "first", "last", "head"), 0.5))
    for order in (("embed", "first", "last", "head"), ("head", "first", "last", "embed")):
        model, optimizer = trained(order, 0.25, tied=False)
        with pytest.raises(xla_ckpt.IncompatibleCheckpointError) as caught:
            xla_ckpt.load_checkpoint(tmp_path, "a", model, optimizer)
        assert "state/head.weight: the optimizer has this parameter, the stored one does not" in str(caught.value)
