"""Pipeline stages: different names on different ranks, one global state, and what is tied across stages stored once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.jobs import run_on_ranks

MESH = xla_ckpt.Mesh(pp=2, dp=2)


def part(stage: int, seed: int, tied: torch.Tensor | None = None) -> torch.nn.ModuleDict:
    """What a stage has: a layer of its own, and an embedding that both stages have."""
    torch.manual_seed(seed)
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(300, 64)})
    extra = torch.nn.Linear(64, 64)
    with torch.no_grad():
        model["embed"].weight.copy_(torch.arange(300 * 64.0).reshape(300, 64) if tied is None else tied)
        extra.weight.fill_(float(stage))
    model[f"layer{stage}"] = extra
    return model


def groups_of(model: torch.nn.ModuleDict, stage: int, *rates: float) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = [
        {"params": [model["embed"].weight]},
        {"params": list(model[f"layer{stage}"].parameters())},
    ]
    return [{**group, **({"lr": rates[i]} if rates else {})} for i, group in enumerate(groups)]


def saves_and_loads(rank: int, root: Path) -> int:
    """Train a step, save and load; the bytes that this rank wrote."""
    stage = MESH.coordinates(rank)["pp"]
    model = part(stage, 0)
    optimizer = torch.optim.AdamW(groups_of(model, stage, 0.5, 0.25))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    handle = xla_ckpt.save_checkpoint(root, "a", model, optimizer, user_content={"at": 3}, mesh=MESH, async_save=True)
    wrote = handle.result().nbytes

    fresh = part(stage, 1, tied=torch.zeros(300, 64))
    again = torch.optim.AdamW(groups_of(fresh, stage))
    assert xla_ckpt.load_checkpoint(root, "a", fresh, again, mesh=MESH).user_content == {"at": 3}
    for (name, mine), theirs in zip(fresh.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
        assert torch.equal(again.state[mine]["exp_avg"], optimizer.state[theirs]["exp_avg"])
    assert [g["lr"] for g in again.param_groups] == [0.5, 0.25]

    # what no stage wants, and what a stage misses, is said by all ranks
    fresh["other"] = torch.nn.Linear(2, 2)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"other\.weight: wanted, but not stored") as caught:
        xla_ckpt.load_checkpoint(root, "a", fresh, mesh=MESH)
    assert caught.value.rank == 0
    del fresh["other"], fresh["embed"]
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError) as caught:
        xla_ckpt.load_checkpoint(root, "a", fresh, mesh=MESH)
    assert caught.value.details.strip() == "model/embed.weight: stored, but not wanted"
    report = xla_ckpt.load_checkpoint(root, "a", fresh, mesh=MESH, strict=False).report
    assert report.skipped == ("model/embed.weight: stored, but not wanted",)

    # a tie that has come apart is no tie
    with pytest.raises(xla_ckpt.DivergentReplicasError) as apart:
        xla_ckpt.save_checkpoint(root, "bad", part(stage, 0, torch.full((300, 64), float(stage))), mesh=MESH)
    assert apart.value.leaf == "model/embed.weight"
    other = torch.optim.SGD([{"params": [p]} for p in model.parameters()][: 1 + stage], lr=0.1)
    with pytest.raises(xla_ckpt.SaveError) as differ:
        xla_ckpt.save_checkpoint(root, "bad", model, other, mesh=MESH)
    assert (type(differ.value), differ.value.leaf) == (xla_ckpt.SaveError, "optimizer/param_groups")
    assert xla_ckpt.list_tags(root) == ["a"]
    return wrote


def test_stages_share_one_state(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    wrote = run_on_ranks(saves_and_loads, 4, root)
    tree = xla_ckpt.restore(root, "a").tree
    assert sorted(tree["model"]) == ["embed.weight", "layer0.bias", "layer0.weight", "layer1.bias", "layer1.weight"]
    assert [g["params"] for g in tree["optimizer"]["param_groups"]] == [
        ["embed.weight"], ["layer0.weight", "layer0.bias", "layer1.weight", "layer1.bias"],
    ]  # fmt: skip
    report = xla_ckpt.verify(root, "a")
    assert report.ok
    assert sum(wrote) == report.nbytes == 3 * 4 * (300 * 64 + 2 * (64 * 64 + 64)) + 5 * 4  # the tied one once


def saves_split(rank: int, root: Path) -> None:
    mesh = xla_ckpt.Mesh(tp=4)
    tree = {"up": torch.ones(256, 512), "down": torch.ones(1024, 128), "norm": torch.ones(512)}
    rules = [("up", ("tp", None)), ("down", (None, "tp"))]
    xla_ckpt.save(root, "a", {"model": tree}, mesh=mesh, shardings=rules)
    xla_ckpt.save_checkpoint(root, "b", extras={"rng": xla_ckpt.RNGState()}, mesh=mesh)


def test_explain_says_what_would_be_read_and_what_would_fail(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    run_on_ranks(saves_split, 4, root)
    found = xla_ckpt.explain(root, "a", mesh="dp=2,tp=2")
    assert found.ok
    assert found.saved_ranks == 4
    assert found.split == {"model/up": ("tp", None), "model/down": (None, "tp")}
    half = 4 * (512 * 512 + 1024 * 256) + 4 * 512
    assert [r.needed_bytes for r in found.readings] == [half] * 4
    assert [r.read_bytes for r in found.readings] == [half] * 4
    assert found.readings[0].files == found.readings[2].files
    assert min(found.readings[0].files) == "model/00001-of-00004.safetensors"
    whole = xla_ckpt.explain(root, "a", mesh=xla_ckpt.Mesh(), shardings=[(".", None)])
    assert [r.needed_bytes for r in whole.readings] == [2 * half - 4 * 512]
    bad = xla_ckpt.explain(root, "a", mesh="tp=3", shardings=[("up", (("tp", 2), None)), ("norm", (None, "tp"))])
    assert not bad.ok
    assert any("model/up" in p and "do not divide by 3" in p for p in bad.problems)
    assert any("model/norm" in p and "a rule splits 2 dims" in p for p in bad.problems)
    rng = xla_ckpt.explain(root, "b", mesh="dp=2")
    assert rng.ok
    assert "extras/rng holds a state for each of 4 ranks" in rng.notes[0]
    (root / "a" / "model" / "00002-of-00004.safetensors").unlink()
    assert "payload file is missing" in xla_ckpt.explain(root, "a", mesh="tp=4").problems[0]
    with pytest.raises(xla_ckpt.UsageError, match="no mesh axis"):
        xla_ckpt.explain(root, "a", mesh="x=4")
    with pytest.raises(xla_ckpt.NoCheckpointError):
        xla_ckpt.explain(root, "c", mesh="tp=4")
