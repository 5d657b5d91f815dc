"""Names: where in what DCP's users store the model, the optimizer and the scheduler are, and what they are called."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import xla_ckpt
from tests.api.fsdp2_job import Container
from tests.fixtures.dcp.make import Full, Mlp, adam, alone, scheduler_of
from tests.formats.dcp_saves import save
from tests.formats.stock_dcp import STOCK, Stock, stock
from tests.same import same
from xla_ckpt.core.manifest.manifest import UnreadableArray
from xla_ckpt.core.plan.hints import ArrayHint, LoadHints
from xla_ckpt.core.tree.nested import build_nested, iterate_leaves
from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.formats.state_dict_search import build_training_state


class Array:
    """An array, told from others by its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Array) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


def is_array(value: object) -> bool:
    return isinstance(value, Array)


A, B, C, D = map(Array, "abcd")
SD = {"net.weight": A, "net.bias": B}
OSD = {
    "state": {"net.weight": {"m": C}, "net.bias": {"m": D}},
    "param_groups": [{"lr": 1, "params": ["net.weight", "net.bias"]}],
}
FLAT = {
    "state.net.weight.m": C,
    "state.net.bias.m": D,
    "param_groups.net.weight.lr": 1,
    "param_groups.net.bias.lr": 1,
}
BOTH = {"model": SD, "optimizer": OSD}


def program(*names: str, groups: Sequence[Sequence[str]] | None = None) -> LoadHints:
    return LoadHints(arrays={name: ArrayHint(shape=(1,), dtype="float32") for name in names}, parameter_groups=groups)


@pytest.mark.parametrize(
    "tree",
    [
        {"model": SD, "optimizer": OSD},
        {"model": SD, "optim": OSD},
        {"model": SD, "optimizer": FLAT},
        {**SD, "optimizer": FLAT},
        {**SD, "optimizer": OSD},
        {"app": {"model": SD, "optim": OSD}},
        {"app": {"model": SD, "optim": FLAT}},
        {"generator": SD, "optimizer": OSD},
        {"model_state_dict": SD, "optimizer_state_dict": OSD},
        {"a": {"b": {"model": SD}}, "o": OSD},
    ],
)
def test_model_and_optimizer_are_found_without_a_program(tree: dict[str, Any]) -> None:
    assert build_training_state(tree, LoadHints(), is_array) == BOTH


@pytest.mark.parametrize(
    ("tree", "names"),
    [
        ({"weights": SD, "optimizer": OSD}, ["net.weight", "net.bias"]),
        ({"ema": SD, "model": {"module.net.weight": C, "module.net.bias": D}}, ["net.weight", "net.bias"]),
        ({"model": {"net": {"weight": A, "bias": B}}}, ["net.weight", "net.bias"]),
        (SD, ["net.weight", "net.bias"]),
        (SD, ["module.net.weight", "module.net.bias"]),
        ({"model": SD}, ["_orig_mod.net.weight", "_orig_mod.net.bias"]),
        ({**SD, "optimizer": FLAT, "step": C}, ["net.weight", "net.bias"]),
    ],
)
def test_the_model_has_the_names_of_the_program(tree: dict[str, Any], names: list[str]) -> None:
    found = build_training_state(tree, program(*names), is_array)
    assert set(found["model"]) == set(names)
    if "optimizer" in tree:
        assert {n for g in found["optimizer"]["param_groups"] for n in g["params"]} == set(names)
        assert set(found["optimizer"]["state"]) == set(names)


def test_a_copy_of_the_weights_is_not_the_model() -> None:
    found = build_training_state({"ema": SD, "model": SD}, program(*SD), is_array)
    assert found == {"model": SD, "extras": {"ema": SD}}


def test_the_rest_is_extras_and_a_scheduler_is_one() -> None:
    tree = {**BOTH, "lr_scheduler": {"last_epoch": 3}, "epoch": 3, "rng": [1, 2]}
    assert build_training_state(tree, LoadHints(), is_array) == {
        **BOTH,
        "scheduler": {"last_epoch": 3},
        "extras": {"epoch": 3, "rng": [1, 2]},
    }
    app = {"app": {"model": SD, "optim": OSD, "scheduler": {"last_epoch": 3}, "step": 7}}
    assert build_training_state(app, LoadHints(), is_array) == {
        **BOTH,
        "scheduler": {"last_epoch": 3},
        "extras": {"app": {"step": 7}},
    }


def test_members_that_have_our_names_stay_where_they_are() -> None:
    tree = {**BOTH, "extras": {"rng": 1}, "user_content": {"x": 2}, "scheduler": {"last_epoch": 3}}
    assert build_training_state(tree, LoadHints(), is_array) == tree


