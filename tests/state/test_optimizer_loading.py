"""Code of the program around the load of an optimizer: hooks, `__setstate__`, a `load_state_dict` of its own."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import xla_ckpt
from tests import xla
from tests.jobs import run_alone

xla.begin()

Optimizer = torch.optim.Optimizer


def made(kind: Callable[..., Optimizer] = torch.optim.AdamW, seed: int = 0, **options: Any) -> tuple[Any, Any, Any]:
    """A model, its optimizer, which has stepped, and a scheduler."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    step(model, optimizer)
    scheduler.step()
    return model, optimizer, scheduler


def step(model: Any, optimizer: Any) -> None:
    inputs = torch.ones(2, 3, device=model.weight.device)
    model(inputs).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    xla.sync()


def found(*members: Any) -> str:
    return str([copy.deepcopy(member.state_dict()) for member in members])


class Setting(torch.optim.AdamW):
    """Looks at what it is given when its state is set."""

    refuses = False

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        if self.refuses:
            raise KeyError("mine")


class Noting(torch.optim.AdamW):
    """Changes what it loads, and counts."""

    def load_state_dict(self, state_dict: Any) -> None:
        for members in state_dict["state"].values():
            members["exp_avg"].mul_(2)
            members["seen"].append(1)
        super().load_state_dict(state_dict)


def refuse(*_: Any) -> None:
    raise ValueError("not with me")


REFUSING: dict[str, tuple[type[torch.optim.AdamW], Callable[[Any], object]]] = {
    "hook before the load": (torch.optim.AdamW, lambda o: o.register_load_state_dict_pre_hook(refuse)),
    "hook that returns other groups": (
        torch.optim.AdamW,
        lambda o: o.register_load_state_dict_pre_hook(lambda _, state: {**state, "param_groups": []}),
    ),
    "hook that returns no state": (
        torch.optim.AdamW,
        lambda o: o.register_load_state_dict_pre_hook(lambda _, state: {"param_groups": state["param_groups"]}),
    ),
    "load_state_dict of the object": (torch.optim.AdamW, lambda o: setattr(o, "load_state_dict", refuse)),
    "__setstate__": (Setting, lambda o: setattr(o, "refuses", True)),
}


@pytest.mark.parametrize("alone", [False, True], ids=["one optimizer", "one of two"])
@pytest.mark.parametrize("refusing", REFUSING)
def test_nothing_is_changed_when_an_optimizer_refuses_its_state(refusing: str, alone: bool, tmp_path: Path) -> None:
    kind, refuses = REFUSING[refusing]

    def members(seed: int) -> tuple[Any, Any, Any]:
        model, optimizer, scheduler = made(kind, seed)
        if alone:
            return model, optimizer, scheduler
        other = torch.nn.Linear(2, 2)
        models = torch.nn.ModuleDict({"one": model, "other": other})
        return models, {"one": optimizer, "other": torch.optim.SGD(other.parameters(), momentum=seed / 10)}, scheduler

    def all_of(model: Any, optimizer: Any, scheduler: Any) -> str:
        return found(model, *(optimizer.values() if isinstance(optimizer, dict) else [optimizer]), scheduler)

    xla_ckpt.save_checkpoint(tmp_path, "a", *members(0))
    target = members(1)
    refuses(target[1] if alone else target[1]["one"])
    tensors = [*target[0].parameters()]
    before, versions = all_of(*target), [p._version for p in tensors]
    with pytest.raises(xla_ckpt.LoadError, match="own code refuses its stored state") as caught:
        xla_ckpt.load_checkpoint(tmp_path, "a", *target)
    assert caught.value.leaf == "optimizer"
    if refusing == "load_state_dict of the object":  # which does not take back what it had, either
        assert str(caught.value.details).startswith("optimizer is changed in part")
    else:
        assert caught.value.details is None
    assert all_of(*target) == before
    assert [p._version for p in tensors] == versions


