"""Loads that code of the program refuses: its `load_state_dict` raises when all bytes are read and verified already."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.jobs import run_on_ranks


class Own:
    """An optimizer with a structure of its own, which takes its state in two steps, and may refuse it in between."""

    def __init__(self, model: Any, value: float, refuses: bool = False) -> None:
        self.model = model
        self.first, self.second = {"m": torch.full((2,), value)}, value
        self.weights = model.weight.detach().clone()
        self.refuses = refuses

    def state_dict(self) -> Any:
        return {"first": self.first, "second": self.second}

    def load_state_dict(self, state: Any) -> None:
        self.first["m"].copy_(state["first"]["m"])
        if self.refuses and state["second"] != 1.0:
            raise KeyError("base_state")
        self.second = state["second"]
        self.weights = self.model.weight.detach().clone()  # as torch_xla's ZeRO-1 makes its shards anew

    def step(self) -> None:
        pass


class Picky(torch.optim.AdamW):
    """An optimizer of torch's structure, which looks at what it loads."""

    refuses = False

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        if self.refuses:
            raise ValueError("not with me")


class Loader:
    """A data loader."""

    def __init__(self, at: int, refuses: bool = False) -> None:
        self.at, self.refuses = at, refuses

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]
        if self.refuses and self.at != 1:
            raise OSError(5, "the data is gone")


class Extra(torch.nn.Linear):
    """A module with state that is no array."""

    note, refuses = "", False

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]
        if self.refuses and self.note == "stored":
            raise RuntimeError("an old note")


def program(value: float, *, own: bool = False) -> dict[str, Any]:
    """A model, an optimizer with state, a scheduler, a data loader."""
    model = Extra(2, 3)
    model.note = "stored" if value == 2.0 else "mine"
    torch.nn.init.constant_(model.weight, value)
    torch.nn.init.constant_(model.bias, value)
    stepping = Picky(model.parameters(), lr=value)
    model(torch.ones(1, 2)).sum().backward()
    stepping.step()
    scheduler = torch.optim.lr_scheduler.LambdaLR(stepping, lambda n: 1 / (n + value))
    optimizer = Own(model, value) if own else stepping
    extras = {"data": Loader(int(value)), "rng": xla_ckpt.RNGState()}
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "extras": extras}


def frozen(found: dict[str, Any]) -> dict[str, Any]:
    """All of it as of now."""
    members = {k: v for k, v in found.items() if k != "extras"} | found["extras"]
    return {k: copy.deepcopy(v.state_dict()) for k, v in members.items()}


def differing(one: Any, other: Any, path: str = "") -> list[str]:
    if isinstance(one, dict):
        return [d for k in {*one, *other} for d in differing(one.get(k), other.get(k), f"{path}/{k}")]
    if isinstance(one, list | tuple):
        return [d for i, (a, b) in enumerate(zip(one, other, strict=True)) for d in differing(a, b, f"{path}/{i}")]
    equal = torch.equal(one, other) if isinstance(one, torch.Tensor) else str(one) == str(other)
    return [] if equal else [path]


@pytest.mark.parametrize("refusing", ["own optimizer", "optimizer", "data", "model"])
def test_nothing_is_changed_by_a_load_that_an_object_refuses(tmp_path: Path, refusing: str) -> None:
    own = refusing == "own optimizer"
    xla_ckpt.save_checkpoint(tmp_path, "a", **program(2.0, own=own))
    mine = program(1.0, own=own)
    who: Any = mine["extras"]["data"] if refusing == "data" else mine[refusing.split()[-1]]
    who.refuses = True
    before = frozen(mine)
    with pytest.raises(xla_ckpt.LoadError) as caught:
        xla_ckpt.load_checkpoint(tmp_path, "a", **mine)
    assert not isinstance(caught.value, xla_ckpt.SaveError)
    leaf = {"data": "extras/data"}.get(refusing, refusing.split()[-1])
    assert (caught.value.leaf, caught.value.tag, caught.value.path) == (leaf, "a", str(tmp_path))
    assert type(caught.value.__cause__).__name__ in str(caught.value)
    after = frozen(mine)
    if refusing == "optimizer":  # it does not take back what it had, either, and the error says so
        assert str(caught.value.details).startswith("optimizer is changed in part")
        del after["optimizer"], before["optimizer"]
    assert differing(before, after) == []
    who.refuses = False
    xla_ckpt.load_checkpoint(tmp_path, "a", **mine)
    assert differing(frozen(mine)["model"], frozen(program(2.0, own=own))["model"]) == []


