"""Tied weights, divided among pipeline stages by a conversion: each stage that has the weight has its state, too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.formats.gold import Gold, Target, stage_of
from tests.formats.references import whole
from tests.formats.same import as_theirs
from tests.formats.test_nxd_layouts import rank_file
from tests.formats.writing import LAYOUTS, as_job
from xla_ckpt import Mesh

GOLD = "tp2_dp2_fused3_tied__xser_sync"
MESH = Mesh(pp=2, dp=2, tp=2)
CUT = "model.layers.0"


def stage_problems(gold: Gold, tag: Path, pp: int, *, zero: bool) -> list[str]:
    """What is wrong with the rank files of a stage, for an optimizer that the stage itself makes of its parameters."""
    bad = []
    names = [n for n in gold.truth["params"] if stage_of(n) == pp]
    order = sorted(names, key=lambda n: gold.truth["params"][n].ndim < 2)  # its groups: matrices, then the rest
    for rank in range(MESH.size):
        at = MESH.coordinates(rank)
        if at["pp"] != pp or (at["dp"] and not zero):
            continue
        path = f"dp_rank_{at['dp']:02d}_tp_rank_{at['tp']:02d}_pp_rank_{pp:02d}.pt"
        model = whole(tag / "model" / f"dp_rank_00_tp_rank_{at['tp']:02d}_pp_rank_{pp:02d}.pt")
        if [n for n in model if n in names] != names:
            bad.append(f"{path} has the names {list(model)}")
        optim = whole(tag / "optim" / path)
        sizes = [len(g["params"]) for g in optim["param_groups"]]
        if [i for g in optim["param_groups"] for i in g["params"]] != list(range(len(order))):
            bad.append(f"{path} has groups of {sizes} for {len(order)} parameters")
            continue
        states = optim["base_state" if zero else "state"]
        cut = gold.shard if zero else gold.part
        for number, name in enumerate(order):
            first = "model.embed_tokens.weight" if name == "lm_head.weight" else name
            want = cut(first, gold.truth["exp_avg"][first], MESH, rank)
            if not torch.equal(states[number]["exp_avg"], want):
                bad.append(f"{path}: state {number} is not that of {name}")
    return bad


@LAYOUTS
@pytest.mark.parametrize("zero", [False, True], ids=["plain", "zero1"])
@pytest.mark.parametrize("by_way_of", [None, "native", "xser"])
def test_each_stage_has_the_state_of_the_weights_that_it_has(
    layout: str, zero: bool, by_way_of: str | None, tmp_path: Path
) -> None:
    gold = Gold(GOLD, "step_40")
    like = Target(gold)
    source, given = gold.root, {"model": like.model, "optimizer": like.optimizer}
    if by_way_of is not None:
        xla_ckpt.convert(source, tmp_path / "ours", gold.tag, to=by_way_of, mesh="tp=2", **given)
        source, given = tmp_path / "ours", {}
    xla_ckpt.convert(
        source, tmp_path, gold.tag, to=layout, mesh=MESH, as_tag="new", pipeline_cuts=[CUT], zero1=zero, **given
    )
    assert xla_ckpt.verify(tmp_path, "new").ok
    assert [stage_problems(gold, tmp_path / "new", pp, zero=zero) for pp in range(2)] == [[], []]
    for theirs in (False, True):
        target = Target(gold)
        if theirs:
            as_theirs(tmp_path / "new")
        xla_ckpt.load_checkpoint(tmp_path, "new", target.model, target.optimizer)
        assert not target.differences()


NAMES = ("embed", "mid", "last", "head")


def tied() -> Any:
    model = torch.nn.ModuleDict({n: torch.nn.Linear(2, 2, bias=False) for n in NAMES})
    model["head"].weight = model["embed"].weight
    return model


def written(root: Path, head: float) -> None:
    """A tag of theirs, of one stage; each weight is its number, and each state 10 times that."""
    value = {f"{name}.weight": float(i) for i, name in enumerate(NAMES)} | {"head.weight": head}
    rank_file(root / "a/model", {name: torch.full((2, 2), v) for name, v in value.items()})
    moments = [torch.full((2, 2), 10.0 * i) for i in range(3)]
    state = {i: {"step": torch.tensor(1.0), "exp_avg": m, "exp_avg_sq": m} for i, m in enumerate(moments)}
    rank_file(root / "a/optim", {"state": state, "param_groups": [{"lr": 0.5, "params": [0, 1, 2]}]})
    (root / "a/done").write_text("1")


@LAYOUTS
def test_the_state_stands_where_the_stage_has_the_weight(layout: str, tmp_path: Path) -> None:
    """The last stage has it under its other name, behind its own weights."""
    written(tmp_path, 0.0)
    model = tied()
    optimizer = torch.optim.AdamW(model.parameters())
    xla_ckpt.convert(
        tmp_path, tmp_path, "a", to=layout, mesh="pp=2", as_tag="b", pipeline_cuts=["mid"], model=model,
        optimizer=optimizer,
    )  # fmt: skip
    for pp, (names, states) in enumerate([(["embed", "mid"], [0, 10]), (["last", "head"], [20, 0])]):
        path = f"dp_rank_00_tp_rank_00_pp_rank_{pp:02d}.pt"
        assert list(whole(tmp_path / "b/model" / path)) == [f"{name}.weight" for name in names]
        optim = whole(tmp_path / "b/optim" / path)
        assert [g["params"] for g in optim["param_groups"]] == [[0, 1]]
        assert [optim["state"][i]["exp_avg"].unique().tolist() for i in range(2)] == [[states[0]], [states[1]]]


def test_a_tie_of_theirs_is_stored_once(tmp_path: Path) -> None:
    written(tmp_path / "theirs", 0.0)
    model = tied()
    xla_ckpt.convert(
        tmp_path / "theirs", tmp_path / "ours", model=model, optimizer=torch.optim.AdamW(model.parameters())
    )
    aliases = json.loads((tmp_path / "ours/a/manifest.json").read_text())["aliases"]
    assert aliases == {"model/head.weight": "model/embed.weight"}
    for root in ("theirs", "ours"):
        untied = torch.nn.ModuleDict({n: torch.nn.Linear(2, 2, bias=False) for n in NAMES})
        xla_ckpt.load_checkpoint(tmp_path / root, model=untied)
        assert [untied[name].weight[0, 0].item() for name in NAMES] == [0, 1, 2, 0]


def test_a_tie_that_came_apart_stays_two(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(tmp_path / "theirs", 7.0)
    model = tied()
    xla_ckpt.convert(
        tmp_path / "theirs", tmp_path / "ours", model=model, optimizer=torch.optim.AdamW(model.parameters())
    )
    tree = xla_ckpt.restore(tmp_path / "ours").tree["model"]
    assert [tree[f"{n}.weight"][0, 0].item() for n in ("embed", "head")] == [0, 7]
    assert "model/embed.weight and model/head.weight are one parameter of the model" in caplog.text


def stage(names: tuple[str, ...]) -> tuple[Any, Any]:
    """What a stage of a pipeline has, and its optimizer."""
    model = torch.nn.ModuleDict({n: torch.nn.Linear(2, 2, bias=False) for n in names})
    return model, torch.optim.AdamW(model.parameters())


STAGES = (NAMES[:2], NAMES[2:])


def states(model: Any, optimizer: Any) -> dict[str, list[list[float]]]:
    """The values of each weight, and those of its state."""
    return {
        n.removesuffix(".weight"): [p.unique().tolist(), optimizer.state[p]["exp_avg"].unique().tolist()]
        for n, p in model.named_parameters()
    }


def test_stages_with_a_name_each_share_what_was_one_parameter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files have one state, and do not say whose it is: that the weights are equal does."""
    written(tmp_path, 0.0)
    stages = [stage(names) for names in STAGES]
    as_job(monkeypatch, Mesh(pp=2), "load", lambda rank: xla_ckpt.load_checkpoint(tmp_path, "a", *stages[rank]).report)
    want = {"embed": [[0], [0]], "mid": [[1], [10]], "last": [[2], [20]], "head": [[0], [0]]}
    assert states(*stages[0]) | states(*stages[1]) == want


