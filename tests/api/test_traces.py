"""Traces of saves and loads: files in Chrome's trace format, with a bar for all that a thread did or waited for."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.jobs import run_on_ranks
from tests.runs import names_in

NBYTES = 4 * (3 << 20)


def model() -> dict[str, torch.Tensor]:
    return {"w": torch.ones(3 << 20)}


def events(path: Path) -> list[dict[str, Any]]:
    """The bars of a trace, in the order of their begins."""
    told = json.loads(path.read_text())["traceEvents"]
    bars = [e for e in told if e["ph"] == "X"]
    named = {(e["pid"], e["tid"]) for e in told if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in bars} == named
    assert all(e["dur"] >= 0 and e["ts"] > 1e15 for e in bars)
    assert [e["ts"] for e in bars] == sorted(e["ts"] for e in bars)
    for thread in {e["tid"] for e in bars}:
        nested([e for e in bars if e["tid"] == thread])
    return bars


def nested(bars: list[dict[str, Any]]) -> None:
    """What a viewer needs: of two bars on a thread one holds the other, or they do not touch."""
    for one in bars:
        for other in bars:
            if one["ts"] < other["ts"] < one["ts"] + one["dur"] - 1:
                assert other["ts"] + other["dur"] <= one["ts"] + one["dur"] + 1, (one, other)


def test_a_trace_of_a_save_has_each_thread_and_phase(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("an older one")
    handle = xla_ckpt.save_checkpoint(
        tmp_path / "r", "a", model(), async_save=True, options=xla_ckpt.SaveOptions(trace=path), num_kept_ckpts=1
    )
    report = handle.result()
    bars = events(path)
    names = {e["name"] for e in bars}
    assert {*report.phases, "stall", "save", "wait"} <= names
    stall, whole = (next(e for e in bars if e["name"] == name) for name in ("stall", "save"))
    assert stall["dur"] == pytest.approx(1e6 * report.stall, abs=2e3)
    assert whole["dur"] == pytest.approx(1e6 * report.seconds, abs=2e3)
    assert stall["tid"] != whole["tid"]
    written = [e for e in bars if e["name"] == "write" and e["args"].get("bytes")]
    assert sum(e["args"]["bytes"] for e in written) == report.phases["write"].nbytes
    assert {e["args"]["about"] for e in written} == {"model/00001-of-00001.safetensors"}
    for name, phase in report.phases.items():
        mine = [e for e in bars if e["name"] == name]
        assert sum(e["dur"] for e in mine) == pytest.approx(1e6 * phase.seconds, abs=50)
        assert min(e["ts"] for e in mine) == pytest.approx(stall["ts"] + 1e6 * phase.began, abs=50)
    assert names_in(tmp_path) == ["r", "trace.json"]


def test_a_trace_of_a_load_says_what_was_read_and_verified(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path / "r", "a", model())
    target = {"w": torch.zeros(3 << 20)}
    report = xla_ckpt.load_checkpoint(
        tmp_path / "r", model=target, options=xla_ckpt.LoadOptions(trace=tmp_path / "load.json")
    ).report
    bars = events(tmp_path / "load.json")
    assert {*report.phases, "load"} <= {e["name"] for e in bars}
    verified = sum(e["args"]["bytes"] for e in bars if e["name"] == "verify")
    assert verified == report.phases["verify"].nbytes >= NBYTES
    xla_ckpt.restore(tmp_path / "r", options=xla_ckpt.LoadOptions(trace=tmp_path / "restore.json"))
    assert sum(e["args"].get("bytes", 0) for e in events(tmp_path / "restore.json") if e["name"] == "read") == NBYTES


def test_the_environment_names_a_directory_with_a_file_for_each_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_CKPT_TRACE", str(tmp_path / "made" / "traces"))
    for _ in range(2):
        xla_ckpt.save(tmp_path / "r", "a", {"w": torch.ones(2)})
    xla_ckpt.restore(tmp_path / "r")
    xla_ckpt.restore(tmp_path / "r", "a", options=xla_ckpt.LoadOptions(trace=tmp_path / "own.json"))
    found = names_in(tmp_path / "made" / "traces")
    assert found == ["load-a-rank0.json", "save-a-rank0-1.json", "save-a-rank0.json"]
    assert events(tmp_path / "own.json")


def test_a_path_that_ends_with_a_slash_is_a_directory(tmp_path: Path) -> None:
    options = xla_ckpt.SaveOptions(trace=f"{tmp_path}/new/")
    xla_ckpt.save(tmp_path / "r", "a", {"w": torch.ones(2)}, options=options)
    assert names_in(tmp_path / "new") == ["save-a-rank0.json"]


def test_what_fails_leaves_its_trace(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(xla_ckpt.StorageError):
        xla_ckpt.save(
            tmp_path / "file", "a", {"w": torch.ones(2)}, options=xla_ckpt.SaveOptions(trace=tmp_path / "save.json")
        )
    with pytest.raises(xla_ckpt.NoCheckpointError):
        xla_ckpt.restore(tmp_path / "r", "a", options=xla_ckpt.LoadOptions(trace=tmp_path / "load.json"))
    for name, kind in (("save", "StorageError"), ("load", "NoCheckpointError")):
        told = json.loads((tmp_path / f"{name}.json").read_text())["otherData"]
        assert (told["doing"], told["tag"], told["rank"]) == (name, "a", 0)
        assert told["error"].startswith(kind)
        assert events(tmp_path / f"{name}.json")


def test_a_trace_that_cannot_be_written_fails_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    report = xla_ckpt.save(
        tmp_path / "r", "a", {"w": torch.ones(2)}, options=xla_ckpt.SaveOptions(trace=tmp_path / "file" / "t.json")
    ).result()
    assert report.sequence == 1
    (told,) = [r for r in caplog.records if "trace" in r.getMessage()]
    assert (told.levelno, str(tmp_path / "file" / "t.json") in told.getMessage()) == (logging.WARNING, True)


def test_a_place_that_is_no_path_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    for wrong in (True, 7, b"bytes"):
        with pytest.raises(xla_ckpt.UsageError, match=r"trace= is the path"):
            xla_ckpt.save(tmp_path / "r", "a", {"w": torch.ones(2)}, options=xla_ckpt.SaveOptions(trace=wrong))  # type: ignore[arg-type]
    assert not (tmp_path / "r").exists()


def saves_and_loads(rank: int, folder: Path) -> None:
    state = model()
    xla_ckpt.save_checkpoint(folder / "r", "a", state, options=xla_ckpt.SaveOptions(trace=folder / "save.json"))
    xla_ckpt.load_checkpoint(folder / "r", "a", state, options=xla_ckpt.LoadOptions(trace=folder / "load.json"))


def test_each_rank_has_a_trace_with_its_waits_for_others(tmp_path: Path) -> None:
    run_on_ranks(saves_and_loads, 2, tmp_path)
    for doing in ("save", "load"):
        for rank in range(2):
            bars = events(tmp_path / f"{doing}-rank{rank}.json")
            assert {e["pid"] for e in bars} == {rank}
            waits = {e["args"]["about"] for e in bars if e["name"] == "wait"}
            assert f"for rank {0 if doing == 'load' else 1 - rank}" in waits