def test_an_optimizer_that_copies_the_weights_gets_the_loaded_ones(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", **program(2.0, own=True))
    mine = program(1.0, own=True)
    xla_ckpt.load_checkpoint(tmp_path, "a", **mine)
    assert torch.equal(mine["optimizer"].weights, mine["model"].weight)
    assert mine["model"].weight.mean() < 2.0  # one step away from it, and far from 1


def test_a_module_that_loads_in_its_own_way_and_refuses_is_named(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", **program(2.0, own=True))
    mine = program(1.0, own=True)

    def refuse(*_: Any) -> None:
        raise ValueError("no such names")

    mine["model"].register_load_state_dict_pre_hook(refuse)
    before = frozen(mine)
    with pytest.raises(xla_ckpt.LoadError, match="ValueError: no such names") as caught:
        xla_ckpt.load_checkpoint(tmp_path, "a", **mine)
    assert caught.value.details == "torch has counted no write to the arrays of model"
    assert differing(before, frozen(mine)) == []  # its hook raised before it had changed anything


def test_a_module_that_refuses_half_way_is_said_to_be_changed(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", **program(2.0, own=True))
    mine = program(1.0, own=True)

    def refuse(*_: Any) -> None:
        raise ValueError("no such names")

    mine["model"].register_load_state_dict_post_hook(refuse)
    before = frozen(mine)
    with pytest.raises(xla_ckpt.LoadError, match="ValueError: no such names") as caught:
        xla_ckpt.load_checkpoint(tmp_path, "a", **mine)
    assert caught.value.details == "model is changed in part, or has its new state already"
    assert any(name.startswith("/model") for name in differing(before, frozen(mine)))


def test_a_state_that_cannot_be_made_for_other_ranks_changes_nothing(tmp_path: Path) -> None:
    class Private(torch.optim.SGD):
        pass

    def no(states: Any, rank: int, world: int) -> Any:
        raise ArithmeticError("cannot be shared out")

    schema = xla_ckpt.OptimizerSchema(per_rank={"own": no})
    xla_ckpt.register_optimizer(Private, schema)

    def build(value: float) -> tuple[Any, Any]:
        model = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(model.weight, value)
        optimizer = Private(model.parameters(), lr=value)
        optimizer.state[model.weight]["own"] = torch.full((3,), value)
        return model, optimizer

    run_on_ranks(saves_of_two, 2, tmp_path)
    model, optimizer = build(1.0)
    with pytest.raises(xla_ckpt.LoadError, match="ArithmeticError"):
        xla_ckpt.load_checkpoint(tmp_path, "a", model, optimizer)
    assert torch.equal(model.weight, torch.ones(2, 2))
    assert optimizer.param_groups[0]["lr"] == 1.0


def saves_of_two(rank: int, root: Path) -> None:
    class Private(torch.optim.SGD):
        pass

    xla_ckpt.register_optimizer(Private, xla_ckpt.OptimizerSchema(per_rank=["own"]))
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, 2.0)
    torch.nn.init.constant_(model.bias, 2.0)
    optimizer = Private(model.parameters(), lr=2.0)
    optimizer.state[model.weight]["own"] = torch.full((3,), float(rank))
    xla_ckpt.save_checkpoint(root, "a", model, optimizer)


def one_rank_refuses(rank: int, root: Path, share: str) -> tuple[str, str | None, list[str], list[str]]:
    xla_ckpt.save_checkpoint(root, share, **program(2.0, own=True))
    mine = program(1.0, own=True)
    before = frozen(mine)
    mine["optimizer"].refuses = rank == 1
    try:
        xla_ckpt.load_checkpoint(root, share, **mine, options=xla_ckpt.LoadOptions(replica_read=share))  # type: ignore[arg-type]
    except xla_ckpt.LoadError as error:
        told = error
    unchanged = differing(before, frozen(mine))
    mine["optimizer"].refuses = False
    xla_ckpt.load_checkpoint(root, share, **mine, options=xla_ckpt.LoadOptions(replica_read=share))  # type: ignore[arg-type]
    loaded = differing(frozen(mine)["model"], frozen(program(2.0))["model"])
    return str(told), told.leaf, unchanged, loaded


@pytest.mark.parametrize("share", ["each", "share"])
def test_all_ranks_are_as_they_were_if_one_refuses(tmp_path: Path, share: str) -> None:
    first, second = run_on_ranks(one_rank_refuses, 2, tmp_path, share)
    assert first == second
    assert "KeyError: 'base_state'" in first[0]
    assert "rank 1" in first[0]
    assert first[1:] == ("optimizer", [], [])