@pytest.mark.parametrize("tree", [{"a": A, "b": 2}, {"x": {"y": A}}, {"a": A}, {}])
def test_what_is_no_training_state_stays_as_it_is(tree: dict[str, Any]) -> None:
    assert build_training_state(tree, LoadHints(), is_array) == tree


def test_parameters_at_the_top_alone_are_a_model() -> None:
    assert build_training_state(SD, LoadHints(), is_array) == {"model": SD}


def test_groups_are_rebuilt_from_equal_hyper_parameters() -> None:
    flat = {
        **{f"state.{n}.m": Array(n) for n in ("a.w", "a.b", "b.w")},
        **{f"param_groups.{n}.lr": lr for n, lr in (("b.w", 1), ("a.w", 1), ("a.b", 2))},
        **{f"param_groups.{n}.betas": (0.9, 0.95) for n in ("a.w", "a.b", "b.w")},
    }
    tree = {"model": {n: Array(f"{n}!") for n in ("a.w", "a.b", "b.w")}, "optimizer": flat}
    groups = build_training_state(tree, LoadHints(), is_array)["optimizer"]["param_groups"]
    assert groups == [
        {"lr": 1, "betas": (0.9, 0.95), "params": ["a.w", "b.w"]},
        {"lr": 2, "betas": (0.9, 0.95), "params": ["a.b"]},
    ]


def test_an_optimizer_without_state_has_its_groups() -> None:
    tree = {"model": SD, "optimizer": {"param_groups": OSD["param_groups"]}}
    assert build_training_state(tree, LoadHints(), is_array)["optimizer"]["state"] == {}


def test_states_by_number_stay_numbered() -> None:
    osd = {"state": {"0": {"m": C}, "1": {"m": D}}, "param_groups": [{"lr": 1, "params": [0, 1]}]}
    found = build_training_state({"model": SD, "optimizer": osd}, LoadHints(), is_array)["optimizer"]
    assert found["state"] == {0: {"m": C}, 1: {"m": D}}


OTHER = {"state": {"d.weight": {"m": A}}, "param_groups": [{"lr": 2, "params": ["d.weight"]}]}
GAN = {"gen": SD, "disc": {"d.weight": B}, "gen_optim": OSD, "disc_optim": OTHER}


def test_of_two_optimizers_the_one_of_the_program_is_taken() -> None:
    found = build_training_state(GAN, program("d.weight", groups=[["d.weight"]]), is_array)
    assert (found["model"], found["optimizer"]) == ({"d.weight": B}, OTHER)
    assert found["extras"] == {"gen": SD, "gen_optim": OSD}


def test_two_optimizers_that_fit_are_named_and_none_is_guessed() -> None:
    tree = {"model": SD, "one": OSD, "two": OSD}
    found = build_training_state(tree, program(*SD, groups=[list(SD)]), is_array)
    assert isinstance(found["optimizer"], UnreadableArray)
    assert "one, two" in found["optimizer"].problem
    assert build_training_state(tree, program(*SD), is_array) == {"model": SD, "extras": {"one": OSD, "two": OSD}}


def test_two_models_that_fit_are_named_and_none_is_guessed() -> None:
    found = build_training_state({"student": SD, "teacher": SD}, program(*SD), is_array)
    assert isinstance(found["model"], UnreadableArray)
    assert "student, teacher" in found["model"].problem


@pytest.mark.parametrize(
    ("paths", "match"),
    [
        ([("a",), ("a", "b")], "is a container"),
        ([("a", "b"), ("a",)], "is a container"),
        ([("a", "b"), ("a", 0)], "a dict and a list"),
        ([("a", 10**15)], "most of a list"),
        ([(0,)], "is a list"),
    ],
)
def test_paths_that_contradict_each_other_are_refused(paths: list[Any], match: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=match):
        build_nested([(path, object()) for path in paths])


NAMES = st.sampled_from(
    ["model", "optimizer", "state", "param_groups", "params", "net.weight", "module.net.weight", "net", "weight", "app"]
    + [
        "scheduler",
        "extras",
        "state.net.weight.m",
        "param_groups.net.weight.lr",
        "param_groups.x",
        "state.y",
        "0",
        "x.y",
    ]
)
LEAVES = st.one_of(st.builds(lambda: Array("")), st.integers(), st.none(), st.lists(st.sampled_from(["net.weight", 0])))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(NAMES, inner, max_size=5),
        st.dictionaries(st.integers(0, 3), inner, max_size=2),
        st.lists(inner, max_size=3),
    ),
    max_leaves=25,
)


def arrays(value: Any) -> list[int]:
    if isinstance(value, Array):
        return [id(value)]
    return sorted(i for v in iterate_leaves(value) for i in ([id(v)] if isinstance(v, Array) else []))


