"""What modules do when they are loaded: versions, names of older versions, other shapes, hooks, code of their own."""

from __future__ import annotations

import copy
import types
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import weight_norm as old_weight_norm
from torch.nn.utils.parametrizations import weight_norm

import xla_ckpt
from xla_ckpt import IncompatibleCheckpointError, LoadError, UnsupportedStateError
from xla_ckpt.core.manifest import manifest_json


class Negated(nn.Module):
    """A layer that was saved negated by version 1."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *others: Any) -> None:
        if metadata.get("version", 1) < 2 or "version" not in metadata:
            state[prefix + "weight"] = -state[prefix + "weight"]
        super()._load_from_state_dict(state, prefix, metadata, *others)


def negated(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.ReLU(), nn.Sequential(Negated()), nn.Linear(2, 2))


def state_of(module: nn.Module) -> dict[str, Any]:
    return {name: value.tolist() for name, value in module.state_dict().items()}


LAYOUTS = ("native", "dcp", "xser", "pt", "orbax", "torch_checkpointing", "smp", "torchtitan")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_versions_of_modules_are_kept(layout: str, tmp_path: Path) -> None:
    saved, loaded, ema = negated(1), negated(2), negated(3)
    extras = {} if layout == "torch_checkpointing" else {"ema": saved}
    xla_ckpt.save_checkpoint(tmp_path, "t", saved, extras=extras, layout=layout)
    xla_ckpt.load_checkpoint(tmp_path, "t", loaded, extras=dict.fromkeys(extras, ema))
    assert state_of(loaded) == state_of(saved)
    assert not extras or state_of(ema) == state_of(saved)
    restored = xla_ckpt.restore(tmp_path, "t").tree["model"]
    assert restored._metadata == saved.state_dict()._metadata  # type: ignore[attr-defined]
    by_torch = negated(4)
    by_torch.load_state_dict(restored)
    assert state_of(by_torch) == state_of(saved)


@pytest.mark.parametrize("to", ["native", "dcp", "xser", "orbax", "torch"])
def test_versions_of_modules_are_converted(to: str, tmp_path: Path) -> None:
    saved, loaded = negated(1), negated(2)
    xla_ckpt.save_checkpoint(tmp_path / "root", "t", saved)
    new = tmp_path / ("new.pt" if to == "torch" else "new")
    xla_ckpt.convert(tmp_path / "root", new, to=to, part="model" if to == "torch" else None)
    xla_ckpt.load_checkpoint(new, model=loaded)
    assert state_of(loaded) == state_of(saved)
    if to == "torch":
        by_torch = negated(3)
        by_torch.load_state_dict(torch.load(new, weights_only=True))
        assert state_of(by_torch) == state_of(saved)


def test_rank_files_of_smp_have_the_versions_that_torch_reads(tmp_path: Path) -> None:
    saved = negated(1)
    xla_ckpt.save_checkpoint(tmp_path, "t", saved, layout="smp")
    (file,) = (tmp_path / "t").glob("model_*.pt")
    assert torch.load(file, weights_only=False)._metadata == saved.state_dict()._metadata  # type: ignore[attr-defined]


@pytest.mark.parametrize("around", [None, "model", "state_dict", "module."])
def test_versions_in_files_of_torch_are_read(around: str | None, tmp_path: Path) -> None:
    saved, loaded = negated(1), negated(2)
    state: Any = saved.state_dict()
    if around == "module.":
        state = nn.ModuleDict({"module": saved}).state_dict()
    elif around is not None:
        state = {around: state, "epoch": 3}
    torch.save(state, tmp_path / "a.pt")
    xla_ckpt.load_checkpoint(tmp_path / "a.pt", model=loaded)
    assert state_of(loaded) == state_of(saved)


def test_an_older_version_is_upgraded(tmp_path: Path) -> None:
    saved, loaded = negated(1), negated(2)
    state = saved.state_dict()
    state._metadata["1.0"]["version"] = 1  # type: ignore[attr-defined]
    torch.save(state, tmp_path / "old.pt")
    xla_ckpt.convert(tmp_path / "old.pt", tmp_path / "root", to="native", as_tag="t")
    for path in (tmp_path / "old.pt", tmp_path / "root"):
        xla_ckpt.load_checkpoint(path, model=loaded)
        assert torch.equal(loaded[1][0].weight, -saved[1][0].weight)  # type: ignore[index]


def test_a_tag_without_versions_has_those_of_the_program(tmp_path: Path) -> None:
    saved, loaded, ema = negated(1), negated(2), negated(3)
    plain = dict(saved.state_dict())
    xla_ckpt.save_checkpoint(tmp_path, "t", plain, extras={"ema": plain})
    assert "module_metadata" not in (tmp_path / "t" / "manifest.json").read_text()
    xla_ckpt.load_checkpoint(tmp_path, "t", loaded, extras={"ema": ema})
    assert state_of(loaded) == state_of(ema) == state_of(saved)


def test_state_dicts_in_trees_keep_their_metadata(tmp_path: Path) -> None:
    state = negated(1).state_dict()
    xla_ckpt.save(tmp_path, "t", {"a": [state], "b": OrderedDict(c=torch.ones(2))})
    whole = xla_ckpt.restore(tmp_path, "t").tree
    like = xla_ckpt.restore(tmp_path, "t", like={"a": [copy.deepcopy(state)]}).tree
    for tree in (whole, like):
        assert type(tree["a"][0]) is OrderedDict
        assert tree["a"][0]._metadata == state._metadata  # type: ignore[attr-defined]
    assert type(whole["b"]) is OrderedDict
    assert not hasattr(whole["b"], "_metadata")


def test_metadata_that_are_not_plain_are_refused(tmp_path: Path) -> None:
    saved = negated(1)
    saved._register_state_dict_hook(lambda module, state, prefix, metadata: metadata.update(at=object()))
    with pytest.raises(UnsupportedStateError, match="metadata of a module .* not plain"):
        xla_ckpt.save_checkpoint(tmp_path, "t", saved)


def test_broken_metadata_in_a_manifest_are_damage(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "t", negated(1))
    manifest = manifest_json.parse_manifest((tmp_path / "t" / "manifest.json").read_bytes())
    again = manifest_json.parse_manifest(manifest_json.dump_manifest(manifest))
    assert again.module_metadata == manifest.module_metadata
    assert again.module_metadata["model"]["1.0"] == {"version": 2}
    for broken in (5, {"model": 5}, {"model": [5]}, {"model": [[5], {"a": 0}]}, {"model": [[{}], {"a": 1}]}):
        with pytest.raises(xla_ckpt.FormatError, match="broken metadata of modules"):
            manifest_json._parse_module_metadata(broken)


# Names and shapes of older versions.


def old_norm(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(old_weight_norm(nn.Conv1d(4, 4, 3)), nn.Linear(2, 2))


def new_norm(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(weight_norm(nn.Conv1d(4, 4, 3)), nn.Linear(2, 2))


class Resizing(nn.Module):
    """A module whose buffer takes the size that is stored."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(size))
        self.linear = nn.Linear(2, 2)

    def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
        self.seen = torch.empty_like(state[prefix + "seen"])
        super()._load_from_state_dict(state, prefix, *others)


