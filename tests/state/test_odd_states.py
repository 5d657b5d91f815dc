"""States that are not of the usual shape: what was saved in one process loads in one process."""

from __future__ import annotations

import collections
import copy
import dataclasses
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xla_ckpt
from tests import xla
from xla_ckpt import FormatError, IncompatibleCheckpointError, LoadError, UsageError
from xla_ckpt.core.manifest import manifest_json
from xla_ckpt.state.values import CODEC

xla.begin()

DEVICES = pytest.mark.parametrize("device", xla.DEVICES)


def no_pickles(root: Path) -> bool:
    return not manifest_json.parse_manifest((root / "a" / "manifest.json").read_bytes()).object_files


def facts(value: Any) -> Any:
    """Comparable, with type, element type, shape and device of every tensor."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.device.type, value.tolist()
    if isinstance(value, dict):
        return {k: facts(v) for k, v in value.items()}
    return value


class LowRank(torch.optim.Optimizer):
    """Keeps under torch's usual keys what has not the shape of its parameter: as GaLore, Nero and SPAM do."""

    def __init__(self, parameters: Any, rank: int = 2) -> None:
        super().__init__(parameters, {"lr": 0.1, "rank": rank})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                shape = (p.shape[0], group["rank"]) if p.ndim == 2 else ()
                for key, size in (("exp_avg", shape), ("exp_avg_sq", ()), ("momentum_buffer", (3,))):
                    state.setdefault(key, torch.zeros(size, device=p.device)).add_(p.abs().mean())
                p.sub_(group["lr"] * state["exp_avg"].mean())


def low_rank(steps: int, *, rank: int = 2, rows: int = 4, seed: int = 0) -> tuple[torch.nn.Module, LowRank]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, rows)
    optimizer = LowRank(model.parameters(), rank)
    for _ in range(steps):
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("stale", [0, 1])
@pytest.mark.parametrize("own_rank", [2, 1])
def test_state_of_another_shape_than_its_parameter_loads(tmp_path: Path, stale: int, own_rank: int) -> None:
    """Whatever the optimizer has before the load, nothing or state of another rank."""
    model, optimizer = low_rank(3)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer)
    target = low_rank(stale, rank=own_rank, seed=1)
    xla_ckpt.load_checkpoint(tmp_path, "a", *target)
    assert facts(target[1].state_dict()) == facts(optimizer.state_dict())
    optimizer.step()
    target[1].step()
    assert facts(dict(target[0].state_dict())) == facts(dict(model.state_dict()))


def test_state_of_a_parameter_that_has_another_shape_is_refused(tmp_path: Path) -> None:
    """A model of other sizes is no state of other shape: what lay as its parameter still has to."""

    def trained(rows: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(3, rows)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    xla_ckpt.save_checkpoint(tmp_path, "a", *trained(4))
    for steps in (True, False):
        model, optimizer = trained(5)
        if not steps:
            optimizer.state.clear()
        with pytest.raises(IncompatibleCheckpointError, match=r"exp_avg: shape \[4, 3\] is stored, \[5, 3\] wanted"):
            xla_ckpt.load_checkpoint(tmp_path, "a", model, optimizer)


@DEVICES
@pytest.mark.parametrize("kind", [torch.optim.ASGD, torch.optim.NAdam, torch.optim.Adam, torch.optim.RAdam])
def test_numbers_stay_on_the_device_on_which_the_optimizer_keeps_them(
    tmp_path: Path, device: str, kind: Callable[..., torch.optim.Optimizer]
) -> None:
    def made(steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2).to(device)
        optimizer = kind(model.parameters(), foreach=False)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(1, 2, device=device)).sum().backward()
            optimizer.step()
            xla.sync()
        return model, optimizer

    model, optimizer = made(2)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer)
    for steps in (0, 1):
        target = made(steps)
        xla_ckpt.load_checkpoint(tmp_path, "a", *target)
        assert facts(target[1].state[target[0].weight]) == facts(optimizer.state[model.weight])


class Extra(torch.nn.Module):
    """A module whose extra state is whatever it is told to be."""

    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


