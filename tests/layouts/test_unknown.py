"""Arrays of which nothing says how they were split: each time that one is wanted there is an error of its own."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
import torch

import xla_ckpt
from xla_ckpt.api.opened import Knowledge, opened
from xla_ckpt.storage.local import LocalStore


def test_errors_do_not_share_what_is_added_to_them(tmp_path: Path) -> None:
    """A caller adds where it met the error; python adds the frames that it went through, and keeps their variables."""
    (tmp_path / "a/model").mkdir(parents=True)
    for tp in range(2):
        torch.save({"w": torch.zeros(2, 3)}, tmp_path / f"a/model/dp_rank_00_tp_rank_{tp:02d}_pp_rank_00.pt")
    (tmp_path / "a/done").write_text("1")
    with opened(LocalStore(str(tmp_path)), "a", Knowledge()) as reader:
        manifest = reader.manifest
    (why,) = manifest.unknown.values()
    assert not isinstance(why, BaseException)
    caught = []
    for tag in ("first", "second"):
        with pytest.raises(
            xla_ckpt.IncompatibleCheckpointError, match=r"ambiguous.*found \[2, 3\] on each rank"
        ) as error:
            manifest.array("model/w")
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
