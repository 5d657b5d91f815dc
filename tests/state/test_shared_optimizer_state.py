"""State that an optimizer keeps under keys of its own, for no parameter: `optimizer.state["k"]`, as madgrad does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xla_ckpt
from tests import xla
from tests.formats.gold import as_rank
from tests.formats.same import as_theirs
from tests.formats.writing import as_kwargs, save_as_job, toy
from xla_ckpt import Mesh
from xla_ckpt.formats.nxd.zero1_conversion import convert_zero_checkpoints

xla.begin()

LAYOUTS = pytest.mark.parametrize("layout", ["native", "xser", "pt", "smp"])
DEVICES = pytest.mark.parametrize("device", xla.DEVICES)


class Averaging(torch.optim.Optimizer):
    """Steps by a running mean of the gradient's norm, which is kept for all parameters together."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        device = self.param_groups[0]["params"][0].device
        self.state["k"] = torch.zeros(1, dtype=torch.int64, device=device)  # there from the beginning
        self.state["mode"] = "fresh"

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).sum()
        mean = self.state["mean"] if "mean" in self.state else torch.zeros_like(norm)
        self.state["mean"] = mean * 0.5 + norm * 0.5  # not there before the first step
        history = self.state["history"]["norms"] if "history" in self.state else []
        self.state["history"] = {"norms": [*history, norm], "seen": len(history) + 1, "span": (0.5, "ema", None)}
        self.state["mode"] = "warm"
        self.state["k"] += 1
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                    p.sub_(self.state[p]["sum"] * group["lr"] / (self.state["k"] + self.state["mean"]))


class Strict(Averaging):
    """Loads by code of its own, as many optimizers do."""

    def load_state_dict(self, state_dict: Any) -> None:
        self.loaded = sorted(k for k in state_dict["state"] if isinstance(k, str))
        super().load_state_dict(state_dict)


def made(device: str, kind: Callable[..., Averaging] = Averaging, seed: int = 0) -> tuple[torch.nn.Module, Averaging]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2).to(device)
    return model, kind(model.parameters())


def train(model: torch.nn.Module, optimizer: Averaging, steps: int) -> None:
    for _ in range(steps):
        for p in model.parameters():
            p.grad = p.detach() * 2 + 1
        optimizer.step()
        xla.sync()


def plain(value: Any) -> Any:
    """Comparable, with type, element type and device of every tensor."""
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), value.device.type, value.tolist()
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [plain(v) for v in value]
    return value


def shared(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {k: plain(v) for k, v in optimizer.state.items() if isinstance(k, str)}


@LAYOUTS
@DEVICES
@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("kind", [Averaging, Strict])
def test_it_comes_back_and_training_goes_on(
    tmp_path: Path, layout: str, device: str, async_save: bool, kind: type[Averaging]
) -> None:
    model, optimizer = made(device, kind)
    train(model, optimizer, 3)
    before = shared(optimizer)
    assert sorted(before) == ["history", "k", "mean", "mode"]
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer, layout=layout, async_save=async_save).result()
    assert shared(optimizer) == before
    train(model, optimizer, 2)
    for steps in (0, 1, 4):  # what the optimizer has before the load, and how long its history is, does not matter
        again, fresh = made(device, kind, seed=7)
        train(again, fresh, steps)
        xla_ckpt.load_checkpoint(tmp_path, "a", again, fresh)
        assert shared(fresh) == before
        train(again, fresh, 2)
        assert shared(fresh) == shared(optimizer)
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(again.parameters(), model.parameters(), strict=True))


@LAYOUTS
def test_restore_has_it(tmp_path: Path, layout: str) -> None:
    model, optimizer = made("cpu")
    train(model, optimizer, 2)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer, layout=layout)
    tree = xla_ckpt.restore(tmp_path, "a").tree
    assert {k: plain(v) for k, v in tree["optimizer"]["state"].items() if k in shared(optimizer)} == shared(optimizer)
    like = {"optimizer": {"state": {"k": torch.zeros(1, dtype=torch.int64)}}}
    assert xla_ckpt.restore(tmp_path, "a", like).tree["optimizer"]["state"]["k"].tolist() == [2]


def test_it_comes_back_where_parameters_have_no_names(tmp_path: Path) -> None:
    model, optimizer = made("cpu")
    train(model, optimizer, 2)
    xla_ckpt.save_checkpoint(tmp_path, "a", optimizer=optimizer)
    xla_ckpt.save_checkpoint(tmp_path, "b", optimizer=optimizer.state_dict())
    for tag in "ab":
        _, fresh = made("cpu", seed=7)
        xla_ckpt.load_checkpoint(tmp_path, tag, optimizer=fresh)
        assert shared(fresh) == shared(optimizer)