class Renaming(nn.Module):
    """A module that was saved under other names, with a member that is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state.pop(prefix + "gone", None)
        for name in [name for name in state if name.startswith(prefix + "fc.")]:
            state[prefix + "linear." + name.removeprefix(prefix + "fc.")] = state.pop(name)


class Former(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.register_buffer("gone", torch.ones(3))


class OfItsOwn(nn.Module):
    """A module with a `load_state_dict` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        return super().load_state_dict({k.replace("linear.", "fc."): v for k, v in state_dict.items()}, strict)


class WithoutStrict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def load_state_dict(self, state_dict: Any) -> None:  # type: ignore[override]
        super().load_state_dict({k: 2 * v for k, v in state_dict.items()})


def on_the_instance() -> nn.Module:
    module = nn.Linear(2, 2)
    load = module.load_state_dict
    module.load_state_dict = lambda state: load({"weight": -state["weight"], "bias": state["bias"]})  # type: ignore[method-assign, assignment, misc]
    return module


def _from_state_dict_on_the_instance() -> nn.Module:
    module = nn.Linear(2, 2)

    def load(self: nn.Module, state: Any, prefix: str, *others: Any) -> None:
        state[prefix + "weight"] = -state[prefix + "weight"]
        nn.Module._load_from_state_dict(self, state, prefix, *others)

    module._load_from_state_dict = types.MethodType(load, module)  # type: ignore[method-assign]
    return nn.Sequential(module)