@given(st.dictionaries(NAMES, TREES, max_size=6), st.sets(NAMES, max_size=4), st.booleans())
def test_whatever_is_stored_no_array_is_lost(tree: dict[str, Any], names: set[str], optimizer: bool) -> None:
    hints = program(*names, groups=[sorted(names)] if optimizer else None)
    found = build_training_state(tree, hints, is_array)
    stored = arrays(tree)
    assert arrays(found) == stored


# Real programs.


def fits(of: Stock) -> tuple[torch.nn.Module, torch.optim.Optimizer, int]:
    """A program like the one that saved, whose weights and states are others; and its number of groups."""
    keys = {key.removeprefix("model.").removeprefix("app.") for key in of.contents()}
    stored = {p[p.index("param_groups") + 1] for p in of.paths().values() if "param_groups" in p[:-1]}
    stored |= set(range(len(of.objects().get("optimizer.param_groups", ()))))  # until 2.3 all of them are one value
    groups = 2 if of.name in ("flattened", "not_flat") else max(len(stored), 1)
    odd, low, bias = ("odd.weight" in keys), ("low.weight" in keys), any(k.endswith("net1.bias") for k in keys)
    make = Full if "scale" in keys else lambda: Mlp(odd=5 if odd else 0, low=low, bias=bias)
    model, optimizer = adam(make, alone, step=9, groups=groups)
    return model, optimizer, groups


@pytest.mark.parametrize(
    "of", [s for s in STOCK if s.readable and any(key.endswith("net1.weight") for key in s.contents())], ids=str
)
def test_a_program_loads_without_mapping_any_name(of: Stock) -> None:
    model, optimizer, groups = fits(of)
    keys = of.contents()
    has_optimizer = any("exp_avg" in key for key in keys) or of.name == "not_flat"
    xla_ckpt.load_checkpoint(of.path, model=model, optimizer=optimizer if has_optimizer else None)
    step = int(of.tag.partition("-")[2] or 1)
    right, right_optimizer = adam(type(model) if isinstance(model, Full) else lambda: like(model), alone, step, groups)
    for (name, found), wanted in zip(model.state_dict().items(), right.state_dict().values(), strict=True):
        assert same(found, wanted), name
    if of.name == "process":
        scheduler_of(right_optimizer)  # it sets the learning rates
    if has_optimizer:
        found_state, wanted_state = optimizer.state_dict(), right_optimizer.state_dict()
        assert found_state["param_groups"] == wanted_state["param_groups"]
        for i, state in wanted_state["state"].items():
            for key, value in state.items():
                assert same(found_state["state"][i][key], value), (i, key)


FILLED = ("2.1_sharded_tensors", "spmd", "manager", "hugging_face", "hugging_face_consolidated")


@pytest.mark.parametrize("of", [s for s in STOCK if s.name in FILLED], ids=str)
def test_a_dict_is_filled_whoever_sharded_it(of: Stock) -> None:
    held = {k.removeprefix("model."): v for k, v in of.contents().items() if k.startswith("model.") or "." not in k}
    held = held or of.contents()
    model = {key: torch.zeros_like(value) for key, value in held.items()}
    xla_ckpt.load_checkpoint(of.path, model=model)
    assert model
    assert all(same(model[key], value) for key, value in held.items())


@pytest.mark.parametrize("tag", ["step-100", "step-200"])
def test_what_torchtitan_saved_is_loaded(tag: str) -> None:
    of = stock("titan", tag)
    contents = of.contents()
    names = [key for key in contents if "." in key and not key.startswith(("optimizer", "train_state"))]
    model = Container({name: list(contents[name].shape) for name in names})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    xla_ckpt.load_checkpoint(of.path, model=model, optimizer=optimizer, scheduler=scheduler)
    for name, parameter in model.named_parameters():
        assert same(parameter.data, contents[name])
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert same(optimizer.state[parameter][key], contents[f"optimizer.state.{name}.{key}"])
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert scheduler.last_epoch == of.objects()["lr_scheduler.last_epoch"]


def like(model: torch.nn.Module) -> torch.nn.Module:
    odd = model.odd.weight.shape[0] if hasattr(model, "odd") else 0
    return Mlp(odd=odd, low=hasattr(model, "low"), bias=model.net1.bias is not None)


def test_of_two_optimizers_the_error_names_both_and_restore_reads_both(tmp_path: Path) -> None:
    model, one = adam(Mlp, alone, groups=1)
    two = torch.optim.AdamW(model.parameters(), lr=0.5)
    save({"model": model.state_dict(), "one": one.state_dict(), "two": two.state_dict()}, tmp_path / "c")
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="several optimizers .*: one, two"):
        xla_ckpt.load_checkpoint(tmp_path / "c", model=model, optimizer=two)
    xla_ckpt.load_checkpoint(tmp_path / "c", model=model)
    assert set(xla_ckpt.restore(tmp_path / "c").tree["extras"]) == {"one", "two"}
