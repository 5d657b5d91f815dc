"""Directories where orbax, which commits tags there, is not installed, or is too old."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import xla_ckpt
from tests.jobs import run_on_ranks
from tests.runs import ROOT, run

INSTALL = r"needs the package orbax, which is not installed.*Install it: pip install 'xla-ckpt\[orbax\]'"


OLD = """
import sys, xla_ckpt
try:
    xla_ckpt.save(sys.argv[1], "a", {"w": b"bytes"})
except xla_ckpt.MissingPackageError as error:
    print(error)
"""


@pytest.fixture(autouse=True)
def _without_orbax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "orbax", None)  # as Python marks what cannot be imported


@pytest.mark.parametrize("layout", ["native", "xser", "orbax"])
@pytest.mark.parametrize("async_save", [False, True])
def test_a_save_is_refused_at_the_call(tmp_path: Path, layout: str, async_save: bool) -> None:
    with pytest.raises(xla_ckpt.MissingPackageError, match=INSTALL) as refused:
        xla_ckpt.save(tmp_path / "run", "a", {"w": torch.zeros(3)}, layout=layout, async_save=async_save)
    assert (refused.value.tag, refused.value.path) == ("a", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_save_is_refused_where_orbax_is_too_old(tmp_path: Path) -> None:
    """An image that has an older one, beside a clone of this library: pip has not looked at it."""
    installed = tmp_path / "site" / "orbax_checkpoint-0.12.4.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: orbax-checkpoint\nVersion: 0.12.4\n")
    env = {"PYTHONPATH": f"{installed.parent}{os.pathsep}{ROOT}"}
    told = run(OLD, tmp_path / "run", env=env).stdout
    assert "needs orbax-checkpoint 0.12.5 or newer, and 0.12.4 is installed" in told
    assert "pip install 'xla-ckpt[orbax]'" in told
    assert not (tmp_path / "run").exists()


def test_what_orbax_does_not_commit_is_written(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "orbax")
        xla_ckpt.save(tmp_path / "run", "a", {"w": torch.arange(3.0)})
    xla_ckpt.convert(tmp_path / "run", tmp_path / "a.pt", tag="a", to="torch")
    assert torch.load(tmp_path / "a.pt")["w"].tolist() == [0, 1, 2]
    with pytest.raises(xla_ckpt.MissingPackageError, match=INSTALL):
        xla_ckpt.convert(tmp_path / "run", tmp_path / "other", tag="a", to="dcp")
    assert not (tmp_path / "other").exists()


def test_a_run_that_will_save_is_told_before_it_trains(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not xla_ckpt.has_checkpoint(tmp_path / "run")
    assert "needs the package orbax" in caplog.text


def save_where_rank_0_has_none(rank: int, root: Path) -> tuple[str, str]:
    if rank == 0:
        sys.modules["orbax"] = None  # type: ignore[assignment]
    try:
        xla_ckpt.save(root, "a", {"w": np.zeros(3)})
    except xla_ckpt.MissingPackageError as error:
        return str(error), type(error).__name__
    return "", ""


def test_all_ranks_raise_the_same(tmp_path: Path) -> None:
    told = run_on_ranks(save_where_rank_0_has_none, 2, tmp_path / "run")
    assert told[0] == told[1]
    assert "pip install 'xla-ckpt[orbax]'" in told[0][0]
    assert not (tmp_path / "run").exists()
