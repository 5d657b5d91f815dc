"""torch's own wrappers around a model, DistributedDataParallel and torch.compile: tags have the model's own names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel

import xla_ckpt
from tests.jobs import run_on_ranks


class Step(torch.nn.Module):
    """A module of the program's own whose one member is called as in torch's wrappers."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def trained(wrap: Any, value: float) -> tuple[torch.nn.Module, torch.nn.Module, torch.optim.Optimizer]:
    inner = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    model = wrap(inner)
    optimizer = torch.optim.AdamW(model.parameters())
    for i, p in enumerate(inner.parameters()):
        torch.nn.init.constant_(p, value + i)
        optimizer.state[p] = {"step": torch.tensor(value), **{k: torch.full_like(p, value - i) for k in MOMENTS}}
    return model, inner, optimizer


MOMENTS = ("exp_avg", "exp_avg_sq")


def held(inner: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    moments = [optimizer.state[p][k].tolist() for p in inner.parameters() for k in MOMENTS]
    return [[v.tolist() for v in inner.state_dict().values()], moments]


def compiled(module: torch.nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def plain(module: torch.nn.Module) -> Any:
    return module


WRAPPERS = (plain, DistributedDataParallel, compiled, lambda m: compiled(DistributedDataParallel(m)))


def saves_and_loads(rank: int, root: Path) -> None:
    for n, wrap in enumerate(WRAPPERS):
        model, inner, optimizer = trained(wrap, 3.0)
        xla_ckpt.save_checkpoint(root, f"native{n}", model, optimizer)
        xla_ckpt.save_checkpoint(root, f"dcp{n}", model, optimizer, layout="dcp")
        for layout in ("native", "dcp"):
            assert list(xla_ckpt.restore(root, f"{layout}{n}").tree["model"]) == list(inner.state_dict())
            for other in WRAPPERS:
                target, bare, its_optimizer = trained(other, 0.0)
                xla_ckpt.load_checkpoint(root, f"{layout}{n}", target, its_optimizer)
                assert held(bare, its_optimizer) == held(inner, optimizer)
        into = dict(zip(("model", "optimizer"), get_state_dict(*trained(wrap, 0.0)[::2]), strict=True))
        dcp.load(into, checkpoint_id=root / f"dcp{n}")
        assert [v.tolist() for v in into["model"].values()] == held(inner, optimizer)[0]


@pytest.mark.timeout(600)
def test_names_are_those_of_the_model(tmp_path: Path) -> None:
    run_on_ranks(saves_and_loads, 2, tmp_path)


def loads_tags_of_earlier_versions(rank: int, root: Path) -> None:
    # Until 0.1 a tag had DistributedDataParallel's names: those of a module of the program's own with such a member.
    model, inner, optimizer = trained(Step, 3.0)
    xla_ckpt.save_checkpoint(root, "a", model, optimizer)
    for wrap in (DistributedDataParallel, Step):
        target, bare, its_optimizer = trained(wrap, 0.0)
        xla_ckpt.load_checkpoint(root, "a", target, its_optimizer)
        assert held(bare, its_optimizer) == held(inner, optimizer)
    target, _, its_optimizer = trained(plain, 0.0)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError):
        xla_ckpt.load_checkpoint(root, "a", target, its_optimizer)


def test_tags_with_the_names_of_a_wrapper_load_into_it(tmp_path: Path) -> None:
    run_on_ranks(loads_tags_of_earlier_versions, 2, tmp_path)
