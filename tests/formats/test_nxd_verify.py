"""`verify` of neuronx-distributed's own tags: every file of every rank is there, and is what its zip says."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

import xla_ckpt
from tests.formats.gold import LOST, cases, folder_of
from tests.formats.same import as_theirs, names
from xla_ckpt.cli.main import main

LAYOUTS = pytest.mark.parametrize("layout", ["pt", "xser"])


def theirs(root: Path, layout: str) -> Path:
    """A tag as neuronx-distributed leaves it: without our manifest."""
    model = torch.nn.Linear(6, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(6)).sum().backward()
    optimizer.step()
    xla_ckpt.save_checkpoint(root, "t", model, optimizer, {"last": 1}, {"step": 4}, layout=layout)
    return as_theirs(root / "t")


def loaded(root: Path) -> tuple[list[list[float]], object]:
    model = torch.nn.Linear(6, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    content = xla_ckpt.load_checkpoint(root, "t", model, optimizer).user_content
    states = [s[k].tolist() for s in optimizer.state.values() for k in sorted(s)]
    return [model.weight.tolist(), model.bias.tolist(), *states], content


@LAYOUTS
def test_a_changed_byte_is_found_by_verify_and_is_never_loaded(layout: str, tmp_path: Path) -> None:
    tag = theirs(tmp_path, layout)
    report = xla_ckpt.verify(tmp_path)
    assert (report.ok, report.tag, report.arrays) == (True, "t", 8)
    zips = sorted(n for n in names(tag) if n.endswith(".pt"))
    assert report.files == len(zips)
    assert report.nbytes == sum(os.path.getsize(tag / n) for n in zips) > 8 * 5 * 4
    whole = loaded(tmp_path)
    for name in zips if layout == "pt" else [zips[0], *(n for n in zips if n.endswith("tensor_0.pt"))]:
        data = (tag / name).read_bytes()
        for at in range(0, len(data), 37):
            (tag / name).write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
            found = xla_ckpt.verify(tmp_path, "t").problems
            assert {p.file for p in found} <= {name}, (name, at)
            try:  # padding between records, time stamps, copies of sizes: no load of ours looks at it
                assert loaded(tmp_path) == whole, (name, at)
            except xla_ckpt.CheckpointError:
                assert found, (name, at)
        (tag / name).write_bytes(data)
        for changed in (data[:-1], data[: len(data) // 2], b""):
            (tag / name).write_bytes(changed)
            assert name in {p.file for p in xla_ckpt.verify(tmp_path, "t").problems}
        (tag / name).write_bytes(data)
    assert xla_ckpt.verify(tmp_path).ok


@LAYOUTS
def test_what_is_missing_is_named(layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tag = theirs(tmp_path, layout)
    tensors = [n for n in names(tag) if ".tensors/" in n]
    assert len(tensors) == (8 if layout == "xser" else 0)
    for name in tensors:
        (tag / name).rename(tmp_path / "away")
        assert [p.file for p in xla_ckpt.verify(tmp_path, "t").problems] == [name]
        (tmp_path / "away").rename(tag / name)
    (tag / "done").unlink()
    (problem,) = xla_ckpt.verify(tmp_path, "t").problems
    assert "no done marker" in str(problem)
    assert main(["verify", str(tmp_path), "--tag", "t"]) == 1
    (tag / "done").write_text("1")
    capsys.readouterr()
    assert main(["verify", str(tmp_path)]) == 0
    shutil.copy(tag / "model/dp_rank_00_tp_rank_00_pp_rank_00.pt", tag / "model/dp_rank_00_tp_rank_02_pp_rank_00.pt")
    missing, *others = xla_ckpt.verify(tmp_path, "t").problems  # of tp ranks 0 and 2 there must be a 1
    assert "none for (dp 0, ep 0, tp 1, pp 0)" in str(missing)
    if tensors:  # what is missing beside it is found all the same
        assert {p.file.partition(".pt.")[0] for p in others if p.file} >= {"model/dp_rank_00_tp_rank_02_pp_rank_00"}


class Hostile:
    def __reduce__(self) -> object:
        return os.mkdir, ("ran",)


def test_pickles_do_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tag = theirs(tmp_path / "root", "pt")
    torch.save({"weight": torch.zeros(2), "x": Hostile()}, tag / "model/dp_rank_00_tp_rank_00_pp_rank_00.pt")
    problems = xla_ckpt.verify(tmp_path / "root").problems
    assert any("mkdir" in str(p) for p in problems), problems
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("case", "tag"), [*cases(), *cases(fused=True)])
def test_what_they_wrote_is_sound(case: str, tag: str) -> None:
    report = xla_ckpt.verify(folder_of(case) / "ckpt", tag)
    assert not report.digests
    if case == LOST:
        assert ["the others are missing" in str(p) for p in report.problems] == [True]
    else:
        assert report.ok, report.problems
        assert report.arrays > 20