def test_what_an_own_load_state_dict_changes_in_place_is_changed_once(tmp_path: Path) -> None:
    model, optimizer, _ = made(Noting)
    for state in optimizer.state.values():
        state["seen"] = []
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer)
    again, target, _ = made(Noting, seed=1)
    xla_ckpt.load_checkpoint(tmp_path, "a", again, target)
    state = target.state[again.weight]
    assert torch.equal(state["exp_avg"], 2 * optimizer.state[model.weight]["exp_avg"])
    assert state["seen"] == [1]


def test_hooks_of_each_of_several_optimizers_run(tmp_path: Path) -> None:
    def several(seed: int) -> tuple[Any, dict[str, Any], list[Any]]:
        calls: list[Any] = []
        (one, first, _), (other, second, _) = made(seed=seed), made(torch.optim.SGD, seed, momentum=0.9)
        for name, optimizer in (("one", first), ("other", second)):
            optimizer.register_load_state_dict_pre_hook(
                lambda _, state, name=name: calls.append((name, sorted(state["state"])))
            )
            optimizer.register_load_state_dict_post_hook(lambda _, name=name: calls.append(name))
        return torch.nn.ModuleDict({"one": one, "other": other}), {"first": first, "second": second}, calls

    model, optimizers, _ = several(0)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizers)
    again, targets, calls = several(1)
    xla_ckpt.load_checkpoint(tmp_path, "a", again, targets)
    assert calls == [("one", [0, 1]), ("other", [0, 1]), "one", "other"]
    assert found(again, *targets.values()) == found(model, *optimizers.values())


def test_a_hook_that_makes_copies_of_the_weights_finds_the_loaded_ones(tmp_path: Path) -> None:
    """Master weights of higher precision, say."""

    def copies(optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                optimizer.state[p]["master"] = p.detach().double()

    model, optimizer, _ = made()
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer)
    again, target, _ = made(seed=1)
    target.register_load_state_dict_post_hook(copies)
    xla_ckpt.load_checkpoint(tmp_path, "a", again, target)
    assert torch.equal(target.state[again.weight]["master"], model.weight.double())


@pytest.mark.parametrize("layout", ["native", "dcp"])
def test_a_hook_may_store_the_state_in_another_structure(layout: str, tmp_path: Path) -> None:
    """As one tensor, for instance; the reverse hook finds exactly that."""

    def pack(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        moments = [m["exp_avg"].flatten() for m in state["state"].values()]
        others = {n: {k: v for k, v in m.items() if k != "exp_avg"} for n, m in state["state"].items()}
        return {"flat": torch.cat(moments), "others": others, "groups": state["param_groups"]}

    def unpack(optimizer: Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        moments = packed["flat"].split([p.numel() for p in parameters])
        state = {
            number: {**packed["others"][number], "exp_avg": moment.view_as(p)}
            for number, (moment, p) in enumerate(zip(moments, parameters, strict=True))
        }
        return {"state": state, "param_groups": packed["groups"]}

    def hooked(seed: int) -> tuple[Any, Any]:
        model, optimizer, _ = made(seed=seed)
        optimizer.register_state_dict_post_hook(pack)
        optimizer.register_load_state_dict_pre_hook(unpack)
        return model, optimizer

    model, optimizer = hooked(0)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer, layout=layout)
    again, target = hooked(1)
    xla_ckpt.load_checkpoint(tmp_path, "a", again, target)
    assert found(again, target) == found(model, optimizer)
    step(model, optimizer)
    step(again, target)
    assert found(again, target) == found(model, optimizer)


def hooked_zero1(root: Path) -> list[Any]:
    import torch_xla
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    def sharded(seed: int) -> tuple[Any, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 2).to(torch_xla.device())
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, lr=0.1, pin_layout=False, grad_clipping=False
        )
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter) * (seed + 1)
        optimizer.step()
        torch_xla.sync()
        return model, optimizer

    model, optimizer = sharded(0)
    xla_ckpt.save_checkpoint(root, "a", model, optimizer)
    again, target = sharded(1)
    calls: list[Any] = []

    def double(_: Optimizer, state: dict[str, Any]) -> None:
        calls.append(("base", sorted(state["state"])))
        for members in state["state"].values():
            members["exp_avg"] = members["exp_avg"] * 2

    target.base_optimizer.register_load_state_dict_pre_hook(double)
    target.base_optimizer.register_load_state_dict_post_hook(lambda _: calls.append("after base"))
    target.register_load_state_dict_pre_hook(lambda _, state: calls.append(("wrapper", len(state["param_groups"]))))
    xla_ckpt.load_checkpoint(root, "a", again, target)
    torch_xla.sync()
    shards = [o.base_optimizer.param_groups[0]["params"][0] for o in (optimizer, target)]
    moments = [o.base_optimizer.state[s]["exp_avg"].cpu() for o, s in zip((optimizer, target), shards, strict=True)]
    refusing = target.base_optimizer.register_load_state_dict_pre_hook(refuse)
    before = [p.detach().cpu().tolist() for p in (*again.parameters(), *shards)]
    xla_ckpt.save_checkpoint(root, "b", *sharded(2))
    try:
        xla_ckpt.load_checkpoint(root, "b", again, target)
    except xla_ckpt.LoadError as error:
        calls.append(error.leaf)
    refusing.remove()
    after = [p.detach().cpu().tolist() for p in (*again.parameters(), *shards)]
    return [calls, torch.equal(moments[0] * 2, moments[1]), before == after]


