"""kill -9 in the middle of a conversion to one file: nothing has the name of the file, and the next one works."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.nursery import Call, bear
from tests.runs import names_in
from xla_ckpt.engine import stream
from xla_ckpt.storage.local import LocalStore


def converts_and_stops(root: Path) -> None:
    """Stop for ever after some bytes of the file, and say so."""
    read = stream._File._read

    def stops(self: Any, batch: Any) -> Iterator[tuple[int, memoryview]]:
        yield from read(self, batch)
        if batch[0].region >= 3:  # the file has the bytes before
            print("half", flush=True)
            signal.pause()

    stream._File._read = stops  # type: ignore[method-assign]
    xla_ckpt.convert(root, root / "out.pt", "a", to="torch", options=xla_ckpt.ConvertOptions(max_memory=64))


@pytest.mark.crash
def test_kill_nine_leaves_no_file_of_that_name(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", {f"w{i}": torch.full((50,), float(i)) for i in range(8)})
    process = bear(Call.of(converts_and_stops, tmp_path), live=True)
    assert process.stdout.readline() == "half\n"
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert names_in(tmp_path) == [".new-out.pt", "a"]
    xla_ckpt.convert(tmp_path, tmp_path / "out.pt", "a", to="torch")
    assert names_in(tmp_path) == ["a", "out.pt"]
    held = torch.load(tmp_path / "out.pt", weights_only=True)["model"]
    assert [float(held[f"w{i}"].sum()) for i in range(8)] == [50.0 * i for i in range(8)]


def test_what_was_left_when_the_file_had_its_name_goes_with_the_next_call(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", {"w": torch.ones(3)})
    xla_ckpt.convert(tmp_path, tmp_path / "out.pt", "a", to="torch")
    (tmp_path / ".new-out.pt").mkdir()  # killed between the rename and the removal of this
    with pytest.raises(xla_ckpt.UsageError, match="a file of this name already"):
        xla_ckpt.convert(tmp_path, tmp_path / "out.pt", "a", to="torch")
    assert names_in(tmp_path) == ["a", "out.pt"]


def test_a_directory_that_cannot_be_removed_does_not_deny_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", {"w": torch.ones(3)})

    def refuse(store: LocalStore, name: str) -> None:
        raise OSError(5, "Input/output error", name)

    monkeypatch.setattr(LocalStore, "remove", refuse)
    xla_ckpt.convert(tmp_path, tmp_path / "out.pt", "a", to="torch")
    assert "could not remove .new-out.pt" in caplog.text
    assert torch.equal(torch.load(tmp_path / "out.pt", weights_only=True)["model"]["w"], torch.ones(3))
