"""A directory that is being made is not removed by a job that cleans up at that moment."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from xla_ckpt.storage import local
from xla_ckpt.storage.local import LocalStore


@pytest.mark.parametrize("instant", ["before it is opened", "before it is locked"])
def test_a_directory_is_made_again_if_it_was_removed_before_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instant: str
) -> None:
    store, removed = LocalStore(str(tmp_path)), []

    def remove(path: str) -> None:
        if not removed:
            shutil.rmtree(path)
            removed.append(path)

    mkdir, mark = os.mkdir, local._mark
    if instant == "before it is opened":
        monkeypatch.setattr(os, "mkdir", lambda path, *a, **k: (mkdir(path, *a, **k), remove(path)))
    else:
        monkeypatch.setattr(local, "_mark", lambda directory, how: (remove(directory.path), mark(directory, how)))
    directory = store.make("a")
    assert removed
    directory.create("f", 1).commit()
    assert directory.files() == ["f"]
    assert (tmp_path / "a/f").exists()
    assert store.in_use("a")
    directory.close()