def scalar() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("count", torch.zeros(()))
    return module


def vector() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("count", torch.full((1,), 5.0))
    return module


def without_batches(module: nn.Module, *, unversioned: bool) -> dict[str, Any]:
    state = module.state_dict()
    del state["0.num_batches_tracked"]
    if unversioned:
        return dict(state)
    state._metadata["0"]["version"] = 1  # type: ignore[attr-defined]
    return state


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))


CASES: dict[str, tuple[Callable[[], Any], Callable[[], nn.Module]]] = {
    "weight norm": (lambda: old_norm(1).state_dict(), lambda: new_norm(2)),
    "resized": (lambda: Resizing(5).state_dict(), lambda: Resizing(3)),
    "renamed": (lambda: Former().state_dict(), Renaming),
    "renamed below": (
        lambda: nn.ModuleDict({"a": Former(), "b": nn.Linear(2, 2)}).state_dict(),
        lambda: nn.ModuleDict({"a": Renaming(), "b": nn.Linear(2, 2)}),
    ),
    "by its class": (lambda: nn.ModuleDict({"linear": nn.Linear(2, 2)}).state_dict(), OfItsOwn),
    "by its class, without strict": (lambda: WithoutStrict().state_dict(), WithoutStrict),
    "by the instance": (lambda: nn.Linear(2, 2).state_dict(), on_the_instance),
    "by the instance of a part": (
        lambda: nn.Sequential(nn.Linear(2, 2)).state_dict(),
        _from_state_dict_on_the_instance,
    ),
    "batch norm, unversioned": (lambda: without_batches(batch_norm(), unversioned=True), batch_norm),
    "batch norm, version 1": (lambda: without_batches(batch_norm(), unversioned=False), batch_norm),
    "a scalar of torch 0.3": (lambda: vector().state_dict(), scalar),
    "lazy": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).state_dict(),
        lambda: nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()),
    ),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("form", ["tag", "file"])
@pytest.mark.parametrize("name", CASES)
def test_what_torch_takes_is_taken(name: str, form: str, strict: bool, tmp_path: Path) -> None:
    stored, make = CASES[name]
    torch.manual_seed(0)
    state = stored()
    if form == "tag":
        xla_ckpt.save_checkpoint(tmp_path, "t", state)
        path, tag = tmp_path, "t"
    else:
        torch.save({"model": state}, tmp_path / "t.pt")
        path, tag = tmp_path / "t.pt", None
    mine, theirs = make(), make()
    theirs.load_state_dict(copy.deepcopy(state))
    loaded = xla_ckpt.load_checkpoint(path, tag, mine, strict=strict)
    assert state_of(mine) == state_of(theirs)
    assert not loaded.report.skipped


