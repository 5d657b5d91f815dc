"""Models, optimizers, schedulers, extras: a resumed run continues bit for bit."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop, lr_scheduler

import xla_ckpt
from tests import xla
from tests.runs import names_in

xla.begin()

Make = Callable[[list[Any]], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: AdamW(p, lr=1e-2),
    "adam amsgrad": lambda p: Adam(p, lr=1e-2, amsgrad=True),
    "adamw tensor lr": lambda p: AdamW(p, lr=torch.tensor(1e-2)),
    "adamw fused": lambda p: AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "sgd plain": lambda p: SGD(p, lr=1e-2),
    "rmsprop": lambda p: RMSprop(p, lr=1e-2, momentum=0.9, centered=True),
    "adagrad": lambda p: Adagrad(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=1e-2, max_iter=3),
}

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=50),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.mid = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.mid.bias.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.mid(self.norm(self.embed(tokens))))


class Run:
    """A small training run."""

    def __init__(self, make: Make, schedule: Any, device: Any = "cpu", seed: int = 0, reverse: bool = False) -> None:
        torch.manual_seed(seed)
        self.device = device
        self.model = Net().to(device)
        self.model.head.weight = self.model.embed.weight  # moving to XLA unties
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = make(trained[::-1] if reverse else trained)
        self.scheduler = schedule(self.optimizer)

    def step(self, number: int) -> float:
        tokens = (torch.arange(7) * (number + 3) % 11).to(self.device)

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(tokens), tokens)
            loss.backward()
            return loss

        loss = self.optimizer.step(closure)  # type: ignore[arg-type]
        assert loss is not None
        value = float(loss.detach())
        self.scheduler.step(*([value] if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        if str(self.device) != "cpu":
            xla.sync()
        return value

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}


def state(run: Run) -> dict[str, torch.Tensor]:
    return {k: v.detach().cpu().clone() for k, v in run.model.state_dict().items()}


def same_state(a: Run, b: Run) -> None:
    sa, sb = state(a), state(b)
    assert sa.keys() == sb.keys()
    for key in sa:
        assert torch.equal(sa[key], sb[key]), key


def check_resume(tmp_path: Path, make: Make, schedule: Any, device: Any = "cpu", **save: Any) -> None:
    unbroken = Run(make, schedule, device)
    for i in range(3):
        unbroken.step(i)
    xla_ckpt.save_checkpoint(tmp_path, "a", **unbroken.parts, **save)
    losses = [unbroken.step(i) for i in range(3, 6)]
    xla_ckpt.finalize_checkpoint()
    resumed = Run(make, schedule, device, seed=99)
    xla_ckpt.load_checkpoint(tmp_path, **resumed.parts)
    assert [resumed.step(i) for i in range(3, 6)] == losses
    same_state(resumed, unbroken)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_resume_exactly(tmp_path: Path, optimizer: str) -> None:
    check_resume(tmp_path, OPTIMIZERS[optimizer], SCHEDULERS["multistep"], async_save=True)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_resume_exactly(tmp_path: Path, scheduler: str) -> None:
    check_resume(tmp_path, OPTIMIZERS["sgd"], SCHEDULERS[scheduler])


@pytest.mark.parametrize("layout", ["native", "smp", "pt"])
def test_a_scheduler_of_another_class_is_told(tmp_path: Path, layout: str, caplog: pytest.LogCaptureFixture) -> None:
    saved = Run(OPTIMIZERS["sgd"], SCHEDULERS["multistep"])
    xla_ckpt.save_checkpoint(tmp_path, "a", **saved.parts, layout=layout)
    other = Run(OPTIMIZERS["sgd"], SCHEDULERS["cosine"])
    xla_ckpt.load_checkpoint(tmp_path, "a", **saved.parts)
    assert not caplog.messages
    xla_ckpt.load_checkpoint(tmp_path, "a", **other.parts)
    for name in ("milestones", "gamma"):
        assert f"tag a: not loaded: scheduler/{name}: the tag has it, and {type(other.scheduler).__name__} has not" in (
            caplog.text
        )
    assert f"scheduler/T_max: {type(other.scheduler).__name__} has it, and the tag has not" in caplog.text


def test_a_scheduler_or_optimizer_left_behind_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(OPTIMIZERS["sgd"], SCHEDULERS["multistep"])
    xla_ckpt.save_checkpoint(tmp_path, "a", **run.parts)
    xla_ckpt.load_checkpoint(tmp_path, **run.parts)
    xla_ckpt.load_checkpoint(tmp_path, model=run.model)  # nothing goes on
    assert not caplog.messages
    xla_ckpt.load_checkpoint(tmp_path, model=run.model, optimizer=run.optimizer)
    assert (
        "tag a: an optimizer is loaded, and the scheduler of the tag is not. The learning rate is the stored one"
        in caplog.text
    )
    xla_ckpt.load_checkpoint(tmp_path, model=run.model, scheduler=run.scheduler)
    assert "tag a: a scheduler is loaded, and the optimizer of the tag is not" in caplog.text


ON_XLA: dict[str, Make] = {
    **{name: OPTIMIZERS[name] for name in ("adamw", "sgd", "adagrad")},
    "adamw capturable": lambda p: AdamW(p, lr=torch.tensor(1e-2), capturable=True),
}


@pytest.mark.xla
@pytest.mark.parametrize("optimizer", ON_XLA)
def test_xla_runs_resume_exactly(tmp_path: Path, optimizer: str) -> None:
    check_resume(tmp_path, ON_XLA[optimizer], SCHEDULERS["multistep"], xla.device(), async_save=True)


@pytest.mark.xla
@pytest.mark.parametrize(("first", "second"), [("xla", "cpu"), ("cpu", "xla")])
def test_state_moves_between_devices(tmp_path: Path, first: str, second: str) -> None:
    device = {"cpu": "cpu", "xla": xla.device()}
    a = Run(OPTIMIZERS["adamw"], SCHEDULERS["cosine"], device[first])
    a.step(0)
    xla_ckpt.save_checkpoint(tmp_path, "a", **a.parts)
    for stepped in (False, True):
        b = Run(OPTIMIZERS["adamw"], SCHEDULERS["cosine"], device[second], seed=1)
        if stepped:
            b.step(5)
        xla_ckpt.load_checkpoint(tmp_path, **b.parts)
        same_state(a, b)
        for (name, pa), pb in zip(a.model.named_parameters(), b.model.parameters(), strict=True):
            assert a.optimizer.state[pa].keys() == b.optimizer.state[pb].keys()
            for key, value in a.optimizer.state[pa].items():
                other = b.optimizer.state[pb][key]
                assert torch.equal(value.cpu(), other.cpu()), (name, key)
                assert other.device == (torch.device("cpu") if key == "step" else pb.device)
        b.step(1)


def test_an_unstepped_optimizer_on_either_side(tmp_path: Path) -> None:
    fresh, stepped = (Run(OPTIMIZERS["adamw"], SCHEDULERS["cosine"], seed=i) for i in range(2))
    stepped.step(0)
    xla_ckpt.save_checkpoint(tmp_path, "fresh", **fresh.parts)
    xla_ckpt.load_checkpoint(tmp_path, "fresh", **stepped.parts)
    assert len(stepped.optimizer.state) == 0
    assert fresh.step(1) == stepped.step(1)
    same_state(fresh, stepped)


def test_parameters_may_be_reordered_and_regrouped(tmp_path: Path) -> None:
    def two_groups(params: list[Any]) -> Optimizer:
        big = [p for p in params if p.dim() > 1]
        small = [p for p in params if p.dim() <= 1]
        return AdamW([{"params": small, "weight_decay": 0.0, "lr": 0.3}, {"params": big, "weight_decay": 0.1}], lr=0.01)

    a = Run(two_groups, SCHEDULERS["multistep"])
    a.step(0), a.step(1)
    xla_ckpt.save_checkpoint(tmp_path, "a", a.model, a.optimizer)

    def swapped(params: list[Any]) -> Optimizer:
        groups = two_groups(params).param_groups[::-1]
        groups.append({"params": groups[1]["params"][1:]})  # one stored group becomes two
        groups[1] = {"params": groups[1]["params"][:1]}
        return AdamW(groups, lr=7.0)

    b = Run(swapped, SCHEDULERS["multistep"], seed=1, reverse=True)
    xla_ckpt.load_checkpoint(tmp_path, "a", b.model, b.optimizer)
    assert [g["lr"] for g in b.optimizer.param_groups] == [0.001, 0.03, 0.03]
    assert [g["weight_decay"] for g in b.optimizer.param_groups] == [0.1, 0.0, 0.0]
    assert a.step(2) == b.step(2)
    same_state(a, b)

    united = Run(lambda p: AdamW(p, lr=1.0), SCHEDULERS["multistep"])
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="unites stored groups.*differ in .*lr"):
        xla_ckpt.load_checkpoint(tmp_path, "a", united.model, united.optimizer)


def test_optimizer_state_is_stored_by_name(tmp_path: Path) -> None:
    run = Run(OPTIMIZERS["adamw"], SCHEDULERS["cosine"])
    run.step(0)
    xla_ckpt.save_checkpoint(tmp_path, "a", **run.parts)
    tree = xla_ckpt.restore(tmp_path, "a").tree
    assert list(tree["optimizer"]["state"]) == ["embed.weight", "norm.weight", "norm.bias", "mid.weight"]
    assert tree["optimizer"]["param_groups"][0]["params"] == list(tree["optimizer"]["state"])
    assert torch.equal(
        tree["optimizer"]["state"]["mid.weight"]["exp_avg"], run.optimizer.state[run.model.mid.weight]["exp_avg"]
    )


def same_moments(a: Run, b: Run) -> None:
    """Both optimizers hold the same state for parameters of the same name."""
    theirs = dict(b.model.named_parameters())
    assert len(a.optimizer.state) == len(b.optimizer.state) > 0
    for name, parameter in a.model.named_parameters():
        if parameter.requires_grad:
            for key, value in b.optimizer.state[theirs[name]].items():
                assert torch.equal(a.optimizer.state[parameter][key], value), (name, key)


def test_an_optimizer_without_its_model(tmp_path: Path) -> None:
    run = Run(OPTIMIZERS["adamw"], SCHEDULERS["cosine"])
    run.step(0)
    xla_ckpt.save_checkpoint(tmp_path, "positions", optimizer=run.optimizer)
    xla_ckpt.save_checkpoint(tmp_path, "dict", optimizer=run.optimizer.state_dict())
    xla_ckpt.save_checkpoint(tmp_path, "names", model=run.model, optimizer=run.optimizer)
    for tag in ("positions", "dict"):
        alone = Run(OPTIMIZERS["adamw"], SCHEDULERS["cosine"], seed=1)
        xla_ckpt.load_checkpoint(tmp_path, tag, optimizer=alone.optimizer)
        same_moments(alone, run)

        # A model that knows the names of the parameters does not hinder that their state is found by position.
        named = Run(OPTIMIZERS["adamw"], SCHEDULERS["cosine"], seed=1)
        before = {k: v.clone() for k, v in named.model.state_dict().items()}
        with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="model: not in the checkpoint"):
            xla_ckpt.load_checkpoint(tmp_path, tag, named.model, named.optimizer)
        assert not named.optimizer.state
        xla_ckpt.load_checkpoint(tmp_path, tag, named.model, named.optimizer, strict=False)
        same_moments(named, run)
        assert all(torch.equal(v, before[k]) for k, v in named.model.state_dict().items())
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="optimizer/state/#0.0"):
        xla_ckpt.load_checkpoint(tmp_path, "names", optimizer=Run(OPTIMIZERS["adamw"], SCHEDULERS["cosine"]).optimizer)
    named = AdamW([(n, p) for n, p in run.model.named_parameters() if p.requires_grad])
    xla_ckpt.load_checkpoint(tmp_path, "names", optimizer=named)
    assert torch.equal(
        named.state[run.model.mid.weight]["exp_avg"], run.optimizer.state[run.model.mid.weight]["exp_avg"]
    )


def test_the_state_of_a_parameter_is_loaded_whole_or_stays_whole(tmp_path: Path) -> None:
    """Moments of one training are corrected by its number of steps: those of another one are never mixed in."""

    def trained(outputs: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, outputs))
        optimizer = AdamW(model.parameters())
        for _ in range(steps):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        return model, optimizer

    xla_ckpt.save_checkpoint(tmp_path, "a", *trained(3, steps=5))
    for steps in (0, 1):
        model, optimizer = trained(2, steps)
        before = copy.deepcopy(optimizer.state_dict()["state"])
        report = xla_ckpt.load_checkpoint(tmp_path, "a", model, optimizer, strict=False).report
        after = optimizer.state_dict()["state"]
        assert [float(after[n]["step"]) for n in (0, 1)] == [5, 5]
        for number, name in ((2, "1.weight"), (3, "1.bias")):
            if steps:
                assert {k: v.tolist() for k, v in after[number].items()} == (
                    {k: v.tolist() for k, v in before[number].items()}
                )
            else:
                assert number not in after
            assert any(line.startswith(f"optimizer/state/{name}/step: another part") for line in report.skipped)
        assert report.arrays == 8  # two weights, and three states of each
        with pytest.raises(xla_ckpt.IncompatibleCheckpointError) as caught:
            xla_ckpt.load_checkpoint(tmp_path, "a", model, optimizer)
        assert "another part" not in str(caught.value)


def test_state_keeps_its_dtype_whatever_the_parameter_has(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = AdamW([("w", weight)])
    optimizer.state[weight] = {
        "step": torch.tensor(3.0),
        "exp_avg": torch.full((3,), 1 / 3),
        "exp_avg_sq": torch.ones(3),
    }
    xla_ckpt.save_checkpoint(tmp_path, "a", optimizer=optimizer)
    other = AdamW([("w", nn.Parameter(torch.ones(3, dtype=torch.bfloat16)))])
    xla_ckpt.load_checkpoint(tmp_path, "a", optimizer=other)
    (loaded,) = other.state.values()
    assert torch.equal(loaded["exp_avg"], torch.full((3,), 1 / 3))


def test_tied_parameters_are_stored_once(tmp_path: Path) -> None:
    for device in xla.present():
        run = Run(OPTIMIZERS["sgd"], SCHEDULERS["cosine"], device)
        xla_ckpt.save_checkpoint(tmp_path, "a", model=run.model)
        (file,) = (tmp_path / "a/model").iterdir()
        names = xla_ckpt.restore(tmp_path, "a").tree["model"]
        assert torch.equal(names["head.weight"], names["embed.weight"])
        assert file.stat().st_size < 4096 + 4 * (11 * 8 + 8 * 8 + 8 * 5) + 100
        untied = Net()
        untied.head.weight = nn.Parameter(torch.zeros(11, 8))
        xla_ckpt.load_checkpoint(tmp_path, "a", model=untied)
        assert torch.equal(untied.head.weight, names["embed.weight"])
        tied = Run(OPTIMIZERS["sgd"], SCHEDULERS["cosine"], device, seed=3)
        xla_ckpt.load_checkpoint(tmp_path, "a", model=tied.model)
        assert tied.model.head.weight is tied.model.embed.weight
        assert torch.equal(tied.model.head.weight.detach().cpu(), names["embed.weight"])


def test_parameters_stay_the_objects_that_they_are(tmp_path: Path) -> None:
    for device in xla.present():
        run = Run(OPTIMIZERS["adamw"], SCHEDULERS["cosine"], device)
        run.step(0)
        xla_ckpt.save_checkpoint(tmp_path, "a", **run.parts)
        before = [(id(p), p.requires_grad, type(p)) for p in run.model.parameters()]
        aliases = {k: v for k, v in run.model.state_dict().items() if device == "cpu"}
        xla_ckpt.load_checkpoint(tmp_path, "a", **run.parts)
        assert [(id(p), p.requires_grad, type(p)) for p in run.model.parameters()] == before
        assert set(map(id, run.optimizer.state)) <= {i for i, _, _ in before}
        for key, alias in aliases.items():
            assert alias.data_ptr() == run.model.state_dict()[key].data_ptr()


class Hooked(nn.Linear):
    """A module with logic of its own in load_state_dict."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, *args)

    def get_extra_state(self) -> Any:
        return {"version": 3, "table": torch.arange(3)}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_modules_with_load_logic_and_extra_state(tmp_path: Path) -> None:
    for device in xla.present():
        module = nn.Sequential(Hooked(2, 2), nn.Linear(2, 2)).to(device)
        weight = module[0].weight.detach().cpu().clone()
        xla_ckpt.save_checkpoint(tmp_path, "a", model=module)
        other = nn.Sequential(Hooked(2, 2), nn.Linear(2, 2)).to(device)
        xla_ckpt.load_checkpoint(tmp_path, "a", model=other)
        assert torch.equal(other[0].weight.detach().cpu(), weight * 2)
        assert torch.equal(other[1].weight.detach().cpu(), module[1].weight.detach().cpu())
        assert other[0].extra["version"] == 3
        assert other[0].extra["table"].tolist() == [0, 1, 2]


