"""Pipeline stages: different names on different ranks, one global state, and what is tied across stages stored once."""

from __future__ import annotations

from pathlib import Path

import pytest

import xla_ckpt
from tests.jobs import job

STAGES = """
root = sys.argv[1]
mesh = xla_ckpt.Mesh(pp=2, dp=2)
stage = mesh.coordinates(rank)["pp"]

def part(seed, tied=None):
    torch.manual_seed(seed)
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(300, 64)})  # tied: both stages have it
    extra = torch.nn.Linear(64, 64)
    with torch.no_grad():
        model["embed"].weight.copy_(torch.arange(300 * 64.0).reshape(300, 64) if tied is None else tied)
        extra.weight.fill_(float(stage))
    model[f"layer{stage}"] = extra
    return model

model = part(0)
optimizer = torch.optim.AdamW([{"params": [model["embed"].weight], "lr": 0.5},
                               {"params": list(model[f"layer{stage}"].parameters()), "lr": 0.25}])
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)
optimizer.step()
handle = xla_ckpt.save_checkpoint(root, "a", model, optimizer, user_content={"at": 3}, mesh=mesh, async_save=True)
say("wrote", handle.result().nbytes)

fresh = part(1, tied=torch.zeros(300, 64))
again = torch.optim.AdamW([{"params": [fresh["embed"].weight]}, {"params": list(fresh[f"layer{stage}"].parameters())}])
assert xla_ckpt.load_checkpoint(root, "a", fresh, again, mesh=mesh).user_content == {"at": 3}
for (name, mine), theirs in zip(fresh.named_parameters(), model.parameters()):
    assert torch.equal(mine, theirs), name
    assert torch.equal(again.state[mine]["exp_avg"], optimizer.state[theirs]["exp_avg"])
assert [g["lr"] for g in again.param_groups] == [0.5, 0.25]

# what no stage wants, and what a stage misses, is said by all ranks
fresh["other"] = torch.nn.Linear(2, 2)
try:
    xla_ckpt.load_checkpoint(root, "a", fresh, mesh=mesh)
except xla_ckpt.IncompatibleCheckpointError as error:
    say("missing", "other.weight: wanted, but not stored" in str(error), error.rank)
del fresh["other"], fresh["embed"]
report = xla_ckpt.LoadReport()
try:
    xla_ckpt.load_checkpoint(root, "a", fresh, mesh=mesh)
except xla_ckpt.IncompatibleCheckpointError as error:
    say("unwanted", error.details.strip())
xla_ckpt.load_checkpoint(root, "a", fresh, mesh=mesh, strict=False, report=report)
say("skipped", report.skipped)

# a tie that has come apart is no tie
for call, groups in (
    (part(0, tied=torch.full((300, 64), float(stage))), None),
    (model, torch.optim.SGD([{"params": [p]} for p in model.parameters()][: 1 + stage], lr=0.1)),
):
    try:
        xla_ckpt.save_checkpoint(root, "bad", call, groups, mesh=mesh)
    except xla_ckpt.SaveError as error:
        say("refused", type(error).__name__, error.leaf)
assert xla_ckpt.list_tags(root) == ["a"]
say("done")
"""


def test_stages_share_one_state(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    said = job(STAGES, 4, tmp_path, root)
    assert said.count("done") == 4
    tree = xla_ckpt.restore(root, "a").tree
    assert sorted(tree["model"]) == ["embed.weight", "layer0.bias", "layer0.weight", "layer1.bias", "layer1.weight"]
    assert [g["params"] for g in tree["optimizer"]["param_groups"]] == [
        ["embed.weight"], ["layer0.weight", "layer0.bias", "layer1.weight", "layer1.bias"],
    ]  # fmt: skip
    wrote = [int(s.split()[1]) for s in said if s.startswith("wrote")]
    report = xla_ckpt.verify(root, "a")
    assert report.ok
    assert sum(wrote) == report.nbytes == 3 * 4 * (300 * 64 + 2 * (64 * 64 + 64)) + 5 * 4  # the tied one once
    assert said.count("missing True 0") == 4
    assert [s for s in said if s.startswith("unwanted")] == ["unwanted model/embed.weight: stored, but not wanted"] * 4
    assert said.count("skipped ['model/embed.weight: stored, but not wanted']") == 4
    assert said.count("refused DivergentReplicasError model/embed.weight") == 4
    assert said.count("refused SaveError optimizer/param_groups") == 4


def test_explain_says_what_would_be_read_and_what_would_fail(tmp_path: Path) -> None:
    job(
        """
        import torch
        mesh = xla_ckpt.Mesh(tp=4)
        tree = {"up": torch.ones(256, 512), "down": torch.ones(1024, 128), "norm": torch.ones(512)}
        rules = [("up", ("tp", None)), ("down", (None, "tp"))]
        xla_ckpt.save(sys.argv[1], "a", {"model": tree}, mesh=mesh, shardings=rules)
        xla_ckpt.save_checkpoint(sys.argv[1], "b", extras={"rng": xla_ckpt.RNGState()}, mesh=mesh)
        """,
        4, tmp_path, tmp_path / "ckpt",
    )  # fmt: skip
    root = tmp_path / "ckpt"
    found = xla_ckpt.explain(root, "a", like_mesh="dp=2,tp=2")
    assert found.ok
    assert found.saved_ranks == 4
    assert found.split == {"model/up": ("tp", None), "model/down": (None, "tp")}
    half = 4 * (512 * 512 + 1024 * 256) + 4 * 512
    assert [r.needed_bytes for r in found.readings] == [half] * 4
    assert [r.read_bytes for r in found.readings] == [half] * 4
    assert found.readings[0].files == found.readings[2].files
    assert min(found.readings[0].files) == "model/00001-of-00004.safetensors"
    whole = xla_ckpt.explain(root, "a", like_mesh=xla_ckpt.Mesh(), shardings=[(".", None)])
    assert [r.needed_bytes for r in whole.readings] == [2 * half - 4 * 512]
    bad = xla_ckpt.explain(root, "a", like_mesh="tp=3", shardings=[("up", (("tp", 2), None)), ("norm", (None, "tp"))])
    assert not bad.ok
    assert any("model/up" in p and "do not divide by 3" in p for p in bad.problems)
    assert any("model/norm" in p and "a rule splits 2 dims" in p for p in bad.problems)
    rng = xla_ckpt.explain(root, "b", like_mesh="dp=2")
    assert rng.ok
    assert "extras/rng holds a state for each of 4 ranks" in rng.notes[0]
    (root / "a" / "model" / "00002-of-00004.safetensors").unlink()
    assert "payload file is missing" in xla_ckpt.explain(root, "a", like_mesh="tp=4").problems[0]
    with pytest.raises(xla_ckpt.UsageError, match="no mesh axis"):
        xla_ckpt.explain(root, "a", like_mesh="x=4")
    with pytest.raises(xla_ckpt.NoCheckpointError):
        xla_ckpt.explain(root, "c", like_mesh="tp=4")
