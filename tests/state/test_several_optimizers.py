"""Several optimizers, given as a dict: stored as one, by parameter name, and dealt out again by a load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import xla_ckpt
from tests.jobs import run_on_ranks
from xla_ckpt.errors import IncompatibleCheckpointError, UsageError

Optimizers = dict[str, torch.optim.Optimizer]
Made = tuple[torch.nn.Module, Optimizers]


def net(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))


def muon_and_adamw(seed: int, *, turned: bool = False) -> Made:
    """Muon for matrices and AdamW for the rest; turned, in another order of all parameters."""
    model = net(seed)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [{"params": [p], "lr": 0.01 * len(p)} for p in model.parameters() if p.ndim == 1]
    if turned:
        matrices, rest = matrices[::-1], rest[::-1]
    found: Optimizers = {"matrices": torch.optim.Muon(matrices, lr=0.1), "rest": torch.optim.AdamW(rest)}
    return model, dict(reversed(found.items())) if turned else found


def gan(seed: int) -> Made:
    model = torch.nn.ModuleDict({"generator": net(seed), "critic": net(seed + 1)})
    return model, {n: torch.optim.Adam(m.parameters(), lr=0.1, betas=(0.5, 0.9)) for n, m in model.items()}


def adam_and_its_own(seed: int) -> Made:
    """One that loads its state itself, beside one of torch's."""
    model = net(seed)
    return model, {"own": Loading(model[0].parameters()), "adam": torch.optim.Adam(model[1].parameters())}