class Loader:
    """A data loader that knows where it is."""

    def __init__(self) -> None:
        self.position, self.seen = 0, torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.seen = state["position"], state["seen"]


def draw() -> list[float]:
    """The next random numbers of all generators."""
    on_devices = [number for device in xla.present() for number in torch.rand(2, device=device).tolist()]
    return [random.random(), np.random.rand(), *on_devices]


def test_extras_and_user_content(tmp_path: Path) -> None:
    loader = Loader()
    loader.position, loader.seen = 7, torch.tensor([1.0, 2.0])
    content = {"epoch": 3, "args": ("a", 1.5, None), "best": torch.tensor(0.25), 5: {"x"}, "raw": b"\x00\xff"}
    xla_ckpt.save_checkpoint(
        tmp_path, "a", user_content=content, extras={"loader": loader, "rng": xla_ckpt.RNGState(), "note": {"k": [1]}}
    )
    drawn = draw()
    other, note = Loader(), {"k": [9]}
    again = xla_ckpt.load_checkpoint(
        tmp_path, extras={"loader": other, "rng": xla_ckpt.RNGState(), "note": note}
    ).user_content
    assert again == content
    assert type(again["args"]) is tuple
    assert (other.position, other.seen.tolist(), note) == (7, [1.0, 2.0], {"k": [1]})
    assert draw() == drawn
    xla_ckpt.save_checkpoint(tmp_path, "b", model={"w": torch.ones(1)})
    assert xla_ckpt.load_checkpoint(tmp_path).user_content is None
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="extras/loader: not in the checkpoint.*holds model"):
        xla_ckpt.load_checkpoint(tmp_path, extras={"loader": other})
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="no state_dict"):
        xla_ckpt.save_checkpoint(tmp_path, "c", extras={"x": 3})


