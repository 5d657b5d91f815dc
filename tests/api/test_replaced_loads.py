"""A tag that is replaced while the ranks of a job open it: parts of two versions would be loaded."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import xla_ckpt
from tests.formats.writing import as_job
from xla_ckpt import Mesh
from xla_ckpt.loading import load


def native(root: Path, value: float) -> None:
    xla_ckpt.save_checkpoint(root, "a", model={"w": torch.full((4,), value)})


def by_stock(root: Path, value: float) -> None:
    stock.save({"w": torch.full((4,), value)}, checkpoint_id=root / "a")


def as_parts(root: Path, value: float) -> None:
    """A directory of SageMaker model parallel's, which says nothing of its own of when it was written."""
    (root / "a").mkdir()
    for tp in range(2):
        torch.save({"w": torch.full((2,), value), "_smp_is_partial": True}, root / "a" / f"model_0_{tp}.pt")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("save", [native, by_stock, as_parts])
def test_all_ranks_refuse_two_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[[Path, float], None]
) -> None:
    for name, value in (("now", 1.0), ("next", 2.0)):
        (tmp_path / name).mkdir()
        save(tmp_path / name, value)
    real, lock, opened = load.open_tag, threading.Lock(), list[Any]()

    def opens_and_replaces(*args: Any) -> Any:
        with lock:
            reader = real(*args)
            if not opened:
                os.rename(tmp_path / "now/a", tmp_path / "before")
                os.rename(tmp_path / "next/a", tmp_path / "now/a")
            opened.append(reader)
            return reader

    monkeypatch.setattr(load, "open_tag", opens_and_replaces)
    targets = [{"w": torch.zeros(4)} for _ in range(2)]
    with pytest.raises(xla_ckpt.ChangedTagError, match="replaced while the ranks opened it"):
        as_job(
            monkeypatch,
            Mesh(dp=2),
            "load",
            lambda rank: xla_ckpt.load_checkpoint(tmp_path / "now", "a", model=targets[rank]),
        )
    assert [t["w"].tolist() for t in targets] == [[0] * 4] * 2
    monkeypatch.setattr(load, "open_tag", real)
    as_job(
        monkeypatch,
        Mesh(dp=2),
        "load",
        lambda rank: xla_ckpt.load_checkpoint(tmp_path / "now", "a", model=targets[rank]),
    )
    assert [t["w"].tolist() for t in targets] == [[2] * 4] * 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
def test_a_tag_of_another_library_that_goes_while_the_ranks_look_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who finds it asks all ranks what the program expects in it, and would wait for those that do not find it."""
    by_stock(tmp_path, 1.0)
    find, lock = load.find_foreign_tag, threading.Lock()

    def finds_and_removes(*args: Any) -> Any:
        with lock:
            found = find(*args)
            if (tmp_path / "a").exists():
                shutil.rmtree(tmp_path / "a")
            return found

    monkeypatch.setattr(load, "find_foreign_tag", finds_and_removes)
    target = {"w": torch.zeros(4)}
    with pytest.raises(xla_ckpt.NoCheckpointError):
        as_job(
            monkeypatch,
            Mesh(dp=2),
            "load",
            lambda rank: xla_ckpt.load_checkpoint(tmp_path, "a", model=target),
            timeout=5,
        )
    assert target["w"].tolist() == [0] * 4