def is_refused(monkeypatch: pytest.MonkeyPatch, root: Path, names: Sequence[tuple[str, ...]]) -> None:
    """No stage of a pipeline loads a tag, since its numbers may mean other parameters."""
    stages = [stage(own) for own in names]
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="its groups are not those of this optimizer"):
        as_job(monkeypatch, Mesh(pp=2), "load", lambda rank: xla_ckpt.load_checkpoint(root, "a", *stages[rank]).report)


@pytest.mark.parametrize(("last", "head"), [(1.0, 0.0), (2.0, 7.0)], ids=["two pairs are equal", "none is"])
def test_stages_do_not_share_a_state_that_may_be_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: float, head: float
) -> None:
    written(tmp_path, head)
    values = zip(NAMES, (0.0, 1.0, last, head), strict=True)
    rank_file(tmp_path / "a/model", {f"{name}.weight": torch.full((2, 2), value) for name, value in values})
    is_refused(monkeypatch, tmp_path, STAGES)


def test_weights_that_were_left_out_are_not_taken_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stage(("embed", "head"))[0]
    model["head"].weight = model["embed"].weight
    optimizer = torch.optim.AdamW(model.parameters())
    xla_ckpt.save_checkpoint(tmp_path, "a", model, optimizer, layout="xser")
    for file in as_theirs(tmp_path / "a").glob("model/*.tensors/*"):
        file.unlink()
    is_refused(monkeypatch, tmp_path, [("embed",), ("head",)])


LEFT_OUT = "model/model.rotary_emb.inv_freq"


@pytest.mark.parametrize("case", ["tp2_dp2_z1m__xser_small", "tp2_pp2_dp2_z1m__xser_sync"])
@pytest.mark.parametrize("to", ["pt", "xser", "native"])
def test_what_the_old_tag_does_not_hold_is_told(
    case: str, to: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """avoid_saving_lower_precision_weights has neuronx-distributed write no tensor of the model: buffers are lost."""
    gold = Gold(case, "step_40")
    shutil.copytree(gold.root, tmp_path / "theirs")
    for file in (tmp_path / "theirs/step_40/model").glob("*.tensors/*"):
        file.unlink()
    target = Target(gold)
    xla_ckpt.convert(tmp_path / "theirs", tmp_path / "new", to=to, model=target.model, optimizer=target.optimizer)
    (told,) = [r.getMessage() for r in caplog.records if "has no bytes of" in r.getMessage()]
    assert LEFT_OUT in told
    assert "a strict load refuses it" in told
    assert (to == "pt") == ("refuses a pt tag" in caplog.text)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="inv_freq: wanted, but not stored"):
        xla_ckpt.load_checkpoint(tmp_path / "new", model=Target(gold).model)
    caplog.clear()
    xla_ckpt.convert(gold.root, tmp_path / "whole", to=to, model=target.model, optimizer=target.optimizer)
    assert "has no bytes of" not in caplog.text