class Loading(torch.optim.SGD):
    """Counts its steps for itself, and takes its state over by code of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.state["count"] = {"steps": 0}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.state["count"]["steps"] += 1

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        assert self.state["count"]["steps"] > 0


def step(model: torch.nn.Module, several: Optimizers) -> float:
    parts = list(model.values()) if isinstance(model, torch.nn.ModuleDict) else [model]
    loss = torch.stack([(part(torch.ones(2, 4)) ** 2).mean() for part in parts]).sum()
    loss.backward()
    for optimizer in several.values():
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def trained(make: Callable[..., Made], **options: Any) -> Made:
    made = make(0, **options)
    for _ in range(3):
        step(*made)
    return made


@pytest.mark.parametrize("stale", [False, True], ids=["fresh", "over old state"])
@pytest.mark.parametrize("layout", ["native", "dcp", "pt"])
@pytest.mark.parametrize("make", [muon_and_adamw, gan, adam_and_its_own], ids=lambda make: make.__name__)
def test_a_run_goes_on(tmp_path: Path, make: Callable[..., Made], layout: str, stale: bool) -> None:
    model, several = trained(make)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, several, layout=layout)
    losses = [step(model, several) for _ in range(3)]
    other, target = make(5)
    if stale:
        step(other, target)
    xla_ckpt.load_checkpoint(tmp_path, "a", other, target)
    assert [step(other, target) for _ in range(3)] == losses


def test_parameters_and_optimizers_may_change_places(tmp_path: Path) -> None:
    model, several = trained(muon_and_adamw)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, several)
    other, target = muon_and_adamw(5, turned=True)
    xla_ckpt.load_checkpoint(tmp_path, "a", other, target)
    for name, parameter in model.named_parameters():
        mine, theirs = other.get_parameter(name), "matrices" if parameter.ndim == 2 else "rest"
        for key, value in several[theirs].state[parameter].items():
            assert torch.equal(target[theirs].state[mine][key], value), (name, key)
    assert [g["lr"] for g in target["rest"].param_groups] == [0.02, 0.04]
    assert step(model, several) == step(other, target)


def test_one_optimizer_becomes_two_and_two_become_one(tmp_path: Path) -> None:
    model = net(0)
    whole = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, {"all": whole})
    xla_ckpt.save_checkpoint(tmp_path, "one", model, whole)
    other = net(5)
    halves: Optimizers = {str(n): torch.optim.AdamW(other[n].parameters()) for n in (0, 1)}
    xla_ckpt.load_checkpoint(tmp_path, "one", other, halves)
    xla_ckpt.save_checkpoint(tmp_path, "two", other, halves)
    last = net(6)
    optimizer = torch.optim.AdamW(last.parameters())
    xla_ckpt.load_checkpoint(tmp_path, "two", last, optimizer)
    assert step(model, {"all": whole}) == step(other, halves) == step(last, {"all": optimizer})


def sharded(rank: int, root: Path) -> float:
    model = net(0)
    for part in (*model, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
    several: Optimizers = {str(n): torch.optim.AdamW(model[n].parameters(), lr=0.1) for n in (0, 1)}
    step(model, several)
    xla_ckpt.save_checkpoint(root, "a", model, several)
    return step(model, several)


def test_of_shards_to_whole_ones(tmp_path: Path) -> None:
    losses = run_on_ranks(sharded, 2, tmp_path)
    model = net(5)
    several: Optimizers = {str(n): torch.optim.AdamW(model[n].parameters()) for n in (0, 1)}
    xla_ckpt.load_checkpoint(tmp_path, "a", model, several)
    assert losses == [pytest.approx(step(model, several))] * 2
    assert all(group["lr"] == 0.1 for optimizer in several.values() for group in optimizer.param_groups)


def test_what_fits_no_optimizer_is_told_and_nothing_is_changed(tmp_path: Path) -> None:
    model, several = trained(muon_and_adamw)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, several)
    other, target = muon_and_adamw(5)
    before = [p.tolist() for p in other.parameters()]
    swapped: Optimizers = {
        "adamw": torch.optim.AdamW([p for p in other.parameters() if p.ndim == 2]),
        "rest": target["rest"],
    }
    with pytest.raises(IncompatibleCheckpointError, match="another kind of optimizer"):
        xla_ckpt.load_checkpoint(tmp_path, "a", other, swapped)
    with pytest.raises(IncompatibleCheckpointError, match="none of these does"):
        xla_ckpt.load_checkpoint(tmp_path, "a", other, {"matrices": target["matrices"]})
    assert [p.tolist() for p in other.parameters()] == before
    assert not target["matrices"].state
    loaded = xla_ckpt.load_checkpoint(tmp_path, "a", other, {"matrices": target["matrices"]}, strict=False)
    assert len(loaded.report.skipped) == 2
    assert len(target["matrices"].state) == 2


def shared(model: Any) -> Optimizers:
    return {"a": torch.optim.SGD(model.parameters(), 0.1), "b": torch.optim.SGD(model[0].parameters(), 0.1)}


def own_states(model: Any) -> Optimizers:
    return {str(n): Loading(model[n].parameters()) for n in (0, 1)}


def strangers(model: Any) -> Optimizers:
    return {"a": torch.optim.SGD(model[0].parameters(), 0.1), "b": torch.optim.LBFGS([torch.ones(3)])}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (shared, r"optimizer 'b' .* parameter 0.weight belongs to 'a', too"),
        (own_states, r"optimizer '1' .* state 'count' that belongs to no parameter, and another one has, too"),
        (strangers, r"optimizer 'b' .* parameter #0.0 is none of the model's"),
    ],
)
def test_what_cannot_be_one_is_refused(tmp_path: Path, make: Callable[[Any], Optimizers], text: str) -> None:
    model = net(0)
    with pytest.raises(UsageError, match=text):
        xla_ckpt.save_checkpoint(tmp_path, "a", model, make(model))
    assert not xla_ckpt.has_checkpoint(tmp_path)


def test_without_the_model_they_have_no_names(tmp_path: Path) -> None:
    model, several = trained(muon_and_adamw)
    with pytest.raises(UsageError, match="Give the model, too"):
        xla_ckpt.save_checkpoint(tmp_path, "a", optimizer=several)
    xla_ckpt.save_checkpoint(tmp_path, "a", optimizer=torch.optim.AdamW(model.parameters()))
    with pytest.raises(IncompatibleCheckpointError, match="numbers in place of the parameters' names"):
        xla_ckpt.load_checkpoint(tmp_path, "a", optimizer=several)


def test_what_only_has_groups_is_state_like_any_other(tmp_path: Path) -> None:
    given: dict[str, Any] = {"a": SimpleNamespace(param_groups=[1])}
    xla_ckpt.save_checkpoint(tmp_path, "a", net(0), given)
    target: dict[str, Any] = {"a": None}
    xla_ckpt.load_checkpoint(tmp_path, "a", optimizer=target, trust_pickle=True)
    assert target == given