class Opaque:
    def __init__(self, value: int) -> None:
        self.value = value


def test_objects_need_trust(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="user_content/deep/0: a .*Opaque is no plain value") as warned:
        xla_ckpt.save_checkpoint(tmp_path, "a", model={"w": torch.ones(2)}, user_content={"deep": [Opaque(4)]})
    assert warned[0].filename == __file__, "the warning shows the line of the program"
    target = {"w": torch.zeros(2)}
    with pytest.raises(xla_ckpt.UntrustedObjectError, match="Opaque.*trust_pickle=True") as caught:
        xla_ckpt.load_checkpoint(tmp_path, model=target)
    assert caught.value.leaf == "user_content/deep/0"
    assert target["w"].tolist() == [0, 0]
    assert xla_ckpt.load_checkpoint(tmp_path, model=target, trust_pickle=True).user_content["deep"][0].value == 4
    assert target["w"].tolist() == [1, 1]
    assert xla_ckpt.restore(tmp_path, "a", {"model": None}).tree["model"]["w"].tolist() == [
        1,
        1,
    ]  # its part needs no trust
    with (
        pytest.raises(xla_ckpt.UnsupportedStateError, match="not even by pickle"),
        pytest.warns(UserWarning, match="pickled"),
    ):
        xla_ckpt.save(tmp_path, "b", {"f": lambda: 1})
    assert xla_ckpt.list_tags(tmp_path) == ["a"]


