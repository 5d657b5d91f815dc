"""In a notebook results show themselves as tables, and long calls have a bar."""

from __future__ import annotations

import sys
import types
import warnings
from pathlib import Path

import pytest
import torch

import xla_ckpt
from tests.pages import HOSTILE, Parsed
from tests.test_architecture import imported
from xla_ckpt import progress
from xla_ckpt.progress import ProgressBar


def shown(value: object) -> Parsed:
    parsed = Parsed(value._repr_html_())  # type: ignore[attr-defined]
    parsed.check_harmless()
    return parsed


def test_results_are_tables(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    saved = xla_ckpt.save_checkpoint(tmp_path, "a", model, user_content={"step": 10, "more": [1]}).result()
    with torch.no_grad():
        model.weight += 1
    xla_ckpt.save_checkpoint(tmp_path, "b", model)
    root = xla_ckpt.Checkpoints(tmp_path)
    assert {"nbytes", "fsync"} <= set(shown(saved).texts)
    loaded = xla_ckpt.load_checkpoint(tmp_path, "a", model)
    assert {"step", "10", "more", "list", "verify"} <= set(shown(loaded).texts)
    assert {"model", "dict", "read"} <= set(shown(xla_ckpt.restore(tmp_path, "a")).texts)
    assert {"a", "b", "newest"} <= set(shown(root).texts)
    assert {"model/weight", "3 x 2"} <= set(shown(root.show("a")).texts)
    assert "model/weight" in shown(root.diff("a")).texts
    assert "sound" in shown(root.verify()).texts
    assert "can be restored" in shown(xla_ckpt.explain(tmp_path, mesh="tp=2")).texts
    assert "No tags in" in shown(xla_ckpt.Checkpoints(tmp_path / "none")).text


def test_names_of_a_tag_are_shown_and_do_nothing(tmp_path: Path) -> None:
    # (A leaf path is a text; `a/b` in a key is escaped by the library.)
    for tag, add in (("a", 0.0), ("b", 1.0)):
        tree = {name: torch.ones(2) + add for name in HOSTILE} | {f"{name}!": name for name in HOSTILE}
        xla_ckpt.save(tmp_path, tag, tree)
    root = xla_ckpt.Checkpoints(tmp_path)
    for value in (
        root,
        root.show("a"),
        root.diff("a"),
        xla_ckpt.restore(tmp_path),
        xla_ckpt.explain(tmp_path, mesh="tp=2"),
    ):
        shown(value)
    text = shown(root.show("a")).text
    assert "<script>alert(1)<" in text
    assert "right\\u202eto\\u2066left" in text


def test_a_failed_call_shows_why(tmp_path: Path) -> None:
    reports: list[xla_ckpt.SaveReport | xla_ckpt.LoadReport] = []
    remove = xla_ckpt.on_report(reports.append)
    try:
        with pytest.raises(xla_ckpt.NoCheckpointError):
            xla_ckpt.restore(tmp_path / HOSTILE[0].replace("/", "_"))
    finally:
        remove()
    assert "there is no" in shown(reports[0]).text


def test_nothing_of_it_is_loaded_before_it_is_asked_for() -> None:
    modules = imported("import xla_ckpt; xla_ckpt.Checkpoints('/nowhere').tags()")
    assert not [
        m
        for m in modules
        if m == "rich" or m.startswith("xla_ckpt.rendering.") and m != "xla_ckpt.rendering.formatting"
    ]


def test_long_calls_have_a_bar_in_a_notebook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    monkeypatch.setitem(sys.modules, "ipywidgets", None)  # as if it were not installed
    with warnings.catch_warnings(), ProgressBar("save x", 100, None) as bar:
        warnings.simplefilter("error")
        bar(10)
        now[0] += 1.5
        bar(90)
    assert "save x" in capsys.readouterr().err  # without ipywidgets: as on a terminal
