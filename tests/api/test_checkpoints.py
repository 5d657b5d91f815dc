"""A root directory as an object: each method, on file systems, in memory, and on tags of other libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xla_ckpt
from tests.cli.test_cli import call
from xla_ckpt import Checkpoints

TREE = {
    "w": torch.arange(6.0).reshape(2, 3),
    "deep": [{"n": np.arange(4), "x": 0.5}, None],
    "b": torch.ones(2).bfloat16(),
}


@pytest.fixture(params=["files", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "root") if request.param == "files" else f"memory://{tmp_path.name}"


def saved(root: str, **options: Any) -> Checkpoints:
    runs = Checkpoints(root)
    assert (runs.tags(), runs.latest(), runs.summaries()) == ([], None, ()), "a root that is not there yet has no tags"
    xla_ckpt.save(root, "a", TREE, **options)
    xla_ckpt.save(root, "b", {**TREE, "w": TREE["w"] + 1, "step": 3}, **options)
    xla_ckpt.finalize_checkpoint()
    return runs


def test_what_is_there(root: str) -> None:
    runs = saved(root)
    assert (runs.tags(), runs.latest(), repr(runs)) == (["a", "b"], "b", f"Checkpoints({runs.path!r})")
    first, second = runs.summaries()
    assert (first.tag, first.arrays, first.ranks, first.layout, first.problem) == ("a", 3, 1, "native", None)
    assert second.sequence == first.sequence + 1
    assert not second.pinned


def test_what_a_tag_holds(root: str) -> None:
    contents = saved(root).show("a")
    assert {(a.leaf, a.dtype, a.shape) for a in contents.arrays} == {
        ("w", "float32", (2, 3)), ("deep/0/n", "int64", (4,)), ("b", "bfloat16", (2,)),
    }  # fmt: skip
    assert contents.values == {"deep/0/x": 0.5, "deep/1": None}
    assert contents.nbytes == sum(a.nbytes for a in contents.arrays) == 24 + 32 + 4
    assert {a.leaf for a in Checkpoints(root).show(leaf="w").arrays} == {"w"}, "the newest"
    with pytest.raises(xla_ckpt.UsageError, match="no leaf is like this"):
        Checkpoints(root).show(leaf="nothing")


def test_single_leaves_are_read(root: str) -> None:
    runs = saved(root)
    assert torch.equal(runs.read("w", "a"), TREE["w"])
    assert torch.equal(runs.read("w"), TREE["w"] + 1)
    assert np.array_equal(runs.read("deep/0/n"), np.arange(4))
    assert runs.read("b").dtype == torch.bfloat16
    assert (runs.read("step"), runs.read("deep/0/x"), runs.read("deep/1")) == (3, 0.5, None)
    assert runs.read("deep")[0]["x"] == 0.5
    assert runs.read(tag="a").keys() == TREE.keys()
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match=r"no such part.*Leaf paths begin with: w, deep"):
        runs.read("v")
    with pytest.raises(xla_ckpt.NoCheckpointError):
        runs.read("w", "c")


def test_nothing_else_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {f"w{n}": torch.full((1 << 18,), float(n)) for n in range(4)}
    xla_ckpt.save_checkpoint(tmp_path, "a", model)
    heard: list[Any] = []
    ended = xla_ckpt.on_report(heard.append)
    try:
        assert Checkpoints(tmp_path).read("model/w2")[0] == 2
    finally:
        ended()
    (report,) = heard
    assert report.read_bytes <= report.needed_bytes * 1.01 == (1 << 20) * 1.01


def test_a_damaged_leaf_is_not_read_and_others_are(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", {f"w{n}": torch.full((1 << 18,), float(n)) for n in range(4)})
    (file,) = (tmp_path / "a/model").iterdir()
    with open(file, "r+b") as payload:
        payload.seek(-5, 2)
        payload.write(b"\1")
    runs = Checkpoints(tmp_path)
    damaged = dict.fromkeys(("model/w0", "model/w1", "model/w2", "model/w3"), True)
    for leaf in damaged:
        try:
            damaged[leaf] = bool((runs.read(leaf, "a") != float(leaf[-1])).any())
        except xla_ckpt.CorruptCheckpointError:
            damaged[leaf] = None  # type: ignore[assignment]
    assert sorted(damaged.values(), key=str) == [False, False, False, None]
    assert not runs.verify("a").ok


def test_a_save_in_flight_is_waited_for(root: str) -> None:
    runs = Checkpoints(root)
    xla_ckpt.save(root, "a", {"w": torch.ones(1000)}, async_save=True)
    assert runs.read("w").sum() == 1000


def test_verified_repaired_compared(root: str) -> None:
    runs = saved(root, options=xla_ckpt.SaveOptions(parity="file"))
    assert runs.verify("a").ok
    assert runs.verify().tag == "b"
    assert runs.repair("a") == ()
    difference = runs.diff("a", "b")
    assert (list(difference.moved), difference.only_in_b) == (["w"], ("step",))
    assert runs.diff("a", leaf="deep").same


def test_kept_and_deleted(root: str) -> None:
    runs = saved(root)
    assert [runs.pin("a"), runs.pin("a")] == [True, False]
    with pytest.raises(xla_ckpt.UsageError, match="pinned"):
        runs.delete("a")
    assert runs.unpin("a")
    runs.delete("a")
    with pytest.raises(xla_ckpt.UsageError):
        runs.delete("b")
    runs.delete("b", force=True)
    assert runs.tags() == []
    with pytest.raises(xla_ckpt.NoCheckpointError):
        runs.pin("b")


def test_a_rank_reads_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job whose other ranks do not come would be waited for. The order of later calls is not disturbed either."""
    from xla_ckpt.distributed import current_job
    from xla_ckpt.distributed import job as calls

    xla_ckpt.save(tmp_path, "a", TREE)
    before = [*calls._sequences], [rounds.last_number for rounds in calls._sequences]
    monkeypatch.setattr(current_job, "get_current_job", lambda *_, **__: pytest.fail("it meets other ranks"))
    monkeypatch.setattr("xla_ckpt.loading.load.get_current_job", current_job.get_current_job)
    assert torch.equal(Checkpoints(tmp_path).read("w"), TREE["w"])
    assert ([*calls._sequences], [rounds.last_number for rounds in calls._sequences]) == before