def wider() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2)),
            "model/2.weight: wanted, but not stored",
        ),
        (lambda: nn.Sequential(nn.Linear(3, 4)), "model/1.weight: stored, but not wanted"),
        (wider, r"model/0.weight: shape \[4, 3\] is stored, \[5, 3\] wanted"),
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double(), "float32 is stored, float64 wanted"),
    ],
)
def test_models_that_do_not_fit_are_refused_untouched(tmp_path: Path, other: Any, words: str) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", model=nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), user_content=1)
    model = other()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=words):
        xla_ckpt.load_checkpoint(tmp_path, model=model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_not_strict_loads_what_fits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    xla_ckpt.save_checkpoint(
        tmp_path, "a", model=stored, optimizer=AdamW(stored.parameters(), lr=0.5), user_content="u"
    )
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 3))
    optimizer = AdamW(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING):
        loaded = xla_ckpt.load_checkpoint(tmp_path, model=model, optimizer=optimizer, scheduler={}, strict=False)
    report = loaded.report
    assert loaded.user_content == "u"
    assert f"arrays that fit and are loaded: {report.arrays}. Others" in caplog.text
    assert torch.equal(model[0].weight, stored[0].weight)
    assert "model/1.weight: shape [4, 2]" not in report.skipped
    assert any(s.startswith("model/1.weight: shape [2, 4] is stored") for s in report.skipped)
    assert any(s.startswith("model/2.bias: wanted") for s in report.skipped)
    assert any("optimizer/state/2.weight" in s for s in report.skipped)
    assert any(s.startswith("scheduler: not in the checkpoint") for s in report.skipped)
    assert all(s in caplog.text for s in report.skipped)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_dicts_as_models(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", model={"weight": torch.eye(2), "bias": torch.ones(2)})
    for device in xla.present():
        device_model = nn.Linear(2, 2).to(device)
        xla_ckpt.load_checkpoint(tmp_path, model=device_model.state_dict())  # through the aliases of a state dict
        assert device_model.weight.detach().cpu().tolist() == [[1, 0], [0, 1]]
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="model/bias: stored, but not wanted"):
        xla_ckpt.load_checkpoint(tmp_path, model={"weight": torch.zeros(2, 2)})
    some = {"weight": torch.zeros(2, 2), "more": 5}
    xla_ckpt.load_checkpoint(tmp_path, model=some, strict=False)
    assert (some["weight"].tolist(), some["more"]) == ([[1, 0], [0, 1]], 5)  # type: ignore[attr-defined]


