"""Arrays of which nothing says how they were split: each time that one is wanted there is an error of its own."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import xla_ckpt
from xla_ckpt.conversion.source import ProgramInfo, open_source
from xla_ckpt.storage.local import LocalStore


def _two_ranks(root: Path) -> None:
    """A tag of neuronx-distributed's in which two tp ranks have a part of an array, or the same, which nothing says."""
    (root / "a/model").mkdir(parents=True)
    for tp in range(2):
        torch.save({"w": torch.zeros(2, 3)}, root / f"a/model/dp_rank_00_tp_rank_{tp:02d}_pp_rank_00.pt")
    (root / "a/done").write_text("1")


def test_errors_do_not_share_what_is_added_to_them(tmp_path: Path) -> None:
    """A caller adds where it met the error; python adds the frames that it went through, and keeps their variables."""
    _two_ranks(tmp_path)
    with open_source(LocalStore(str(tmp_path)), "a", ProgramInfo()) as reader:
        manifest = reader.manifest
    (why,) = manifest.unreadable.values()
    assert not isinstance(why, BaseException)
    caught = []
    for tag in ("first", "second"):
        with pytest.raises(
            xla_ckpt.IncompatibleCheckpointError, match=r"ambiguous.*found \[2, 3\] on each rank"
        ) as error:
            manifest.find_array("model/w")
        assert (error.value.leaf, error.value.tag) == ("model/w", None)
        error.value.at(tag=tag)
        caught.append(error.value)
    assert caught[0] is not caught[1]
    assert [error.tag for error in caught] == ["first", "second"]
    frames = [len(traceback.extract_tb(error.__traceback__)) for error in caught]
    assert frames[0] == frames[1]
    (problem,) = xla_ckpt.explain(tmp_path, "a", mesh="tp=1").problems
    assert "model/w" in problem
    assert "shardings=" in problem


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda root: xla_ckpt.restore(root), "like= (ArraySpec)"),
        (lambda root: xla_ckpt.Checkpoints(root).read("model/w"), "xla_ckpt.restore(like=...)"),
        (lambda root: xla_ckpt.Checkpoints(root).sample("model/w"), "model="),
        (lambda root: xla_ckpt.convert(root, root.parent / "new"), "model="),
    ],
    ids=["restore", "read", "sample", "convert"],
)
def test_a_hint_names_what_the_call_takes(tmp_path: Path, call: Callable[[Path], object], named: str) -> None:
    """`restore` and `read` were told to give `model=`, which they do not have."""
    _two_ranks(tmp_path / "root")
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError) as error:
        call(tmp_path / "root")
    assert str(error.value.hint).startswith(f"Say with {named}")
    assert ("model=" in str(error.value.hint)) == (named == "model=")


def test_what_restore_is_told_to_take_says_how_an_array_was_split(tmp_path: Path) -> None:
    _two_ranks(tmp_path)
    like = {"model": {"w": xla_ckpt.ArraySpec((4, 3), "float32")}}
    assert xla_ckpt.restore(tmp_path, like=like).tree["model"]["w"].shape == (4, 3)
