"""A full checkpoint of smp.save_checkpoint is two files: the model, and what the program gave as its user content."""

from __future__ import annotations

import json
import logging
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

import neuron_compat.smp as smp
import xla_ckpt
from tests.formats.smp_files import flip
from tests.smp.made import part
from tests.smp.test_checkpoint_resume import fresh, model  # noqa: F401  # a fixture
from tests.smp.test_files_load import begin
from xla_ckpt.cli.main import main


def saved(root: Path, tag: str, content: Any) -> None:
    """A full checkpoint, as a job saves it."""
    begin(1, 1)
    smp.save_checkpoint(root, tag, partial=False, model=model(3.0), user_content=content)


def test_the_user_content_comes_with_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {"step": 3, "optimizer": {"seen": torch.arange(4)}}
    saved(tmp_path / "run", "step_3", content)
    converted = xla_ckpt.convert(tmp_path / "run/step_3", tmp_path / "native", to="native")
    by_tag = xla_ckpt.convert(tmp_path / "run", tmp_path / "native", "step_3", to="native", as_tag="by_tag")
    capsys.readouterr()
    for where in (
        (tmp_path / "run/step_3",),
        (tmp_path / "run", "step_3"),
        (tmp_path / "native", converted.tag),
        (tmp_path / "native", by_tag.tag),
    ):
        weights = {"weight": torch.zeros(2, 4)}
        found = xla_ckpt.load_checkpoint(*where, model=weights).user_content
        assert weights["weight"].eq(3).all()
        assert found["step"] == 3
        assert torch.equal(found["optimizer"]["seen"], content["optimizer"]["seen"])
        assert xla_ckpt.restore(*where).tree.keys() == {"model", "user_content"}
        assert xla_ckpt.verify(*where).ok
        assert main(["show", *map(str, where[:1]), *(["--tag", where[1]] if where[1:] else [])]) == 0
        assert "user_content/step\t3" in capsys.readouterr().out.replace("  ", "\t")


@pytest.mark.parametrize("tag", ["step_3", "z_0", "full.pt"])
def test_its_second_file_is_no_checkpoint_of_its_own(
    tag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, tag, {"step": 3})
    capsys.readouterr()
    assert main(["ls", str(tmp_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in listed["beside"]] == [tag]
    assert listed["tags"] == []


@pytest.mark.parametrize("damage", ["bit", "cut", "empty"])
def test_damage_names_the_second_file(damage: str, tmp_path: Path) -> None:
    saved(tmp_path, "step_3", {"seen": torch.full((8,), 7.0)})
    beside = tmp_path / "user_content_step_3"
    whole = beside.read_bytes()
    if damage == "bit":
        flip(beside, torch.full((8,), 7.0).numpy().tobytes())
    else:
        beside.write_bytes(whole[: {"cut": len(whole) // 2, "empty": 0}[damage]])
    weights = {"weight": torch.zeros(2, 4)}
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="file user_content_step_3"):
        xla_ckpt.load_checkpoint(tmp_path / "step_3", model=weights)
    assert not weights["weight"].any()
    report = xla_ckpt.verify(tmp_path / "step_3")
    assert [problem.file for problem in report.problems] == ["user_content_step_3"]


def test_objects_in_it_need_trust(tmp_path: Path) -> None:
    saved(tmp_path, "step_3", {"seen": Fraction(1, 3)})
    with pytest.raises(xla_ckpt.UntrustedObjectError, match="leaf user_content/seen, file user_content_step_3"):
        xla_ckpt.load_checkpoint(tmp_path / "step_3", model={})
    trusted = xla_ckpt.load_checkpoint(tmp_path / "step_3", model={}, trust_pickle=True)
    assert trusted.user_content == {"seen": Fraction(1, 3)}


def test_files_of_others_under_that_name_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "a.pt")
    (tmp_path / "user_content_a.pt").write_text("what we want to keep")
    assert xla_ckpt.restore(tmp_path / "a.pt").tree.keys() == {"weight"}
    torch.save({"model": {"weight": torch.ones(2)}, "step": 5}, tmp_path / "b.pt")
    torch.save({"step": 6}, tmp_path / "user_content_b.pt")
    with caplog.at_level(logging.WARNING):
        assert xla_ckpt.load_checkpoint(tmp_path / "b.pt", model={}).user_content == {"step": 5}
    assert "user_content_b.pt lies beside it, and is left out" in caplog.text


@pytest.mark.parametrize("tags", [["step_0"], ["step_0", "step_1"]])
def test_full_checkpoints_without_content_are_no_set_of_parts(
    tags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their names are those of the parts of a set `step`, as SMP 1.6 called them."""
    for tag in tags:
        saved(tmp_path, tag, None)
        smp.reset()
    capsys.readouterr()
    assert main(["ls", str(tmp_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert ([one["name"] for one in listed["beside"]], listed["tags"]) == (tags, [])
    weights = {"weight": torch.zeros(2, 4)}
    xla_ckpt.load_checkpoint(tmp_path / tags[-1], model=weights)
    assert weights["weight"].eq(3).all()


def test_parts_of_one_number_are_a_set(tmp_path: Path) -> None:
    for name in ("step", "named.pt"):
        for stage in range(2):
            torch.save(part(stage, 0, (2, 1)), tmp_path / f"{name}_{stage}")
    assert sorted(xla_ckpt.list_tags(tmp_path)) == ["named.pt", "step"]
