"""Models on the device meta: no memory to load into, but all that a description needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

import xla_ckpt
from tests.formats.same import as_theirs


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, 8, bias=False), nn.LayerNorm(8)
        self.register_buffer("steps", torch.zeros(3))


class Doubling(Net):
    """A module with logic of its own in its load."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict[prefix + "steps"] = state_dict[prefix + "steps"] * 2
        super()._load_from_state_dict(state_dict, prefix, *args)


def trained(model: nn.Module) -> Any:
    """An optimizer after one step of the model."""
    decay = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = AdamW([{"params": decay}, {"params": others, "weight_decay": 0.0}])
    if next(model.parameters()).device.type != "meta":
        model.norm(model.up(torch.ones(1, 4))).pow(2).sum().backward()
        optimizer.step()
    return optimizer


def on_meta(kind: type[Net] = Net) -> Net:
    with torch.device("meta"):
        return kind()


LOADS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "module": ("model/steps", lambda root: xla_ckpt.load_checkpoint(root, "a", on_meta())),
    "not strict": ("model/steps", lambda root: xla_ckpt.load_checkpoint(root, "a", on_meta(), strict=False)),
    "dict": ("model/steps", lambda root: xla_ckpt.load_checkpoint(root, "a", on_meta().state_dict())),
    "module with load logic": ("model/steps", lambda root: xla_ckpt.load_checkpoint(root, "a", on_meta(Doubling))),
    "optimizer": (
        "optimizer/state/#0.0",
        lambda root: xla_ckpt.load_checkpoint(root, "nameless", optimizer=trained(on_meta())),
    ),
    "restore": ("model/steps", lambda root: xla_ckpt.restore(root, "a", {"model": on_meta().state_dict()})),
}


@pytest.mark.parametrize("how", LOADS)
def test_a_load_without_memory_is_refused(how: str, tmp_path: Path) -> None:
    model = Net()
    optimizer = trained(model)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer)
    xla_ckpt.save_checkpoint(tmp_path, "nameless", optimizer=optimizer)
    leaf, load = LOADS[how]
    with pytest.raises(xla_ckpt.UsageError, match=r"meta device.*model\.to_empty\(device=") as caught:
        load(tmp_path)
    assert caught.value.leaf == leaf


def test_one_buffer_on_meta_leaves_all_as_it_was(tmp_path: Path) -> None:
    model = Net()
    xla_ckpt.save_checkpoint(tmp_path, "a", model)
    other = Net()
    other.steps = torch.empty(3, device="meta")
    before = other.up.weight.detach().clone()
    with pytest.raises(xla_ckpt.UsageError, match="meta device") as caught:
        xla_ckpt.load_checkpoint(tmp_path, "a", other)
    assert caught.value.leaf == "model/steps"
    assert torch.equal(other.up.weight, before)


def test_to_empty_is_the_way_out(tmp_path: Path) -> None:
    model = Net()
    optimizer = trained(model)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer)
    other = on_meta().to_empty(device="cpu")
    again = AdamW([{"params": [other.up.weight]}, {"params": [*other.norm.parameters()]}])
    xla_ckpt.load_checkpoint(tmp_path, "a", other, again)
    assert all(torch.equal(v, other.state_dict()[k]) for k, v in model.state_dict().items())
    moments = optimizer.state[model.up.weight]["exp_avg"], again.state[other.up.weight]["exp_avg"]
    assert torch.equal(*moments)


@pytest.fixture
def theirs(tmp_path: Path) -> tuple[Path, Net, Any]:
    """A tag as neuronx-distributed leaves it, of two tp and two dp ranks, with its model and optimizer."""
    model = Net()
    optimizer = trained(model)
    xla_ckpt.save_checkpoint(tmp_path / "ours", "a", model, optimizer)
    rules = [("up.weight", ("tp", None))]
    xla_ckpt.convert(
        tmp_path / "ours", tmp_path / "nxd", "a", to="pt", mesh="dp=2,tp=2", shardings=rules, zero1=True
    )  # fmt: skip
    as_theirs(tmp_path / "nxd" / "a")
    return tmp_path / "nxd", model, optimizer


def test_a_model_on_meta_describes_what_is_converted(theirs: tuple[Path, Net, Any], tmp_path: Path) -> None:
    root, model, optimizer = theirs
    like = on_meta()
    about = {"model": like, "optimizer": trained(like)}
    assert xla_ckpt.explain(root, "a", mesh="dp=1", **about).ok
    xla_ckpt.convert(root, tmp_path / "back", "a", **about)
    tree = xla_ckpt.restore(tmp_path / "back", "a").tree
    assert all(torch.equal(v, tree["model"][k]) for k, v in model.state_dict().items())
    for name, parameter in model.named_parameters():
        assert torch.equal(tree["optimizer"]["state"][name]["exp_avg"], optimizer.state[parameter]["exp_avg"])
    report = xla_ckpt.export_hf(root, tmp_path / "hf", "a", model=like)
    assert report.arrays == 4


def test_a_load_of_their_tag_into_meta_is_refused_as_well(theirs: tuple[Path, Net, Any]) -> None:
    with pytest.raises(xla_ckpt.UsageError, match="meta device") as caught:
        xla_ckpt.load_checkpoint(theirs[0], "a", on_meta())
    assert caught.value.leaf == "model/steps"
