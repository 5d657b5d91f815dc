"""Objects in the wrong place: named before anything is written or changed, while legitimate ones go through."""

from __future__ import annotations

import copy
import functools
import logging
import logging.handlers
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import AdamW, lr_scheduler

import xla_ckpt
from tests import xla
from tests.jobs import run_on_ranks

xla.begin()

Members = dict[str, Any]


def parts() -> tuple[nn.Module, AdamW, Any]:
    """A model, its optimizer, and a scheduler."""
    model = nn.Linear(3, 2)
    optimizer = AdamW(model.parameters())
    return model, optimizer, lr_scheduler.StepLR(optimizer, 1)


def stepped(model: nn.Module, optimizer: Any) -> None:
    """One step, so that there is state."""
    model(torch.ones(1, 3, device=next(model.parameters()).device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def scheduler_for_optimizer() -> Members:
    model, _, scheduler = parts()
    return {"model": model, "optimizer": scheduler}


def swapped() -> Members:
    model, optimizer, _ = parts()
    return {"model": optimizer, "optimizer": model}


def extras_without_names() -> Members:
    model, _, _ = parts()
    return {"model": model, "extras": [xla_ckpt.RNGState()]}


def scheduler_for_model() -> Members:
    _, _, scheduler = parts()
    return {"model": scheduler}


def optimizer_for_model() -> Members:
    _, optimizer, _ = parts()
    return {"model": optimizer}


def module_for_optimizer() -> Members:
    model, _, _ = parts()
    return {"model": model, "optimizer": model}


def two_optimizers() -> Members:
    model, optimizer, _ = parts()
    return {"model": model, "optimizer": [optimizer, optimizer]}


def optimizer_class() -> Members:
    model, _, _ = parts()
    return {"model": model, "optimizer": model.parameters()}


def list_of_models() -> Members:
    model, optimizer, _ = parts()
    return {"model": [model, model], "optimizer": optimizer}


def made_before_the_move() -> Members:
    model, optimizer, _ = parts()
    return {"model": model.to(xla.device()), "optimizer": optimizer}


def made_on_meta(device: str) -> Members:
    with torch.device("meta"):
        model, optimizer, _ = parts()
    return {"model": model.to_empty(device=device), "optimizer": optimizer}


MISTAKES: dict[str, tuple[Callable[[], Members], str]] = {
    "scheduler for optimizer": (scheduler_for_optimizer, "a scheduler was given in the place of an optimizer.*StepLR"),
    "swapped": (swapped, "an optimizer was given in the place of a model.*AdamW.*order of the arguments"),
    "scheduler for model": (scheduler_for_model, "a scheduler was given in the place of a model.*StepLR"),
    "optimizer for model": (optimizer_for_model, "an optimizer was given in the place of a model.*AdamW"),
    "module for optimizer": (module_for_optimizer, "a module was given in the place of an optimizer.*Linear"),
    "two optimizers": (two_optimizers, "a list is no optimizer.*found 2 values.*a dict, each by a name"),
    "parameters": (optimizer_class, r"no optimizer.*state_dict\(\) and load_state_dict\(\).*found generator"),
    "list of models": (
        list_of_models,
        "a list of modules is no model.*found 2 values.*a name, in the save and in each",
    ),
    "extras without names": (extras_without_names, "extras have names.*a dict of objects.*found list"),
    "before the move": (
        made_before_the_move,
        "before the model was moved.*parameters on xla.*parameters on cpu.*after",
    ),
    **{
        f"on meta, to {device}": (
            functools.partial(made_on_meta, device),
            f"before the model was moved.*parameters on {device}.*parameters on meta",
        )
        for device in ("cpu", "xla")
    },
}


ON_XLA = ("before the move", "on meta, to xla")


@pytest.mark.parametrize("mistake", [pytest.param(m, marks=pytest.mark.xla if m in ON_XLA else ()) for m in MISTAKES])
def test_a_mistake_is_named_by_save_and_load(mistake: str, tmp_path: Path) -> None:
    model, optimizer, _ = parts()
    stepped(model, optimizer)
    xla_ckpt.save_checkpoint(tmp_path, "good", model, optimizer)
    make, message = MISTAKES[mistake]
    with pytest.raises(xla_ckpt.UsageError, match=message):
        xla_ckpt.save_checkpoint(tmp_path, "bad", num_kept_ckpts=1, **make())
    assert xla_ckpt.list_tags(tmp_path) == ["good"]
    for strict in (True, False):
        with pytest.raises(xla_ckpt.UsageError, match=message):
            xla_ckpt.load_checkpoint(tmp_path, "good", strict=strict, **make())


def test_nothing_is_changed_by_a_load_with_a_mistake(tmp_path: Path) -> None:
    model, optimizer, scheduler = parts()
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer, scheduler)
    other, _, wrong = parts()
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(xla_ckpt.UsageError, match="in the place of an optimizer"):
        xla_ckpt.load_checkpoint(tmp_path, "a", other, wrong)
    assert all(torch.equal(v, before[k]) for k, v in other.state_dict().items())


# -- what is right, however strange it looks


class Wrapper:
    """An optimizer of another library: no subclass of torch's, but it has what one has."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        return self.inner.state

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


class OptimizerModule(nn.Module, Wrapper):  # type: ignore[misc]
    """Some wrappers of optimizers are modules."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__()
        self.inner = inner

    state_dict = Wrapper.state_dict  # type: ignore[assignment]
    load_state_dict = Wrapper.load_state_dict  # type: ignore[assignment]


class Scheduled(Wrapper):
    """It steps the parameters and knows the learning rate."""

    def get_last_lr(self) -> list[float]:
        return [g["lr"] for g in self.param_groups]


class Offloading(torch.optim.SGD):
    """It steps copies on the CPU, and says itself what its state is."""

    def state_dict(self) -> dict[str, Any]:
        return {"offloaded": super().state_dict()["state"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert set(state) == {"offloaded"}


class StateOnly:
    """A structure of its own, without groups."""

    def __init__(self) -> None:
        self.moment = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"moment": self.moment}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moment = state["moment"]


def copies(model: nn.Module, dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().cpu().to(dtype)) for p in model.parameters()]


LEGITIMATE: dict[str, Callable[[nn.Module], tuple[Any, Any]]] = {
    "model alone": lambda m: (m, None),
    "optimizer without its model": lambda m: (None, AdamW(m.parameters())),
    "a part of the parameters": lambda m: (m, AdamW([m.get_parameter("weight")])),
    "parameters beside the model's": lambda m: (m, AdamW([*m.parameters(), nn.Parameter(torch.ones(2))])),
    "a plain dict as the model": lambda m: (dict(m.named_parameters()), AdamW(m.parameters())),
    "state_dict() as the model": lambda m: (m.state_dict(), AdamW(m.parameters())),
    "dicts": lambda m: (m.state_dict(), AdamW(m.parameters()).state_dict()),
    "wrapper": lambda m: (m, Wrapper(AdamW(m.parameters()))),
    "wrapper that is a module": lambda m: (m, OptimizerModule(AdamW(m.parameters()))),
    "wrapper that knows the rate": lambda m: (m, Scheduled(AdamW(m.parameters()))),
    "a structure of its own": lambda m: (m, StateOnly()),
    "master weights": lambda m: (m, AdamW(copies(m, torch.float64))),
    "an optimizer that offloads": lambda m: (m, Offloading(copies(m, torch.float32), lr=0.1)),
    "named copies": lambda m: (
        m, AdamW([(n, p) for (n, _), p in zip(m.named_parameters(), copies(m, torch.float32), strict=True)])
    ),
    "an average as the model": lambda m: (copy.deepcopy(m), AdamW(m.parameters())),
    "an average on the CPU": lambda m: (copy.deepcopy(m).cpu(), AdamW(m.parameters())),
    "no parameters yet": lambda m: (nn.ReLU(), AdamW(m.parameters())),
}  # fmt: skip


@pytest.mark.parametrize("device", xla.DEVICES)
@pytest.mark.parametrize("case", LEGITIMATE)
def test_what_is_right_goes_through(case: str, device: str, tmp_path: Path) -> None:
    module = nn.Linear(3, 2).to(device)
    xla_ckpt.save_checkpoint(tmp_path, "a", *LEGITIMATE[case](module))
    xla_ckpt.load_checkpoint(tmp_path, "a", *LEGITIMATE[case](module))


def test_an_optimizer_of_other_parameters_is_worth_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, (other, optimizer, _) = nn.Linear(3, 2), parts()
    with caplog.at_level(logging.WARNING, logger="xla_ckpt"):
        xla_ckpt.save_checkpoint(tmp_path, "own", other, optimizer)
        assert "no parameter of the optimizer" not in caplog.text
        xla_ckpt.save_checkpoint(tmp_path, "average", model, optimizer)
    assert "no parameter of the optimizer is one of the model" in caplog.text


@pytest.mark.parametrize("name", ["model", "optimizer"])
def test_a_model_in_the_middle_of_a_tree_is_not_pickled(name: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    held = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}[name]
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="would be pickled whole") as caught:
        xla_ckpt.save(tmp_path, "a", {name: held, "step": 3})
    assert caught.value.leaf == name
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="would be pickled whole"):
        xla_ckpt.save_checkpoint(tmp_path, "a", {name: held, "step": 3})
    assert xla_ckpt.list_tags(tmp_path) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