def test_what_the_optimizer_has_there_does_not_matter(tmp_path: Path) -> None:
    """Shared state may have another shape, may be another state's tensor, or a parameter."""
    model, optimizer = made("cpu")
    train(model, optimizer, 1)
    optimizer.state["k"] = torch.arange(5, dtype=torch.int32)
    optimizer.state["slow"] = model.weight.detach() * 3
    optimizer.state["slower"] = model.weight.detach() * 5
    optimizer.state["bytes"] = np.arange(4, dtype=np.uint8)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer)
    again, fresh = made("cpu", seed=7)
    fresh.state["slow"] = fresh.state["slower"] = again.weight.detach()
    fresh.state["bytes"] = torch.zeros(4, dtype=torch.uint8)
    fresh.state["k"] = np.arange(5, dtype=np.int32)
    xla_ckpt.load_checkpoint(tmp_path, "a", again, fresh)
    assert torch.equal(again.weight, model.weight)
    assert isinstance(fresh.state["bytes"], np.ndarray)
    assert fresh.state.pop("bytes").tolist() == optimizer.state.pop("bytes").tolist()
    assert shared(fresh) == shared(optimizer)


def test_parts_that_do_not_fit_leave_it_alone(tmp_path: Path) -> None:
    model, optimizer = made("cpu")
    train(model, optimizer, 2)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer)
    other = torch.nn.Sequential()
    other.weight = torch.nn.Parameter(torch.zeros(2, 3))
    other.k = torch.nn.Parameter(torch.zeros(2))  # has the name of the stored key, and no stored state
    fresh = Averaging(other.parameters())
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError):
        xla_ckpt.load_checkpoint(tmp_path, "a", other, fresh)
    xla_ckpt.load_checkpoint(tmp_path, "a", other, fresh, strict=False)
    assert shared(fresh) == shared(optimizer)
    assert other.k not in fresh.state
    assert torch.equal(fresh.state[other.weight]["sum"], optimizer.state[model.weight]["sum"])


@pytest.mark.parametrize(
    ("key", "message"), [("weight", "under the name of a parameter"), (1, "under a number"), (True, "under a number")]
)
def test_keys_that_would_be_lost_are_refused(tmp_path: Path, key: Any, message: str) -> None:
    model, optimizer = made("cpu")
    train(model, optimizer, 1)
    optimizer.state[key] = torch.ones(2)
    with pytest.raises(xla_ckpt.UnsupportedStateError, match=message):
        xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer)
    assert not xla_ckpt.list_tags(tmp_path)


@pytest.mark.parametrize("layout", ["xser", "pt"])
def test_it_is_where_torch_puts_it_and_loads_without_the_manifest(tmp_path: Path, layout: str) -> None:
    model, optimizer = made("cpu")
    train(model, optimizer, 2)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer, layout=layout)
    as_theirs(tmp_path / "a")
    want = shared(optimizer)
    want["history"]["span"] = (list, want["history"]["span"][1])  # these files have lists only
    if layout == "pt":
        file = torch.load(tmp_path / "a" / "optim" / "dp_rank_00_tp_rank_00_pp_rank_00.pt", weights_only=True)
        _, theirs = made("cpu", seed=7)
        theirs.load_state_dict(file)
        assert shared(theirs) == want
    again, fresh = made("cpu", seed=7)
    xla_ckpt.load_checkpoint(tmp_path, "a", again, fresh)
    assert shared(fresh) == want
    assert xla_ckpt.restore(tmp_path, "a").tree["optimizer"]["state"]["k"].tolist() == [2]


def of_two_stages() -> tuple[torch.nn.Module, Averaging]:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4), "b": torch.nn.Linear(4, 4)})
    return model, Averaging(model.parameters())


@pytest.mark.parametrize("layout", ["xser", "pt"])
def test_it_goes_along_through_conversions(tmp_path: Path, layout: str) -> None:
    """To files of two pipeline stages with their rows dealt out, and from there to our own, and to other ranks."""
    model, optimizer = of_two_stages()
    train(model, optimizer, 1)
    old, new, back = tmp_path / "old", tmp_path / "new", tmp_path / "back"
    split = [("weight$", ("tp", None))]
    xla_ckpt.save_checkpoint(old, "t", model, optimizer)
    xla_ckpt.convert(old, new, to=layout, mesh="pp=2,dp=2,tp=2", shardings=split, pipeline_cuts=["a"], zero1=True)
    again, fresh = of_two_stages()
    xla_ckpt.load_checkpoint(new, "t", again, fresh)
    assert shared(fresh) == shared(optimizer)
    as_theirs(new / "t")
    for tree in (torch.load(f, weights_only=True) for f in (new / "t" / "optim").glob("dp_rank*.pt") if layout == "pt"):
        assert tree["base_state"]["k"].tolist() == [1]
    xla_ckpt.convert(new, back, to="native", model=model, optimizer=optimizer, shardings=split)
    again, fresh = of_two_stages()
    xla_ckpt.load_checkpoint(back, "t", again, fresh)
    assert fresh.state["k"].tolist() == [1]
    assert plain(fresh.state["mean"]) == plain(optimizer.state["mean"])
    assert torch.equal(fresh.state[again["b"].weight]["sum"], optimizer.state[model["b"].weight]["sum"])


