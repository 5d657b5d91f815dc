"""A tag of ours that neuronx-distributed has saved over: its files, with our manifest beside them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

import xla_ckpt
from tests.formats.test_nxd_layouts import rank_file
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


def test_the_error_says_that_it_happened_if_the_marks_are_newer(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", {"w": torch.ones(8)}, layout="xser")
    (tensor,) = (tmp_path / "a/model").rglob("tensor_0.pt")
    torch.save(torch.ones(5000), tensor)
    hints = []
    for _ in range(2):
        with pytest.raises(xla_ckpt.CorruptCheckpointError) as caught:
            xla_ckpt.load_checkpoint(tmp_path, "a", {"w": torch.zeros(8)})
        hints.append(str(caught.value.hint))
        committed = (tmp_path / "a/commit_success.txt").stat().st_mtime_ns
        os.utime(tmp_path / "a/done", ns=(committed + 1, committed + 1))
    assert "If neuronx-distributed has saved a tag of this name since, remove manifest.json" in hints[0]
    assert (
        "neuronx-distributed has saved over this tag: its mark 'done' is newer than commit_success.txt. Remove"
        in hints[1]
    )


def test_a_native_tag_says_that_files_of_theirs_lie_beside_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", {"w": torch.ones(8)})
    rank_file(tmp_path / "a/model", {"w": torch.full((8,), 2.0)})
    target = {"w": torch.zeros(8)}
    with caplog.at_level(logging.WARNING):
        xla_ckpt.load_checkpoint(tmp_path, "a", target)
        assert caplog.text == ""
        (tmp_path / "a/done").write_text("1")
        xla_ckpt.load_checkpoint(tmp_path, "a", target)
    assert (target["w"] == 1).all()
    assert "a is read. Beside it lie neuronx-distributed's files. neuronx-distributed has saved over" in caplog.text
    assert "remove manifest.json and commit_success.txt from the tag" in caplog.text.replace("Remove", "remove")


def test_native_tags_have_no_such_hint(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", {"w": torch.ones(8)})
    (file,) = (tmp_path / "a").glob("model/*")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="does not have its size") as caught:
        xla_ckpt.restore(tmp_path)
    assert "neuronx" not in str(caught.value.hint)