def test_a_path_above_those_of_another_library_is_told(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    torch.distributed.checkpoint.save(
        {"model": model.state_dict()}, checkpoint_id=tmp_path / "run" / "steps" / "1", no_dist=True
    )
    with pytest.raises(xla_ckpt.NoCheckpointError, match="checkpoints below it, in steps: pass one of these"):
        xla_ckpt.load_checkpoint(tmp_path / "run", model=model)


def test_a_path_that_leaves_out_a_directory_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    xla_ckpt.save(tmp_path / "runs" / "lm", "step_1", {"w": torch.ones(2)})
    with pytest.raises(xla_ckpt.NoCheckpointError, match="checkpoints below it, in lm: pass one of these"):
        xla_ckpt.load_checkpoint(tmp_path / "runs", model=nn.Linear(2, 2))
    assert not xla_ckpt.has_checkpoint(tmp_path / "runs")
    assert "there is no checkpoint in" in caplog.text
    assert "but in lm below it" in caplog.text
    with pytest.raises(xla_ckpt.NoCheckpointError, match=r"oldest first: step_1\."):
        xla_ckpt.load_checkpoint(tmp_path / "runs" / "lm", "latest", model=nn.Linear(2, 2))


def test_a_directory_of_files_says_which_lie_there(tmp_path: Path) -> None:
    for number in range(12):
        torch.save({"weight": torch.ones(2, 2)}, tmp_path / f"{number:02}.pt")
    (tmp_path / "notes.txt").write_text("no checkpoint")
    for call in (xla_ckpt.restore, xla_ckpt.verify):
        with pytest.raises(xla_ckpt.NoCheckpointError, match=r"lie there, 00\.pt, .*09\.pt and others: pass the path"):
            call(tmp_path)
    assert not xla_ckpt.has_checkpoint(tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("layout", ["native", "xser", "dcp", "theirs"])
def test_a_tag_is_named_by_its_own_path_in_all_calls(tmp_path: Path, layout: str) -> None:
    model = nn.Linear(2, 2)
    root = tmp_path / "lm"
    for tag in ("step_1", "step_2"):
        with torch.no_grad():
            model.weight.fill_(int(tag[-1]))
        if layout == "theirs":
            dcp.save({"model": model.state_dict()}, checkpoint_id=root / tag)
        else:
            xla_ckpt.save_checkpoint(root, tag, model, layout=layout)
    path = root / "step_1"
    target = nn.Linear(2, 2)
    assert xla_ckpt.load_checkpoint(path, model=target).report.tag == "step_1"
    assert (target.weight == 1).all()
    assert xla_ckpt.restore(path).report.tag == "step_1"
    assert xla_ckpt.verify(path).tag == "step_1"
    assert xla_ckpt.explain(path, mesh="dp=2").ok
    assert set(xla_ckpt.diff(path, root).moved) == {"model/weight"}
    assert xla_ckpt.convert(path, tmp_path / "other", to="native").tag == "step_1"
    assert xla_ckpt.Checkpoints(path).show().tag == "step_1"
    assert (xla_ckpt.Checkpoints(path).read("model/weight") == 1).all()
    assert xla_ckpt.has_checkpoint(path)
    assert xla_ckpt.list_tags(path) == []  # it is no root


@pytest.mark.parametrize("path", [None, {"w": 1}, 3, b"runs"])
def test_the_order_of_torch_save_is_told(path: Any) -> None:
    for call in (xla_ckpt.save, xla_ckpt.load_checkpoint, xla_ckpt.has_checkpoint):
        with pytest.raises(xla_ckpt.UsageError, match="path"):
            call(path, "a", {"w": 1}) if call is xla_ckpt.save else call(path)  # type: ignore[operator]


def test_a_model_in_data_parallel_is_the_model(tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    xla_ckpt.save_checkpoint(tmp_path, "a", nn.DataParallel(model))
    xla_ckpt.load_checkpoint(tmp_path, "a", other)
    assert torch.equal(other.weight, model.weight)
    xla_ckpt.save_checkpoint(tmp_path, "b", nn.Linear(2, 2))
    xla_ckpt.load_checkpoint(tmp_path, "a", nn.DataParallel(other))


def test_the_directory_of_a_tag_is_no_root_directory(tmp_path: Path) -> None:
    xla_ckpt.save(tmp_path / "run", "a", {"w": torch.ones(3)})
    before = sorted(tmp_path.rglob("*"))
    for call in (xla_ckpt.save, xla_ckpt.save_checkpoint):
        with pytest.raises(xla_ckpt.UsageError, match="this is a tag, and no root of tags") as raised:
            call(tmp_path / "run/a", "x", {"w": torch.ones(3)})
        assert f"Pass {tmp_path / 'run'}, and the name" in str(raised.value)
    assert sorted(tmp_path.rglob("*")) == before
    xla_ckpt.save("memory://mistakes", "a", {"w": 1})
    with pytest.raises(xla_ckpt.UsageError, match="this is a tag, and no root of tags"):
        xla_ckpt.save("memory://mistakes/a", "x", {"w": 1})


def saves_after_a_forward_pass(rank: int, root: Path) -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    model(torch.ones(2, 4))  # an evaluation: its parameters stay gathered
    told = logging.handlers.BufferingHandler(100)
    logging.getLogger("xla_ckpt").addHandler(told)
    xla_ckpt.save_checkpoint(root, "a", model, optimizer)
    return [record.getMessage() for record in told.buffer]


def test_fsdp2_whose_parameters_are_gathered_has_the_names_of_its_optimizer_state(tmp_path: Path) -> None:
    ((*told,),) = run_on_ranks(saves_after_a_forward_pass, 1, tmp_path, xla=True)
    assert not [text for text in told if "position of its parameters" in text]
    assert "0.weight" in xla_ckpt.restore(tmp_path).tree["optimizer"]["state"]