@pytest.mark.parametrize("make", [Renaming, lambda: nn.ModuleDict({"a": Renaming(), "b": nn.LazyLinear(2)})])
def test_what_torch_refuses_leaves_the_module_as_it_was(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    other = nn.ModuleDict({"linear": nn.Linear(3, 3), "a": Former(), "c": nn.Linear(2, 2)})
    xla_ckpt.save_checkpoint(tmp_path, "t", other)
    module = make()
    before = {n: v.clone() for n, v in module.state_dict().items() if not nn.parameter.is_lazy(v)}
    parameters = [*module.parameters()]
    with pytest.raises(IncompatibleCheckpointError, match="does not fit the target") as raised:
        xla_ckpt.load_checkpoint(tmp_path, "t", module)
    assert "model/c.weight: stored, but not wanted" in str(raised.value)
    after = {n: v for n, v in module.state_dict().items() if not nn.parameter.is_lazy(v)}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [id(p) for p in parameters] == [id(p) for p in module.parameters()]


def test_a_load_that_is_not_strict_leaves_out_what_the_module_refuses(tmp_path: Path) -> None:
    saved = nn.ModuleDict({"fc": nn.Linear(2, 2), "more": nn.Linear(2, 2)})
    xla_ckpt.save_checkpoint(tmp_path, "t", saved)
    module = Renaming()
    report = xla_ckpt.load_checkpoint(tmp_path, "t", module, strict=False).report
    assert torch.equal(module.linear.weight, saved["fc"].weight)  # type: ignore[arg-type]
    assert report.skipped == tuple(f"model/more.{n}: stored, but not wanted" for n in ("bias", "weight"))
    large = nn.ModuleDict({"fc": nn.Linear(3, 2)})
    xla_ckpt.save_checkpoint(tmp_path, "u", large)
    report = xla_ckpt.load_checkpoint(tmp_path, "u", module, strict=False).report
    assert torch.equal(module.linear.bias, large["fc"].bias)  # type: ignore[arg-type]
    assert torch.equal(module.linear.weight, saved["fc"].weight)  # type: ignore[arg-type]


def test_a_hook_that_raises_is_named(tmp_path: Path) -> None:
    module = nn.Linear(2, 2)
    xla_ckpt.save_checkpoint(tmp_path, "t", module)

    def refuse(*_: Any) -> None:
        raise RuntimeError("not this one")

    module.register_load_state_dict_pre_hook(refuse)
    with pytest.raises(LoadError, match="not this one"):
        xla_ckpt.load_checkpoint(tmp_path, "t", module)


# Inference mode.


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("hooked", [False, True])
def test_a_load_in_inference_mode_can_be_trained_on(hooked: bool, tmp_path: Path) -> None:
    model, optimizer = trained(1)
    step(model, optimizer)
    xla_ckpt.save_checkpoint(tmp_path, "t", model, optimizer, user_content={"x": torch.ones(2)})
    again, its_optimizer = trained(2)
    if hooked:
        again.register_load_state_dict_post_hook(lambda module, keys: None)
    with torch.inference_mode():
        content = xla_ckpt.load_checkpoint(tmp_path, "t", again, its_optimizer).user_content
        tree = xla_ckpt.restore(tmp_path, "t").tree
        assert torch.is_inference_mode_enabled()
    assert not content["x"].is_inference()
    assert not tree["model"]["weight"].is_inference()
    step(model, optimizer)
    step(again, its_optimizer)
    assert state_of(again) == state_of(model)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 3), new_norm, lambda: new_norm(1)[0]], ids=["", "hooks", "one"])
def test_a_module_of_inference_mode_is_loaded(make: Any, inside: bool, tmp_path: Path) -> None:
    make = make if make is not new_norm else lambda: new_norm(3)
    saved = make()
    xla_ckpt.save_checkpoint(tmp_path, "t", saved)
    with torch.inference_mode():
        loaded = make()
        for parameter in loaded.parameters():
            parameter.zero_()
    with torch.inference_mode(inside):
        xla_ckpt.load_checkpoint(tmp_path, "t", loaded)
    assert state_of(loaded) == state_of(saved)


# Wrappers at any depth.


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.old = Negated()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.l(x)) + self.old.weight  # type: ignore[no-any-return]


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


WRAPPED: dict[str, Callable[[nn.Module], Any]] = {
    "bare": lambda block: block,
    "compiled": compiled,
    "checkpoint": checkpoint_wrapper,
    "data parallel": nn.DataParallel,
    "compiled checkpoint": lambda block: compiled(checkpoint_wrapper(block)),
    "checkpoint of compiled": lambda block: checkpoint_wrapper(compiled(block)),
    "compiled inside": lambda block: _with(block, "l", compiled(block.l)),
}


def _with(module: nn.Module, name: str, child: nn.Module) -> nn.Module:
    module._modules[name] = child
    return module


WHOLE: dict[str, Callable[[nn.Module], Any]] = {
    "": lambda model: model,
    "compiled": compiled,
    "checkpoint": checkpoint_wrapper,
}


def wrapped(block: str, whole: str, seed: int) -> Any:
    torch.manual_seed(seed)
    return WHOLE[whole](nn.Sequential(WRAPPED[block](Block()), nn.Linear(3, 2)))


def values(model: nn.Module) -> list[Any]:
    return [value.tolist() for value in model.state_dict().values()]


KINDS = [(block, whole) for block in WRAPPED for whole in WHOLE]


