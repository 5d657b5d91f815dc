"""What the commands print of directories that torch.distributed.checkpoint wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import xla_ckpt
from tests.formats.stock_dcp import stock
from tests.same import same
from xla_ckpt.cli.main import main


def call(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    code = main([str(word) for word in words])
    return code, " ".join(capsys.readouterr().out.split())


def test_a_root_is_listed_with_who_wrote_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = call(capsys, "ls", stock("titan", "step-100").root)
    assert code == 0
    assert out.index("step-100") < out.index("step-200")
    assert "torch.distributed.checkpoint" in out


@pytest.mark.parametrize("name", ["fsdp2", "flattened", "raw", "app"])
def test_a_directory_is_shown_explained_and_verified_by_its_own_path(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = stock(name).path
    code, out = call(capsys, "show", path)
    assert code == 0
    assert "written by torch.distributed.checkpoint" in out
    assert "model/net1.weight float32 16 x 16" in out
    code, out = call(capsys, "show", path, "--json")
    assert {a["leaf"] for a in json.loads(out)["arrays"]} >= {"model/net1.weight", "model/net2.weight"}
    assert call(capsys, "explain", path, "--mesh", "dp=2,tp=2")[0] == 0
    assert call(capsys, "verify", path)[0] == 0


def test_a_directory_is_converted_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of = stock("titan", "step-100")
    assert call(capsys, "convert", of.path, tmp_path / "native", "--to", "native")[0] == 0
    tree = xla_ckpt.restore(tmp_path / "native").tree
    assert same(tree["model"]["layer.weight"], of.contents()["layer.weight"])
    assert call(capsys, "convert", of.path, tmp_path / "hf", "--to", "safetensors")[0] == 0
    assert same(xla_ckpt.restore(tmp_path / "hf").tree["model"]["layer.weight"], of.contents()["layer.weight"])


def test_damage_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c"
    path.mkdir()
    for file in stock("fsdp2").path.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    (path / "__1_0.distcp").unlink()
    code, out = call(capsys, "verify", path)
    assert code == 1
    assert "__1_0.distcp" in out


def test_explain_says_what_the_files_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = call(capsys, "explain", stock("fsdp2").path, "--mesh", "dp=2")
    assert code == 0
    assert "nothing says over which axes the job had them split" in out