@pytest.mark.xla
def test_hooks_of_a_zero1_optimizer_and_of_the_one_that_it_wraps_run(tmp_path: Path) -> None:
    calls, doubled, unchanged = run_alone(hooked_zero1, tmp_path, xla=True)
    first = [("wrapper", 1), ("base", [0, 1]), "after base"]
    assert calls == [*first, ("wrapper", 1), ("base", [0, 1]), "optimizer"]
    assert doubled
    assert unchanged


@pytest.mark.xla
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_fused_of_a_run_on_the_cpu_does_not_go_along_to_xla(
    kind: Callable[..., Optimizer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """torch has no fused kernels there: the next step would raise."""
    model, optimizer, _ = made(kind, fused=True)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer)
    again = torch.nn.Linear(3, 2).to("xla")
    target = kind(again.parameters(), lr=0.5)
    with caplog.at_level(logging.WARNING):
        xla_ckpt.load_checkpoint(tmp_path, "a", again, target)
    assert target.param_groups[0]["lr"] == 0.1
    assert not target.param_groups[0]["fused"]
    assert "the stored optimizer has fused=True" in caplog.text
    for state in target.state.values():
        assert state.get("step", torch.ones(())).device.type == "cpu"
    step(again, target)
    step(model, optimizer)
    torch.testing.assert_close(again.weight.detach().cpu(), model.weight.detach())


def test_capturable_of_a_run_on_an_accelerator_does_not_come_along_to_the_cpu(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, _ = made()
    optimizer.param_groups[0]["capturable"] = True
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer)
    again, target, _ = made(seed=1)
    with caplog.at_level(logging.WARNING):
        xla_ckpt.load_checkpoint(tmp_path, "a", again, target)
    assert "the stored optimizer has capturable=True" in caplog.text
    assert target.param_groups[0]["capturable"] is False
    step(again, target)
    fused = torch.optim.AdamW(again.parameters(), fused=True)
    caplog.clear()
    xla_ckpt.load_checkpoint(tmp_path, "a", again, {"all": fused})
    assert "capturable=False" in caplog.text
    step(again, fused)


def test_adam_and_adamw_are_told_apart_by_what_they_do_after_the_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An AdamW stays one, whatever it loads, and an Adam becomes what it loads."""
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.RAdam):
        xla_ckpt.save_checkpoint(tmp_path, kind.__name__, *made(kind)[:2])
    for stored, kind, warns in (("Adam", torch.optim.AdamW, False), ("AdamW", torch.optim.Adam, True)):
        caplog.clear()
        model, optimizer, _ = made(kind, seed=1)
        xla_ckpt.load_checkpoint(tmp_path, stored, model, optimizer)
        assert ("decays weights" in caplog.text) == warns
        assert optimizer.param_groups[0]["decoupled_weight_decay"] is True


def test_an_optimizer_in_extras_is_loaded_as_the_optimizer_is(tmp_path: Path) -> None:
    """By position, with its hooks, in the dtype of its parameters; or it is refused before anything is changed."""
    model, optimizer, _ = made(torch.optim.Adam)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, extras={"second": optimizer})
    for kind in (torch.optim.NAdam, torch.optim.Adamax, torch.optim.SGD):
        again, other, _ = made(kind, seed=1)
        before = found(again, other)
        with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="another kind of optimizer") as caught:
            xla_ckpt.load_checkpoint(tmp_path, "a", again, extras={"second": other})
        assert caught.value.leaf == "extras/second"
        assert found(again, other) == before
    for dtype in (torch.float32, torch.bfloat16):
        again = torch.nn.Linear(3, 2).to(dtype)
        target, weights = torch.optim.Adam(again.parameters()), []
        target.register_load_state_dict_post_hook(
            lambda _, again=again, weights=weights: weights.append(again.weight.detach().clone())
        )
        xla_ckpt.load_checkpoint(tmp_path, "a", again, extras={"second": target}, cast=True)
        (weight,) = weights
        assert torch.equal(weight, model.weight.to(dtype))
        moment = target.state[again.weight]["exp_avg"]
        assert torch.equal(moment, optimizer.state[model.weight]["exp_avg"].to(dtype))
    again, target, _ = made(torch.optim.Adam, seed=1)
    before = found(again, target)
    target.register_load_state_dict_post_hook(lambda _: None)
    target.register_load_state_dict_pre_hook(refuse)
    with pytest.raises(xla_ckpt.LoadError, match="not with me"):
        xla_ckpt.load_checkpoint(tmp_path, "a", again, extras={"second": target})
    assert found(again, target) == before


@pytest.mark.parametrize("place", ["optimizer", "several", "extras", "hooked", "file"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_fused_optimizer_goes_on_alike_with_weights_in_another_memory_format(
    kind: Callable[..., Optimizer], place: str, tmp_path: Path
) -> None:
    """A fused step reads moments and weights in the order of memory: moments in another order moved other weights."""

    def begin() -> tuple[Any, Any]:
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(6, 2)).to(
            memory_format=torch.channels_last
        )
        model[1].weight = torch.nn.Parameter(model[1].weight.detach().t().contiguous().t())  # a transposed weight
        options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        return model, kind(model.parameters(), lr=0.1, fused=True, **options)

    def train(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(torch.linspace(-1, 1, 2 * 3 * 8 * 8, device="cpu").reshape(2, 3, 8, 8)).square().mean().backward()
        optimizer.step()

    model, optimizer = begin()
    train(model, optimizer)
    again, target = begin()
    if place == "file":
        path: Path = tmp_path / "a.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        xla_ckpt.load_checkpoint(path, None, again, target)
    else:
        path, tag = tmp_path, "a"
        members: Callable[[Any], dict[str, Any]] = {
            "several": lambda one: {"optimizer": {"one": one}},
            "extras": lambda one: {"extras": {"one": one}},
        }.get(place, lambda one: {"optimizer": one})
        xla_ckpt.save_checkpoint(path, tag, model, **members(optimizer))
        if place == "hooked":
            target.register_load_state_dict_pre_hook(lambda _, state: copy.deepcopy(state))
        xla_ckpt.load_checkpoint(path, tag, again, **members(target))
    for one in (model, again):
        train(one, optimizer if one is model else target)
    for left, right in zip(model.parameters(), again.parameters(), strict=True):
        assert right.stride() == left.stride()
        assert torch.equal(right, left)
        ours, theirs = target.state[right], optimizer.state[left]
        assert {k: v.stride() for k, v in ours.items()} == {k: v.stride() for k, v in theirs.items()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")
def test_numbers_of_parameters_that_stock_dcp_stored_as_text(tmp_path: Path) -> None:
    """Their state was left under the text, and the optimizer began anew."""
    (model, optimizer, _), (_, second, _) = made(), made(seed=1)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "second": second.state_dict()}
    stock.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    (again, target, _), fresh = made(seed=2), torch.optim.AdamW(torch.nn.Linear(3, 2).parameters())
    xla_ckpt.load_checkpoint(tmp_path, "a", again, target, extras={"second": fresh})
    assert found(again, target, fresh) == found(model, optimizer, second)
