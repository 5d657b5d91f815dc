"""Every optimizer of torch.optim, with and without hooks: a load does what its own `load_state_dict` does."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.state_dict import get_state_dict

import xla_ckpt
from tests.covering import pairs_of_values, some_of
from xla_ckpt.core.tree.optimizer_schema import NUMBER_KEYS, get_required_members
from xla_ckpt.state.optimizer_install import get_torch_class_name

Optimizer = torch.optim.Optimizer

KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1, t0=0),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "AdamW, tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "RMSprop, centered": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
    **(
        {"Muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=0.1)}
        if hasattr(torch.optim, "Muon")
        else {}
    ),
}

HOOKS = ("no hooks", "hooks of state_dict", "hooks of load_state_dict", "both", "own load_state_dict")
TYPES = ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16))
WIDENED = (torch.bfloat16, torch.float32)
LAYOUTS = ("native", "dcp", "stock dcp")


class Run:
    """A model, its optimizer, and what its hooks have noted."""

    def __init__(
        self, kind: str, dtype: torch.dtype = torch.float32, hooks: str = "no hooks", seed: int = 0, beside: str = ""
    ) -> None:
        """`beside`: the kind whose state is loaded, or that loads this one's."""
        torch.manual_seed(seed)
        embeds, inputs = "SparseAdam" in (kind, beside), torch.linspace(-1, 1, 8).reshape(2, 4)
        self.model: Any = torch.nn.Embedding(4, 3, sparse=kind == "SparseAdam") if embeds else torch.nn.Linear(4, 3)
        self.model.to(dtype)
        self.inputs = torch.tensor([0, 2]) if embeds else inputs.to(dtype)
        self.optimizer = KINDS[kind](list(self.model.parameters()))
        self.calls: list[Any] = []
        self.hooks = hooks
        if hooks in ("hooks of state_dict", "both"):
            self.optimizer.register_state_dict_pre_hook(lambda _: self.calls.append("before state_dict"))
            self.optimizer.register_state_dict_post_hook(self._scaled(2.0))
        if hooks in ("hooks of load_state_dict", "both"):
            self.optimizer.register_load_state_dict_pre_hook(self._scaled(0.5))
            self.optimizer.register_load_state_dict_post_hook(self._after)
        if hooks == "own load_state_dict":
            self.optimizer.load_state_dict = functools.partial(self._own, self.optimizer.load_state_dict)  # type: ignore[method-assign]

    def _scaled(self, factor: float) -> Any:
        def scaled(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            """What is given may be changed in place: a second call would find it changed."""
            self.calls.append(f"scale by {factor}")
            if factor > 1:
                state = {"param_groups": state["param_groups"], "state": copy.deepcopy(state["state"])}
            for members in state["state"].values():
                for key in members:
                    if key in ("exp_avg", "momentum_buffer", "square_avg", "prev_flat_grad", "row_var"):
                        members[key].mul_(factor)
            for group in state["param_groups"]:
                group["noted"] = factor
            return state

        return scaled

    def _after(self, optimizer: Optimizer) -> None:
        """It finds the weights that are loaded, as it does where a program loads the model first."""
        self.calls.append(["after", sum(p.float().sum().item() for p in self.model.parameters())])
        for state in optimizer.state.values():
            state["noted"] = True

    def _own(self, former: Any, state: dict[str, Any]) -> None:
        for members in state["state"].values():
            for key, value in members.items():
                if key not in NUMBER_KEYS and isinstance(value, torch.Tensor) and value.is_floating_point():
                    value.mul_(4)
        former(state)

    def step(self, steps: int = 1) -> None:
        def loss() -> torch.Tensor:
            self.optimizer.zero_grad()
            value = self.model(self.inputs).float().pow(2).sum()
            value.backward()
            return value

        for _ in range(steps):
            if isinstance(self.optimizer, torch.optim.LBFGS):
                self.optimizer.step(loss)
            else:
                loss()
                self.optimizer.step()

    def save(self, root: Path, layout: str) -> None:
        if layout == "stock dcp":
            model, optimizer = get_state_dict(self.model, self.optimizer)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                stock.save({"model": model, "optimizer": optimizer}, checkpoint_id=root / "a", no_dist=True)
        else:
            xla_ckpt.save_checkpoint(root, "a", self.model, self.optimizer, layout=layout)

    def load_as_torch_does(self, saved: Run) -> None:
        state = copy.deepcopy(saved.optimizer.state_dict())
        numbers = copy.deepcopy(state["state"])
        self.model.load_state_dict(saved.model.state_dict())
        self.optimizer.load_state_dict(state)
        if self.hooks == "own load_state_dict":
            return
        for number, parameter in enumerate(self.optimizer.param_groups[0]["params"]):
            for key in NUMBER_KEYS & numbers.get(number, {}).keys():  # torch rounds these to the parameter's dtype
                self.optimizer.state[parameter][key] = numbers[number][key]

    def found(self) -> Any:
        """All of it, with types."""
        state = [self.optimizer.state.get(p) for g in self.optimizer.param_groups for p in g["params"]]
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return plain([state, groups, self.model.state_dict()])


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [plain(v) for v in value]
    return value


def test_all_of_torchs_optimizers_are_tried() -> None:
    every = {n for n, v in vars(torch.optim).items() if inspect.isclass(v) and issubclass(v, Optimizer)}
    assert every - {"Optimizer"} == {kind.partition(",")[0] for kind in KINDS}


CASES = [
    case
    for case in itertools.product(KINDS, HOOKS, (0, 1), (*TYPES, WIDENED), LAYOUTS)
    # DCP has its own way to LBFGS's state, and steps an optimizer that has none.
    if not (case[4] == "stock dcp" and case[0] in ("LBFGS", "SGD"))
]


@pytest.mark.parametrize(("kind", "hooks", "steps", "types", "layout"), some_of(CASES, pairs_of_values))
def test_a_load_is_torchs_own(
    kind: str, hooks: str, steps: int, types: tuple[torch.dtype, torch.dtype], layout: str, tmp_path: Path
) -> None:
    stored, own = types
    saved = Run(kind, stored, hooks)
    saved.step(3)
    saved.save(tmp_path, layout)
    expected, target = Run(kind, own, hooks, seed=1), Run(kind, own, hooks, seed=1)
    expected.step(steps)
    target.step(steps)
    expected.load_as_torch_does(saved)
    target.calls.clear()
    xla_ckpt.load_checkpoint(tmp_path, "a", target.model, target.optimizer, cast=stored != own)
    assert target.found() == expected.found()
    assert [c for c in target.calls if "state_dict" not in c and c != "scale by 2.0"] == expected.calls
    expected.step(2)
    target.step(2)
    assert target.found() == expected.found()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kinds")


@functools.cache
def stored_by(kind: str, root: Path, embeds: bool) -> tuple[Run, str]:
    """A run of some steps, and the tag that has it."""
    saved, tag = Run(kind, beside="SparseAdam" if embeds else ""), f"{kind} {embeds}"
    scheduler = torch.optim.lr_scheduler.StepLR(saved.optimizer, 2)
    for _ in range(3):
        saved.step()
        scheduler.step()
    xla_ckpt.save_checkpoint(root, tag, saved.model, saved.optimizer, scheduler)
    return saved, tag


def goes_on(run: Run) -> bool:
    """Whether two steps succeed."""
    try:
        run.step(2)
    except (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return False
    return True


PAIRS = list(itertools.product(KINDS, KINDS, (0, 1)))


def by_class(pair: tuple[str, str, int]) -> Iterable[Any]:
    """All pairs of classes; whether the one that loads has stepped before matters to few of them."""
    stored, own, steps = pair
    return [(stored.partition(",")[0], own.partition(",")[0]), (stored, steps), (own, steps)]


@pytest.mark.parametrize(("stored", "own", "steps"), some_of(PAIRS, by_class))
def test_any_state_into_any_optimizer(stored: str, own: str, steps: int, root: Path) -> None:
    """It goes on as after torch's own load, or nothing is changed. torch's own load may end in a step that raises."""
    saved, tag = stored_by(stored, root, own == "SparseAdam")
    target, expected = Run(own, seed=1, beside=stored), Run(own, seed=1, beside=stored)
    scheduler = torch.optim.lr_scheduler.StepLR(target.optimizer, 3)
    target.step(steps)
    expected.step(steps)
    before = target.found(), scheduler.state_dict()
    expected_goes_on = True
    try:
        expected.load_as_torch_does(saved)
    except (KeyError, RuntimeError, ValueError):
        expected_goes_on = False
    try:
        xla_ckpt.load_checkpoint(root, tag, target.model, target.optimizer, scheduler)
    except xla_ckpt.IncompatibleCheckpointError:
        assert (target.found(), scheduler.state_dict()) == before
        assert stored.partition(",")[0] != own.partition(",")[0]
        return
    target.step(2)
    if expected_goes_on and goes_on(expected):
        # torch takes the options of the stored groups alone, so that AdamW is no longer fused after NAdam's state.
        for name, value in target.model.state_dict().items():
            torch.testing.assert_close(value, expected.model.state_dict()[name])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "LBFGS"])  # it begins anew without `n_iter`
def test_what_a_step_needs_is_known(kind: str) -> None:
    """Each member of a state is needed if a step raises without it."""
    run = Run(kind)
    run.step()
    name = get_torch_class_name(run.optimizer)
    assert name is not None
    for parameter, members in list(run.optimizer.state.items()):
        needed = get_required_members(name, run.optimizer.param_groups[0], parameter.ndim)
        for key in members:
            again = Run(kind)
            again.step()
            for found in again.optimizer.state.values():
                found.pop(key, None)
                found["another"] = 0  # an empty state begins anew
            assert (key in needed) == (not goes_on(again)), (key, members.keys())
        assert needed <= members.keys()
