"""kill -9 and Ctrl-C in the middle of a conversion: nothing has the name of the file or tag, and the next one works."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.jobs import run_alone
from tests.nursery import Call, bear
from tests.runs import names_in
from xla_ckpt.conversion import stream
from xla_ckpt.storage.local import LocalStore


def converts_and_stops(root: Path, destination: Path, to: str) -> None:
    """Stop for ever after some bytes of the file, and say so."""
    read = stream._read_batch

    def stops(reader: Any, batch: Any, crew: Any) -> Iterator[tuple[Any, memoryview]]:
        yield from read(reader, batch, crew)
        if batch[0].region >= 3:  # the file has the bytes before
            print("half", flush=True)
            signal.pause()

    stream._read_batch = stops
    xla_ckpt.convert(root, destination, "a", to=to, options=xla_ckpt.ConvertOptions(max_memory=64))


@pytest.mark.crash
def test_kill_nine_leaves_no_file_of_that_name(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", {f"w{i}": torch.full((50,), float(i)) for i in range(8)})
    process = bear(Call.of(converts_and_stops, tmp_path, tmp_path / "out.pt", "torch"), live=True)
    assert process.stdout.readline() == "half\n"
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert names_in(tmp_path) == [".new-out.pt", "a"]
    xla_ckpt.convert(tmp_path, tmp_path / "out.pt", "a", to="torch")
    assert names_in(tmp_path) == ["a", "out.pt"]
    held = torch.load(tmp_path / "out.pt", weights_only=True)["model"]
    assert [float(held[f"w{i}"].sum()) for i in range(8)] == [50.0 * i for i in range(8)]


def is_interrupted(root: Path, destination: Path, to: str) -> str:
    """Press Ctrl-C when some bytes of a conversion are written; how it ended."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    read = stream._read_batch

    def interrupts(reader: Any, batch: Any, crew: Any) -> Iterator[tuple[Any, memoryview]]:
        yield from read(reader, batch, crew)
        os.kill(os.getpid(), signal.SIGINT)

    stream._read_batch = interrupts
    try:
        xla_ckpt.convert(root, destination, "a", to=to, options=xla_ckpt.ConvertOptions(max_memory=64))
    except KeyboardInterrupt:
        return "interrupted"
    return "done"


@pytest.mark.parametrize(("to", "place"), [("native", ""), ("pt", ""), ("safetensors", "hf"), ("torch", "x.pt")])
def test_an_interrupted_conversion_leaves_no_directory_that_it_made(to: str, place: str, tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path / "run", "a", {f"w{i}": torch.full((50,), float(i)) for i in range(8)})
    (tmp_path / "there").mkdir()
    for name in ("new", "there"):
        assert run_alone(is_interrupted, tmp_path / "run", tmp_path / name / place, to) == "interrupted"
    assert names_in(tmp_path) == ["run", "there"]
    assert names_in(tmp_path / "there") == []


@pytest.mark.crash
def test_a_killed_conversion_does_not_deny_the_next_one(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path / "run", "a", {f"w{i}": torch.full((50,), float(i)) for i in range(8)})
    process = bear(Call.of(converts_and_stops, tmp_path / "run", tmp_path / "out", "native"), live=True)
    assert process.stdout.readline() == "half\n"
    process.kill()
    process.communicate()
    assert names_in(tmp_path / "out") == [".new-a"]
    xla_ckpt.convert(tmp_path / "run", tmp_path / "out", "a", to="native")
    assert names_in(tmp_path / "out") == ["a"]
    assert xla_ckpt.verify(tmp_path / "out").ok


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