@pytest.mark.parametrize(("block", "whole"), KINDS)
def test_names_are_those_without_wrappers(block: str, whole: str, tmp_path: Path) -> None:
    """Of each kind: it is saved as the bare model is, and loads what the bare one saved, and the other way round."""
    bare, model = wrapped("bare", "", 1), wrapped(block, whole, 2)
    xla_ckpt.save_checkpoint(tmp_path, "bare", bare)
    xla_ckpt.save_checkpoint(tmp_path, "wrapped", model)
    saved = xla_ckpt.restore(tmp_path, "wrapped").tree["model"]
    assert saved.keys() == bare.state_dict().keys()
    for name, of in bare.state_dict()._metadata.items():
        assert saved._metadata[name] == of
    again = wrapped("bare", "", 3)
    xla_ckpt.load_checkpoint(tmp_path, "wrapped", again)
    assert values(again) == values(model)
    xla_ckpt.load_checkpoint(tmp_path, "bare", model)
    assert values(model) == values(bare)


@pytest.mark.parametrize(("block", "whole"), KINDS)
def test_a_state_dict_with_the_steps_of_wrappers_is_loaded(block: str, whole: str, tmp_path: Path) -> None:
    """What an earlier version, or torch, saved of each kind: it loads into that kind and, but for ``module``, any."""
    model = wrapped(block, whole, 1)
    xla_ckpt.save_checkpoint(tmp_path, "t", model.state_dict())
    same, bare = wrapped(block, whole, 2), wrapped("bare", "", 3)
    xla_ckpt.load_checkpoint(tmp_path, "t", same)
    assert values(same) == values(model)
    if block != "data parallel":
        xla_ckpt.load_checkpoint(tmp_path, "t", bare)
        assert values(bare) == values(model)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("block", [name for name in WRAPPED if name != "bare"])
def test_averaged_models_have_the_names_of_the_bare_one(block: str, hooked: bool, tmp_path: Path) -> None:
    def averaged(kind: str, seed: int) -> nn.Module:
        model = torch.optim.swa_utils.AveragedModel(wrapped(kind, "compiled" if kind != "bare" else "", seed))
        model.update_parameters(wrapped("bare", "", seed + 10))
        if hooked:
            model.register_load_state_dict_pre_hook(lambda *_: None)
        return model

    bare, model, trained_model = averaged("bare", 1), averaged(block, 2), nn.Linear(1, 1)
    xla_ckpt.save_checkpoint(tmp_path, "bare", bare)
    xla_ckpt.save_checkpoint(tmp_path, "wrapped", trained_model, extras={"ema": model})
    again = averaged("bare", 3)
    xla_ckpt.load_checkpoint(tmp_path, "wrapped", trained_model, extras={"ema": again})
    assert values(again) == values(model)
    xla_ckpt.load_checkpoint(tmp_path, "bare", model)
    assert values(model) == values(bare)


def test_an_optimizer_has_the_names_without_wrappers(tmp_path: Path) -> None:
    def of(kind: str, seed: int) -> tuple[Any, torch.optim.Optimizer]:
        model = wrapped(kind, "", seed)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.arange(12.0).reshape(4, 3)).pow(2).sum().backward()
        optimizer.step()

    for kind in WRAPPED:
        model, optimizer = of("bare", 1)
        train(model, optimizer)
        xla_ckpt.save_checkpoint(tmp_path, "t", model, optimizer)
        again, its_optimizer = of(kind, 2)
        xla_ckpt.load_checkpoint(tmp_path, "t", again, its_optimizer)
        xla_ckpt.save_checkpoint(tmp_path, "u", again, its_optimizer)
        last, last_optimizer = of("bare", 3)
        xla_ckpt.load_checkpoint(tmp_path, "u", last, last_optimizer)
        for one, its in ((model, optimizer), (again, its_optimizer), (last, last_optimizer)):
            train(one, its)
        for other in (again, last):
            for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(mine, theirs)


class Refusing:
    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: Any) -> None:
        raise RuntimeError("not this one")


def test_a_module_that_is_put_back_is_of_its_version(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "t", nn.Linear(1, 1), extras={"ema": negated(1), "last": Refusing()})
    ema = negated(2)
    before = state_of(ema)
    with pytest.raises(LoadError, match="not this one"):
        xla_ckpt.load_checkpoint(tmp_path, "t", nn.Linear(1, 1), extras={"ema": ema, "last": Refusing()})
    assert state_of(ema) == before
