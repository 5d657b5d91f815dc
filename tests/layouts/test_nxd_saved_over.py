"""A tag of ours that neuronx-distributed has saved over: its files, with our manifest beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import xla_ckpt
from tests.layouts.test_nxd_layouts import rank_file
from xla_ckpt.cli.main import main


@pytest.mark.parametrize("size", [5000, 8], ids=["another size", "perhaps the same size"])
def test_the_error_says_how_to_read_it(size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", {"w": torch.ones(8)}, user_content={"step": 1}, layout="pt")
    rank_file(tmp_path / "a/model", {"w": torch.full((size,), 2.0)})
    torch.save({"step": 2}, tmp_path / "a/user_content.pt")
    with pytest.raises(xla_ckpt.CorruptCheckpointError) as caught:
        xla_ckpt.load_checkpoint(tmp_path, "a", {"w": torch.zeros(8)})
    assert "remove manifest.json and commit_success.txt" in str(caught.value.hint)
    assert main(["verify", str(tmp_path)]) == 1
    assert "remove manifest.json and commit_success.txt" in " ".join(capsys.readouterr().out.split())
    for name in ("manifest.json", "commit_success.txt"):
        (tmp_path / "a" / name).unlink()
    target = {"w": torch.zeros(size)}
    assert xla_ckpt.load_checkpoint(tmp_path, "a", target).user_content == {"step": 2}
    assert (target["w"] == 2).all()


def test_native_tags_have_no_such_hint(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", {"w": torch.ones(8)})
    (file,) = (tmp_path / "a").glob("model/*")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="does not have its size") as caught:
        xla_ckpt.restore(tmp_path)
    assert "neuronx" not in str(caught.value.hint)
