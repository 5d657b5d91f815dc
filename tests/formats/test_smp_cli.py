"""SageMaker model parallel's files through the commands: listed, shown, explained, verified, converted, exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import xla_ckpt
from tests.formats.smp_files import write_set, write_tag
from tests.formats.smp_job import Job, Net, trained
from xla_ckpt import Mesh
from xla_ckpt.cli.main import main


def facts(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> Any:
    assert main([*map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def build() -> tuple[Net, torch.optim.Optimizer]:
    """For --like."""
    return trained(1, seed=1)


def test_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = write_set(tmp_path / "c.pt", Mesh(pp=2, tp=2), "documents")
    write_tag(tmp_path, "t", Mesh(tp=2), user_content={"a": 1})
    torch.save({"w": torch.ones(2)}, tmp_path / "full.pt")
    listed = facts(capsys, "ls", tmp_path)["tags"]
    assert [(t["tag"], t["layout"], t["files"], t["problem"]) for t in listed] == [
        ("c.pt", "SageMaker model parallel", 4, None), ("t_partial", "SageMaker model parallel", 6, None),
    ]  # fmt: skip
    assert listed[0]["nbytes"] == sum(file.stat().st_size for file in files)
    (alone,) = facts(capsys, "ls", tmp_path / "c.pt")["tags"]
    assert alone == listed[0]
    assert main(["ls", str(tmp_path)]) == 0
    assert "SageMaker model parallel" in capsys.readouterr().out


def test_shown_and_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Job().write(tmp_path / "c")
    shown = facts(capsys, "show", path)
    assert {a["leaf"] for a in shown["arrays"]} >= {"model/norm.weight", "model/out.bias"}
    assert "model/qkv.weight" in {a["leaf"] for group in shown["unknown"] for a in group["arrays"]}
    assert shown["mesh"] == "pp=2,dp=1,ep=1,cp=1,tp=2"
    like = ["--like", "tests.formats.test_smp_cli:build"]
    shown = facts(capsys, "show", path, *like)
    assert shown["unknown"] == []
    assert {a["leaf"]: a["shape"] for a in shown["arrays"]}["model/qkv.weight"] == [12, 6]
    assert main(["show", str(path), "--leaf", "model/*"]) == 0
    assert "written by SageMaker model parallel" in capsys.readouterr().out
    explained = facts(capsys, "explain", path, "--mesh", "tp=2", *like)
    assert explained["ok"]
    assert not facts(capsys, "explain", path, "--mesh", "tp=2", code=1)["ok"]
    assert xla_ckpt.explain(path, mesh="dp=2,tp=2", model=Net()).ok


def test_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Job().write(tmp_path / "c")
    write_tag(tmp_path, "t", Mesh(tp=2))
    assert main(["verify", str(path)]) == 0
    assert "sound  c in" in capsys.readouterr().out
    assert main(["verify", str(tmp_path), "--all"]) == 0
    (tmp_path / "c_1_1.pt").unlink()
    assert main(["verify", str(path)]) == 1
    assert "c_1_1.pt" in capsys.readouterr().out


def test_converted_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Job()
    path = job.write(tmp_path / "c.pt")
    like = ["--like", "tests.formats.test_smp_cli:build"]
    assert main(["convert", str(path), str(tmp_path / "native"), "--to", "native", *like]) == 0
    assert xla_ckpt.list_tags(tmp_path / "native") == ["c"]
    job.check(tmp_path / "native")
    assert main(["convert", str(tmp_path / "native"), str(tmp_path / "dcp"), "--to", "dcp"]) == 0
    job.check(tmp_path / "dcp" / "c")
    assert main(["convert", str(path), str(tmp_path / "one.pt"), "--to", "torch", *like]) == 0
    state = torch.load(tmp_path / "one.pt")
    assert all(torch.equal(state["model"][name], value) for name, value in job.weights.items())
    assert main(["export", str(path), str(tmp_path / "hf"), *like]) == 0
    exported = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(exported[name], value) for name, value in job.weights.items())
    capsys.readouterr()


def test_a_directory_is_converted_under_its_tag(tmp_path: Path) -> None:
    write_tag(tmp_path, "best", Mesh(pp=2), user_content={"step": 7})
    report = xla_ckpt.convert(tmp_path / "best_partial", tmp_path / "native")
    assert report.tag == "best"
    report = xla_ckpt.convert(tmp_path, tmp_path / "all", as_tag="all")
    assert xla_ckpt.load_checkpoint(tmp_path / "all", model={}).user_content == {"step": 7}
    config = xla_ckpt.restore(tmp_path / "all", like={"extras": None}).tree["extras"]["smp_config"]
    assert config["smp_version"] == "1.12.1"
