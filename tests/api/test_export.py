"""Exports: what other tools load is what was saved, and there is never half of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import xla_ckpt
from tests.jobs import run_on_ranks
from tests.runs import names_in
from xla_ckpt.cli.main import main


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    made = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(30, 40), "b": torch.nn.Linear(40, 30), "n": torch.nn.BatchNorm1d(3)}
    )
    made["t"] = torch.nn.Linear(30, 40, bias=False)
    made["t"].weight = made["a"].weight
    made["h"] = torch.nn.Linear(5, 5).to(torch.bfloat16)
    return made


def test_one_file(tmp_path: Path, model: torch.nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xla_ckpt.save_checkpoint(tmp_path / "ckpt", "a", model, optimizer)
    report = xla_ckpt.export_hf(tmp_path / "ckpt", tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    want = {k: v for k, v in model.state_dict().items() if k != "t.weight"}  # tied: once, as transformers has it
    assert found.keys() == want.keys()
    assert all(torch.equal(found[k], v) for k, v in want.items())
    assert (report.files, report.arrays) == (("model.safetensors",), len(want))
    assert names_in(tmp_path / "hf") == ["model.safetensors"]


def test_several_files_and_an_index(tmp_path: Path, model: torch.nn.Module, capsys: pytest.CaptureFixture[str]) -> None:
    xla_ckpt.save_checkpoint(tmp_path / "ckpt", "a", model)
    arguments = ["export", str(tmp_path / "ckpt"), str(tmp_path / "new" / "hf"), "--max-shard-size", "5kB"]
    assert main(arguments) == 0
    assert "as 3 files in" in capsys.readouterr().out.replace("\n", " ")
    index = json.loads((tmp_path / "new" / "hf" / "model.safetensors.index.json").read_text())
    merged = {}
    for name in set(index["weight_map"].values()):
        merged |= load_file(tmp_path / "new" / "hf" / name)
    want = {k: v for k, v in model.state_dict().items() if k != "t.weight"}
    assert merged.keys() == want.keys() == index["weight_map"].keys()
    assert all(torch.equal(merged[k], v) for k, v in want.items())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in want.values())
    assert main(arguments) == 2  # it is there already
    assert "must not exist" in capsys.readouterr().err
    assert main([*arguments[:2], str(tmp_path / "model.safetensors")]) == 2
    assert f"Name the directory: {tmp_path}/model. " in capsys.readouterr().err.replace("\n", " ")


def saves_in_two_parts(rank: int, root: Path) -> None:
    full = torch.arange(64.0).reshape(8, 8)
    tree = {"model": {"up.weight": full.chunk(2, 0)[rank].clone(), "down.weight": full.chunk(2, 1)[rank].clone()}}
    rules = [("up", ("tp", None)), ("down", (None, "tp"))]
    xla_ckpt.save(root, "a", tree, mesh=xla_ckpt.Mesh(tp=2), shardings=rules)


def test_a_tensor_parallel_checkpoint(tmp_path: Path) -> None:
    run_on_ranks(saves_in_two_parts, 2, tmp_path / "ckpt")
    xla_ckpt.export_hf(tmp_path / "ckpt", tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    full = torch.arange(64.0).reshape(8, 8)
    assert found.keys() == {"up.weight", "down.weight"}
    assert all(torch.equal(v, full) for v in found.values())


def test_what_cannot_be_exported_leaves_nothing(tmp_path: Path, model: torch.nn.Module) -> None:
    xla_ckpt.save_checkpoint(tmp_path / "ckpt", "a", model)
    payload = tmp_path / "ckpt" / "a" / "model" / "00001-of-00001.safetensors"
    data = bytearray(payload.read_bytes())
    data[-5] ^= 1
    payload.write_bytes(data)
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="stored bytes are damaged"):
        xla_ckpt.export_hf(tmp_path / "ckpt", tmp_path / "hf")
    xla_ckpt.save(tmp_path / "odd", "a", {"model": {"c": torch.ones(2, dtype=torch.complex128)}, "x": 1})
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="complex128"):
        xla_ckpt.export_hf(tmp_path / "odd", tmp_path / "hf")
    with pytest.raises(xla_ckpt.UsageError, match="no arrays there.*or '' for all"):
        xla_ckpt.export_hf(tmp_path / "odd", tmp_path / "hf", part="optimizer")
    with pytest.raises(xla_ckpt.NoCheckpointError):
        xla_ckpt.export_hf(tmp_path / "odd", tmp_path / "hf", "b")
    (tmp_path / "file").write_text("")
    with pytest.raises(xla_ckpt.StorageError, match="File exists|Not a directory"):
        xla_ckpt.export_hf(tmp_path / "ckpt", tmp_path / "file" / "hf")
    assert names_in(tmp_path) == ["ckpt", "file", "odd"]