def test_a_foreign_optimizer_uses_its_own_loading(tmp_path: Path) -> None:
    class Wrapped(SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            self.got = state_dict
            super().load_state_dict(state_dict)

    model = nn.Linear(2, 2)
    optimizer = Wrapped(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer)
    other = Wrapped(model.parameters(), lr=0.7, momentum=0.9)
    xla_ckpt.load_checkpoint(tmp_path, "a", model, other)
    assert set(other.got["state"]) == {0, 1}
    assert other.param_groups[0]["lr"] == 0.1
    assert torch.equal(other.state[model.weight]["momentum_buffer"], optimizer.state[model.weight]["momentum_buffer"])


def test_the_state_of_another_kind_of_optimizer_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, torch.optim.AdamW(model.parameters(), lr=0.25))
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="another kind of optimizer is stored: it has betas"):
        xla_ckpt.load_checkpoint(tmp_path, "a", model, sgd)
    assert sgd.param_groups[0]["lr"] == 0.5
    xla_ckpt.load_checkpoint(tmp_path, "a", model, torch.optim.Adam(model.parameters()))  # the same options


@pytest.mark.parametrize("name", ["exp_avg", "max_exp_avg_sq"])
def test_states_of_another_shape_than_their_parameter_are_refused(name: str, tmp_path: Path) -> None:
    def made() -> tuple[torch.nn.Linear, torch.optim.AdamW]:
        model = torch.nn.Linear(3, 4)
        return model, torch.optim.AdamW(model.parameters(), amsgrad=True)

    model, optimizer = made()
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight][name] = torch.zeros(2, 3)  # half of it, as of a rank
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer)
    model, optimizer = made()
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="does not fit the target") as caught:
        xla_ckpt.load_checkpoint(tmp_path, "a", model, optimizer)
    assert f"optimizer/state/weight/{name}: shape [2, 3] is stored, [4, 3] wanted" in str(caught.value)
    assert not optimizer.state


