"""An optimizer that is loaded alone, with the names and splits of its model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import xla_ckpt
from xla_ckpt.state.model_view import NamesOnly


def trained(value: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 3))
    model[1].weight = torch.nn.Parameter(model[0].weight.detach().t().contiguous())
    optimizer = torch.optim.AdamW(model.parameters())
    for i, p in enumerate(model.parameters()):
        torch.nn.init.constant_(p, value + i)
        optimizer.state[p] = {
            "step": torch.tensor(value), "exp_avg": torch.full_like(p, value - i), "exp_avg_sq": torch.full_like(p, i)
        }  # fmt: skip
    return model, optimizer


def numbers(optimizer: torch.optim.Optimizer) -> list[list[float]]:
    return [s["exp_avg"].flatten().tolist() for s in optimizer.state_dict()["state"].values()]


@pytest.mark.parametrize("form", ["native", "one file"])
def test_the_optimizer_is_loaded_and_the_model_stays_as_it_is(tmp_path: Path, form: str) -> None:
    model, optimizer = trained(7)
    path, tag = str(tmp_path / "run"), "a"
    if form == "native":
        xla_ckpt.save_checkpoint(path, tag, model, optimizer)
    else:
        path, tag = f"{tmp_path}/all.pt", None
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    other, its = trained(2)
    xla_ckpt.load_checkpoint(path, tag, NamesOnly(other), its)
    assert numbers(its) == numbers(optimizer)
    assert [p.flatten()[0].item() for p in other.parameters()] == [2, 3, 4, 5]


def test_a_checkpoint_without_a_model_will_do(tmp_path: Path) -> None:
    model, optimizer = trained(7)
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "all.pt")
    other, its = trained(2)
    xla_ckpt.load_checkpoint(tmp_path / "all.pt", model=NamesOnly(other), optimizer=its)
    assert numbers(its) == numbers(optimizer)


def test_a_parameter_that_is_not_stored_is_named(tmp_path: Path) -> None:
    model, optimizer = trained(7)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer)
    larger = torch.nn.Sequential(*model, torch.nn.Linear(3, 3))
    its = torch.optim.AdamW(larger.parameters())
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"2\.weight"):
        xla_ckpt.load_checkpoint(tmp_path, "a", NamesOnly(larger), its)