@pytest.mark.parametrize("layout", ["xser", "pt"])
def test_the_converter_of_zero1_files_takes_it_along(tmp_path: Path, layout: str) -> None:
    model, optimizer = of_two_stages()
    train(model, optimizer, 1)
    xla_ckpt.save_checkpoint(tmp_path / "old", "t", model, optimizer)
    xla_ckpt.convert(tmp_path / "old", tmp_path / "new", to=layout, mesh="dp=2", zero1=True)
    as_theirs(tmp_path / "new" / "t")
    convert_zero_checkpoints(tmp_path / "new" / "t", tmp_path / "four" / "t", dp_size=4)
    for name in ("done", "checkpoint"):
        (tmp_path / "four" / "t" / name).touch()
    again, fresh = of_two_stages()
    xla_ckpt.load_checkpoint(tmp_path / "four", "t", again, fresh)
    assert fresh.state["k"].tolist() == [1]
    assert torch.equal(fresh.state[again["b"].weight]["sum"], optimizer.state[model["b"].weight]["sum"])


@LAYOUTS
def test_ranks_of_a_job_keep_one_copy(tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh(dp=2, tp=2)

    def state(rank: int) -> dict[str, Any]:
        model, optimizer = made("cpu")
        train(model, optimizer, 2)
        return {"model": model, "optimizer": optimizer}

    save_as_job(monkeypatch, mesh, tmp_path, "a", state, layout=layout)
    _, want = state(0).values()
    for rank in range(mesh.size):
        with monkeypatch.context() as patch:
            as_rank(patch, mesh, rank)
            model, optimizer = made("cpu", seed=7)
            xla_ckpt.load_checkpoint(tmp_path, "a", model, optimizer)
            assert shared(optimizer) == shared(want)


@LAYOUTS
def test_zero1_keeps_it_in_the_wrapped_optimizer(tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh(dp=2, tp=2)

    def state(rank: int) -> dict[str, Any]:
        made = as_kwargs(toy(mesh, rank, zero=True))
        made["optimizer"].base_optimizer.state |= {"k": torch.arange(3), "mode": "warm"}
        return made

    save_as_job(monkeypatch, mesh, tmp_path, "a", state, layout=layout)
    for rank in range(mesh.size):
        with monkeypatch.context() as patch:
            as_rank(patch, mesh, rank)
            model, optimizer = toy(mesh, rank, zero=True, blank=True)
            xla_ckpt.load_checkpoint(tmp_path, "a", model, optimizer)
            assert shared(optimizer.base_optimizer) == {"k": plain(torch.arange(3)), "mode": "warm"}
            model, optimizer = toy(mesh, rank, blank=True)
            xla_ckpt.load_checkpoint(tmp_path, "a", model, optimizer)
            assert shared(optimizer) == {"k": plain(torch.arange(3)), "mode": "warm"}


class Scaling:
    """A wrapper that has kept state for all parameters since its first step, and loads it by code of its own: as TRAC.

    Before that, nothing tells it from a wrapper that adds nothing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[Any]:
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        return self.optimizer.state

    def step(self) -> None:
        parameters = self.param_groups[0]["params"]
        kept = self.state.setdefault("first", {p: p.detach().clone() for p in parameters})
        self.optimizer.step()
        with torch.no_grad():
            for p in parameters:
                p.lerp_(kept[p], 0.5)

    def _renamed(self, state: Any, keys: dict[Any, Any]) -> Any:
        if "first" not in state["state"]:
            return state
        first = {keys[key]: value for key, value in state["state"]["first"].items()}
        return {**state, "state": {**state["state"], "first": first}}

    def state_dict(self) -> Any:
        numbers = {p: i for i, p in enumerate(self.param_groups[0]["params"])}
        return self._renamed(self.optimizer.state_dict(), numbers)

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(self._renamed(state, dict(enumerate(self.param_groups[0]["params"]))))


@pytest.mark.parametrize("stale", [0, 1])
def test_state_that_a_wrapper_has_since_its_first_step_is_given_to_the_wrapper(tmp_path: Path, stale: int) -> None:
    def trained(steps: int) -> tuple[torch.nn.Module, Any]:
        torch.manual_seed(steps)
        model = torch.nn.Linear(3, 2)
        optimizer: Any = Scaling(torch.optim.AdamW(model.parameters(), lr=0.1))
        train(model, optimizer, steps)
        return model, optimizer

    model, optimizer = trained(2)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer)
    other, target = trained(stale)
    xla_ckpt.load_checkpoint(tmp_path, "a", other, target)
    train(model, optimizer, 2)
    train(other, target, 2)
    assert torch.equal(model.weight, other.weight)