def test_addresses_of_unknown_stores_are_no_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: xla_ckpt.save("hdfs://host/run", "a", {"x": 1}), lambda: xla_ckpt.restore("ftp://host/run").tree,
        lambda: xla_ckpt.list_tags("hdfs://host/run"), lambda: xla_ckpt.convert("oss://bucket/run", "b"),
    ):  # fmt: skip
        with pytest.raises(xla_ckpt.UsageError, match="no storage of this library has such an address"):
            call()
    assert names_in(tmp_path) == []


def test_a_home_directory_that_no_shell_has_put_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("~/run", "~"):
        with pytest.raises(xla_ckpt.UsageError, match="only a shell takes ~"):
            xla_ckpt.save(path, "a", {"x": 1})
        with pytest.raises(xla_ckpt.UsageError, match="os.path.expanduser"):
            xla_ckpt.restore(path)
    assert names_in(tmp_path) == []
    for path in ("./~/run", "~run"):
        xla_ckpt.save(path, "a", {"x": 1})
        assert xla_ckpt.restore(path).tree == {"x": 1}
    assert names_in(tmp_path) == ["~", "~run"]


def test_a_report_is_short_to_look_at(tmp_path: Path) -> None:
    saved = xla_ckpt.save(tmp_path, "a", {"x": torch.ones(3)}).report
    loaded = xla_ckpt.restore(tmp_path).report
    for report in (saved, loaded):
        assert report.phases
        assert len(repr(report)) < 300 + len(str(tmp_path))


def test_a_scripted_model(tmp_path: Path) -> None:
    def build() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))

    scripted = torch.jit.script(build())
    optimizer = torch.optim.Adam(scripted.parameters())
    scripted(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    xla_ckpt.save_checkpoint(tmp_path, "a", scripted, optimizer)
    for again in (build(), torch.jit.script(build())):
        moments = torch.optim.Adam(again.parameters())
        xla_ckpt.load_checkpoint(tmp_path, "a", again, moments)
        for name, value in scripted.state_dict().items():
            assert torch.equal(again.state_dict()[name], value), name
        assert len(moments.state) == 4
