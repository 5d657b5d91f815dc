"""Every scheduler of torch: a load does what its own `load_state_dict` does, of directories of stock DCP, too."""

from __future__ import annotations

import collections
import copy
import inspect
import itertools
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.optim import lr_scheduler as of_torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

import xla_ckpt
from tests.covering import pairs_of_values, some_of

Make = Callable[[torch.optim.Optimizer], Any]


class Ramp:
    """A callable object, whose attributes LambdaLR saves."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, epoch: int) -> float:
        return min(1.0, (epoch + 1) / self.length)


SIMPLE: dict[str, Make] = {
    "LambdaLR": lambda o: of_torch.LambdaLR(o, lambda epoch: 1 / (epoch + 1)),
    "LambdaLR, object": lambda o: of_torch.LambdaLR(o, Ramp(5)),
    "MultiplicativeLR": lambda o: of_torch.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: of_torch.StepLR(o, 2, gamma=0.5),
    "MultiStepLR": lambda o: of_torch.MultiStepLR(o, [4, 6, 6], gamma=0.5),
    "ConstantLR": lambda o: of_torch.ConstantLR(o, 0.5, total_iters=4),
    "LinearLR": lambda o: of_torch.LinearLR(o, 0.25, total_iters=5),
    "ExponentialLR": lambda o: of_torch.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: of_torch.PolynomialLR(o, total_iters=6, power=2.0),
    "CosineAnnealingLR": lambda o: of_torch.CosineAnnealingLR(o, T_max=6),
}
ALONE: dict[str, Make] = {
    "CosineAnnealingWarmRestarts": lambda o: of_torch.CosineAnnealingWarmRestarts(o, T_0=4),
    "CyclicLR": lambda o: of_torch.CyclicLR(o, 0.1, 1.0, step_size_up=2),
    "CyclicLR, function": lambda o: of_torch.CyclicLR(o, 0.1, 1.0, step_size_up=2, scale_fn=Ramp(3)),
    "OneCycleLR": lambda o: of_torch.OneCycleLR(o, 1.0, total_steps=12),
    "ReduceLROnPlateau": lambda o: of_torch.ReduceLROnPlateau(o, patience=1, factor=0.5),
    "SWALR": lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=3),
}
KINDS = {
    **SIMPLE,
    **ALONE,
    **{
        f"SequentialLR, {name}": lambda o, make=make: of_torch.SequentialLR(
            o, [of_torch.LinearLR(o, 0.5, total_iters=2), make(o)], milestones=[2]
        )
        for name, make in SIMPLE.items()
    },
    **{
        f"ChainedScheduler, {name}": lambda o, make=make: of_torch.ChainedScheduler(
            [make(o), of_torch.ExponentialLR(o, 0.99)]
        )
        for name, make in SIMPLE.items()
    },
}
LAYOUTS = ("native", "dcp", "torchtitan", "scheduler of stock dcp", "lr_scheduler of stock dcp")


class Run:
    """An optimizer and its scheduler."""

    def __init__(self, kind: str, steps: int) -> None:
        self.parameter = torch.nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.SGD([self.parameter], lr=1.0, momentum=0.9)
        self.scheduler = KINDS[kind](self.optimizer)
        self.rates(steps)

    def rates(self, steps: int) -> list[float]:
        """The learning rates and momenta of some steps."""
        found = []
        for _ in range(steps):
            self.optimizer.step()
            if isinstance(self.scheduler, of_torch.ReduceLROnPlateau):
                self.scheduler.step(1.0)
            else:
                self.scheduler.step()
            group = self.optimizer.param_groups[0]
            found += [group["lr"], group["momentum"]]
        return found


def plain(value: Any) -> Any:
    """Comparable, with the classes of dicts and keys."""
    if isinstance(value, dict):
        return type(value), {(type(k), k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [plain(v) for v in value]
    return vars(value) if isinstance(value, Ramp) else value


def test_all_of_torchs_schedulers_are_tried() -> None:
    every = {n for n, v in vars(of_torch).items() if inspect.isclass(v) and issubclass(v, LRScheduler)}
    assert every - {"LRScheduler", "_LRScheduler"} <= {kind.partition(",")[0] for kind in KINDS}


CASES = [
    case
    for case in itertools.product(KINDS, (0, 1, 3), (False, True), LAYOUTS)
    if case[0] != "CyclicLR, function" or "stock" not in case[3]  # DCP pickles the function
]


@pytest.mark.filterwarnings("ignore:.*epoch parameter:UserWarning", "ignore:.*lr_scheduler.step:UserWarning")
@pytest.mark.parametrize(("kind", "steps", "hooked", "layout"), some_of(CASES, pairs_of_values))
def test_a_load_is_torchs_own(
    kind: str, steps: int, hooked: bool, layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved, target, expected = Run(kind, 3), Run(kind, steps), Run(kind, steps)
    state = copy.deepcopy(saved.scheduler.state_dict())
    trusts = {"trust_pickle": True} if kind in ("CyclicLR, function", "SWALR") else {}
    if "stock" in layout:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = {
                "optimizer": saved.optimizer.state_dict(),
                layout.partition(" ")[0]: saved.scheduler.state_dict(),
            }
            stock.save(content, checkpoint_id=tmp_path / "a", no_dist=True)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            xla_ckpt.save_checkpoint(tmp_path, "a", None, saved.optimizer, saved.scheduler, layout=layout)
    calls = []
    if hooked:
        kind_of = type(target.scheduler)

        class Hooked(kind_of):  # type: ignore[misc,valid-type]
            def load_state_dict(self, state_dict: Any) -> None:
                calls.append(1)
                super().load_state_dict(state_dict)

        target.scheduler.__class__ = Hooked
    expected.scheduler.load_state_dict(copy.deepcopy(state))
    expected.optimizer.load_state_dict(saved.optimizer.state_dict())
    with caplog.at_level(logging.WARNING):
        xla_ckpt.load_checkpoint(tmp_path, "a", None, target.optimizer, target.scheduler, **trusts)
    assert "another class" not in caplog.text
    assert calls == ([1] if hooked else [])
    assert plain(target.scheduler.state_dict()) == plain(expected.scheduler.state_dict()) == plain(state)
    assert target.rates(6) == expected.rates(6) == saved.rates(6)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")
@pytest.mark.parametrize("member", ["extras", "scheduler"])
def test_keys_that_are_numbers_in_the_programs_own_state(member: str, tmp_path: Path) -> None:
    """Of other objects than schedulers, too, at any depth, and of keys that the own state has not."""

    class Counts:
        def __init__(self, state: Any) -> None:
            self.state = state

        def state_dict(self) -> Any:
            return self.state

        def load_state_dict(self, state: Any) -> None:
            self.state = state

    state = {
        "bins": [{1: 0.5, 20: torch.ones(2)}],
        "rates": {0.5: 1, 1e-05: 2},
        "words": collections.OrderedDict({"1": 1, "2": 2}),
        "mixed": {"1": 1},
    }
    stock.save({member: {"k": state} if member == "extras" else state}, checkpoint_id=tmp_path / "a", no_dist=True)
    own = {
        "bins": [collections.Counter({7: 0})],
        "rates": {0.25: 1},
        "words": collections.OrderedDict({"1": 0}),
        "mixed": {1: 0, "2": 0},
    }
    target = Counts(own)
    if member == "extras":
        xla_ckpt.load_checkpoint(tmp_path, "a", extras={"k": target})
    else:
        xla_ckpt.load_checkpoint(tmp_path, "a", scheduler=target)
    found = target.state
    assert type(found["bins"][0]) is collections.Counter
    assert sorted(found["bins"][0]) == [1, 20]
    assert found["rates"] == {0.5: 1, 1e-05: 2}
    assert (type(found["words"]), [*found["words"]]) == (collections.OrderedDict, ["1", "2"])
    assert found["mixed"] == {"1": 1}


def loaded(root: Path, state: dict[str, Any], kind: str) -> None:
    if not (root / "a").exists():
        xla_ckpt.save_checkpoint(root, "a", scheduler=state)
    xla_ckpt.load_checkpoint(root, "a", scheduler=Run(kind, 0).scheduler)


OF_OTHER_VERSIONS: list[tuple[str, set[str], dict[str, Any]]] = [
    ("ReduceLROnPlateau", {"default_min_lr"}, {"verbose": False}),  # before torch 2.6
    ("CyclicLR", {"use_beta1"}, {"verbose": False}),
    ("OneCycleLR", {"use_beta1"}, {"anneal_func": None}),
    ("StepLR", {"_is_initial", "_get_lr_called_within_step"}, {"verbose": False, "new_in_torch_3": 1}),
]


@pytest.mark.parametrize(("kind", "lacks", "has"), OF_OTHER_VERSIONS)
def test_a_state_of_another_version_of_torch_is_no_other_class(
    kind: str, lacks: set[str], has: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = Run(kind, 2).scheduler.state_dict()
    loaded(tmp_path, {k: v for k, v in state.items() if k not in lacks} | has, kind)
    assert "another class" not in caplog.text


@pytest.mark.parametrize("stored", [k for k in SIMPLE if "object" not in k] + ["OneCycleLR", "ReduceLROnPlateau"])
def test_a_state_of_another_class_is_told(stored: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = Run(stored, 2).scheduler.state_dict()
    for kind in ("StepLR", "ExponentialLR", "LinearLR", "PolynomialLR", "CosineAnnealingLR"):
        if kind != stored:
            caplog.clear()
            loaded(tmp_path, state, kind)
            assert "another class" in caplog.text, kind