def test_the_command_line_prints_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = saved(str(tmp_path / "r"))
    shown = json.loads(call(capsys, "show", str(tmp_path / "r"), "--tag", "a", "--json")[1])
    contents = runs.show("a")
    assert shown["arrays"] == [
        {"leaf": a.leaf, "dtype": a.dtype, "shape": [*a.shape], "nbytes": a.nbytes, "shards": a.shards}
        for a in contents.arrays
    ]
    assert (shown["values"], shown["layout"], shown["ranks"]) == (contents.values, contents.layout, contents.ranks)


def test_tags_of_neuronx_distributed(tmp_path: Path) -> None:
    from tests.formats.same import as_theirs

    model = torch.nn.Linear(3, 5)
    xla_ckpt.save_checkpoint(tmp_path, "a", model, layout="pt")
    as_theirs(tmp_path / "a")
    runs = Checkpoints(tmp_path)
    (summary,) = runs.summaries()
    assert (summary.tag, summary.sequence, summary.arrays) == ("a", 0, None)
    assert runs.show("a").layout == summary.layout == "neuronx-distributed"
    assert torch.equal(runs.read("model/weight"), model.weight.detach())
    assert runs.verify("a").ok
    assert runs.diff("a", "a").same
    for refused in (runs.pin, runs.unpin, runs.delete):
        with pytest.raises(xla_ckpt.UsageError, match="neither pins nor deletes"):
            refused("a")


def test_a_file_of_torch_save(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(3)}, "epoch": 4}, tmp_path / "lm.pt")
    runs = Checkpoints(tmp_path / "lm.pt")
    assert runs.read("model/w").tolist() == [1, 1, 1]
    assert runs.read("extras/epoch") == 4
    assert runs.show().values["extras/epoch"] == 4


def test_a_damaged_tag_is_listed_with_its_problem(tmp_path: Path) -> None:
    runs = saved(str(tmp_path))
    (tmp_path / "b/manifest.json").write_text("{")
    assert [bool(summary.problem) for summary in runs.summaries()] == [False, True]
