"""A bar appears on a terminal when it takes long, or when asked for, and nowhere else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import xla_ckpt
from tests.nursery import Call, bear
from xla_ckpt import progress
from xla_ckpt.progress import ProgressBar


def saves_and_loads(root: Path, wanted: bool | None) -> None:
    xla_ckpt.save_checkpoint(root, "a", model={"w": torch.ones(100_000)}, options=xla_ckpt.SaveOptions(progress=wanted))
    xla_ckpt.load_checkpoint(root, model={"w": torch.ones(100_000)}, options=xla_ckpt.LoadOptions(progress=wanted))


@pytest.mark.parametrize(("wanted", "shows"), [(True, True), (False, False), (None, False)])
def test_asked_for(tmp_path: Path, wanted: bool | None, shows: bool) -> None:
    process = bear(Call.of(saves_and_loads, tmp_path, wanted))  # its stderr is no terminal
    _, shown = process.communicate(60)
    process.value()
    assert ("save a: 100%" in shown) == shows
    assert bool(re.search(r"load a\b.*: 100%", shown)) == shows
    assert shows or "%" not in shown


def test_by_itself_on_a_terminal_after_a_second(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True)
    with ProgressBar("save x", 100, None) as bar:
        bar(10)
        assert capsys.readouterr().err == ""
        now[0] += 1.5
        bar(10)
        bar(80)
    assert "save x" in capsys.readouterr().err
    with ProgressBar("save x", 100, None) as bar:
        bar(100)
    assert capsys.readouterr().err == ""


def test_counts_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the bars are told adds up to what they announced."""
    bars: list[ProgressBar] = []
    init = ProgressBar.__init__

    def spy(self: ProgressBar, *args: object) -> None:
        init(self, *args)  # type: ignore[arg-type]
        bars.append(self)

    monkeypatch.setattr(ProgressBar, "__init__", spy)
    state = {"a": torch.ones(3_000_000), "b": torch.ones(5), "c": torch.ones(700, 900)}
    xla_ckpt.save_checkpoint(tmp_path, "a", model=state)
    xla_ckpt.load_checkpoint(tmp_path, model=state)
    xla_ckpt.restore(tmp_path)
    assert len(bars) == 3
    for bar in bars:
        assert bar.done == bar._total