EXTRAS = {
    "none": None,
    "small": torch.ones(2),
    "grown": torch.arange(5, dtype=torch.int16),
    "numpy": np.ones(3),
    "tree": {"scale": torch.ones(2), "history": [torch.zeros(3)], "n": 4},
    "text": "recipe",
}


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ("grown", "none"),
        ("none", "grown"),
        ("grown", "small"),
        ("small", "numpy"),
        ("numpy", "text"),
        ("tree", "small"),
        ("small", "tree"),
        ("text", "none"),
    ],
)
def test_extra_state_comes_back_whatever_it_was(tmp_path: Path, then: str, now: str) -> None:
    """TransformerEngine's is None before the first step, and a tensor of another length after each recipe."""
    model = torch.nn.Sequential(Extra(EXTRAS[then]), torch.nn.Linear(2, 2))
    target = torch.nn.Sequential(Extra(copy.deepcopy(EXTRAS[now])), torch.nn.Linear(2, 2))
    xla_ckpt.save_checkpoint(tmp_path, "a", model)
    weight = target[1].weight
    xla_ckpt.load_checkpoint(tmp_path, "a", target)
    assert type(target[0].extra) is type(EXTRAS[then])
    assert str(target[0].extra) == str(EXTRAS[then])
    assert target[1].weight is weight
    assert torch.equal(weight, model[1].weight)


@DEVICES
def test_extra_state_that_has_grown_lies_on_the_device_of_the_old_one(tmp_path: Path, device: str) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", Extra(torch.arange(5)))
    target = Extra(torch.zeros(2, device=device))
    xla_ckpt.load_checkpoint(tmp_path, "a", target)
    assert target.extra.device.type == device
    assert target.extra.tolist() == [0, 1, 2, 3, 4]


def test_a_file_in_memory_is_stored_as_its_bytes(tmp_path: Path) -> None:
    """As TransformerEngine and quantizers have it in their extra state."""
    held = io.BytesIO(b"a recipe\0")
    held.seek(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        xla_ckpt.save_checkpoint(tmp_path, "a", Extra(held))
    assert no_pickles(tmp_path)
    target = Extra()
    xla_ckpt.load_checkpoint(tmp_path, "a", target)
    assert (target.extra.getvalue(), target.extra.tell()) == (b"a recipe\0", 3)


@dataclasses.dataclass
class Output(collections.OrderedDict):  # type: ignore[type-arg]
    """A dataclass that is a dict, too, as the outputs of Hugging Face's models are."""

    logits: Any = None
    loss: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self[field.name] = getattr(self, field.name)


@dataclasses.dataclass
class Numbers(list):  # type: ignore[type-arg]
    """A dataclass that is a list, too."""

    label: str = ""


@dataclasses.dataclass
class Failure(Exception):
    """A dataclass that is an exception, whose arguments no field has."""

    code: int = 0


def test_dataclasses_that_extend_a_container_keep_what_is_in_it(tmp_path: Path) -> None:
    output = Output(torch.ones(2), 3)
    output["more"] = torch.zeros(1)
    numbers = Numbers("few")
    numbers.extend([1, torch.ones(1)])
    xla_ckpt.save(tmp_path, "a", {"output": output, "numbers": numbers})
    assert no_pickles(tmp_path)
    found = xla_ckpt.restore(tmp_path, "a").tree
    assert type(found["output"]) is Output
    assert facts(dict(found["output"])) == facts(dict(output))
    assert facts(found["output"].logits) == facts(output.logits)
    assert type(found["numbers"]) is Numbers
    assert (found["numbers"].label, str(list(found["numbers"]))) == ("few", str(list(numbers)))


def test_a_dataclass_that_extends_another_class_of_pythons_is_pickled(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="will be pickled"):
        xla_ckpt.save(tmp_path, "a", {"failed": Failure(3)})
    assert xla_ckpt.restore(tmp_path, "a", trust_pickle=True).tree["failed"].code == 3


def test_a_dict_of_modules_is_a_model(tmp_path: Path) -> None:
    def made() -> dict[str, torch.nn.Module]:
        return {"generator": torch.nn.Linear(2, 3), "critic": torch.nn.Linear(3, 1)}

    models, targets = made(), made()
    steps = {n: torch.optim.Adam(m.parameters()) for n, m in models.items()}
    for model in models.values():
        for p in model.parameters():
            p.grad = torch.ones_like(p)
    for optimizer in steps.values():
        optimizer.step()
    xla_ckpt.save_checkpoint(tmp_path, "a", models, extras=steps)
    assert no_pickles(tmp_path)
    theirs = {n: torch.optim.Adam(m.parameters()) for n, m in targets.items()}
    xla_ckpt.load_checkpoint(tmp_path, "a", targets, extras=theirs)
    for name, model in models.items():
        assert facts(dict(targets[name].state_dict())) == facts(dict(model.state_dict()))
        assert facts(theirs[name].state_dict()) == facts(steps[name].state_dict())


@pytest.mark.parametrize("place", ["optimizer", "scheduler", "extras"])
def test_a_dict_of_objects_is_refused_with_a_way_out(tmp_path: Path, place: str) -> None:
    """They would be pickled, and a load would return without reaching the program's own."""
    model = torch.nn.Linear(2, 2)
    adam = torch.optim.Adam(model.parameters())
    several = {"adam": adam, "schedule": torch.optim.lr_scheduler.StepLR(adam, 1)}
    given: dict[str, Any] = {"extras": {"both": several}} if place == "extras" else {place: several}
    with pytest.raises(UsageError, match=r"a state of its own: 'adam'.*extras=\{\"adam\": ...") as caught:
        xla_ckpt.save_checkpoint(tmp_path, "a", model, **given)
    assert caught.value.leaf == ("extras/both" if place == "extras" else place)
    assert xla_ckpt.list_tags(tmp_path) == []


def test_the_function_of_a_scheduler_of_torchs_is_stored_by_its_name(tmp_path: Path) -> None:
    def made(strategy: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        return model, optimizer, torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.1, anneal_strategy=strategy)

    model, optimizer, scheduler = made("linear")
    optimizer.step()
    scheduler.step()
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer, scheduler)
    assert no_pickles(tmp_path)
    target = made("cos")
    xla_ckpt.load_checkpoint(tmp_path, "a", *target)
    assert target[2].state_dict() == scheduler.state_dict()


def test_no_other_function_is_taken_from_a_file(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"broken \$function"):
        CODEC.decode({"$function": "torch.load"})
    with pytest.warns(UserWarning, match="will be pickled"):
        xla_ckpt.save(tmp_path, "a", {"f": torch.load})


class Scales:
    """The scales of a quantized weight, with bitsandbytes' way to make them of a state dict."""

    def __init__(self, absmax: torch.Tensor) -> None:
        self.absmax = absmax

    @classmethod
    def from_dict(cls, held: dict[str, torch.Tensor], device: torch.device) -> Scales:
        return cls(held.pop("absmax").to(device))


class Quantized(torch.nn.Module):
    """Saves more than it loads, as bitsandbytes' Linear4bit does."""

    def __init__(self, seed: int, *, scaled: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((3,), seed, dtype=torch.uint8), requires_grad=False)
        self.absmax = torch.full((2,), float(seed))
        if scaled:
            self.weight.quant_state = Scales(self.absmax)  # type: ignore[attr-defined]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        scales = getattr(self.weight, "quant_state", self)
        destination[prefix + "weight.absmax"] = scales.absmax


def test_the_scales_of_quantized_weights_come_back(tmp_path: Path) -> None:
    model = torch.nn.Sequential(Quantized(5, scaled=True))
    target = torch.nn.Sequential(Quantized(1, scaled=True))
    xla_ckpt.save_checkpoint(tmp_path, "a", model)
    xla_ckpt.load_checkpoint(tmp_path, "a", target)
    assert facts(dict(target.state_dict())) == facts(dict(model.state_dict()))
    assert target[0].weight.quant_state is target[0].quant_state


def test_a_module_that_ignores_what_it_saves_is_told_of(tmp_path: Path) -> None:
    """Its load_state_dict reports it as unexpected, which was not looked at: a silent loss."""
    xla_ckpt.save_checkpoint(tmp_path, "a", Quantized(5, scaled=False))
    with pytest.raises(LoadError, match=r"ignores: weight\.absmax.*set_extra_state") as caught:
        xla_ckpt.load_checkpoint(tmp_path, "a", Quantized(1, scaled=False))
    assert caught.value.leaf == "model/weight.absmax"
