"""What saves and loads say of their time and bytes: `handle.report`, the values of loads, and one line of log."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch

import xla_ckpt
from tests.jobs import run_on_ranks
from xla_ckpt.reports import LOAD_PHASES, SAVE_PHASES, Phase, PhaseRecorder, format_phases

NBYTES = 4 * (3 << 20) + 4 * 10


def model() -> dict[str, torch.Tensor]:
    return {"w": torch.ones(3 << 20), "b": torch.zeros(10)}


def in_order(phases: object, order: tuple[str, ...]) -> bool:
    return [*phases] == [name for name in order if name in set(phases)]  # type: ignore[call-overload, misc]


@pytest.mark.parametrize("layout", ["native", "xser", "pt"])
def test_a_save_says_where_its_time_went(tmp_path: Path, layout: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="xla_ckpt"):
        handle = xla_ckpt.save_checkpoint(tmp_path, "a", model(), layout=layout, num_kept_ckpts=1, async_save=True)
        report = handle.result()
    assert handle.report is report
    phases = report.phases
    assert in_order(phases, SAVE_PHASES)
    assert {"describe", "plan", "snapshot", "copy", "digest", "write", "fsync", "meet", "commit", "retain"} == {
        *phases
    } - {"helper"}  # the first commit of a process may wait for the one in which orbax commits
    assert all(phase.seconds >= 0 for phase in phases.values())
    assert phases["copy"].nbytes == phases["digest"].nbytes == report.nbytes == NBYTES
    assert phases["write"].nbytes >= NBYTES  # headers, too
    assert phases["fsync"].files == report.files
    assert 0 < report.stall < report.stall + report.seconds
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("saved tag a")]
    assert len(lines) == 1
    assert re.search(r"the caller waited [\d.]+ ms: describe [\d.]+ ms, .*fsync [\d.]+ ms \(\d files?\)", lines[0])


def test_a_load_says_where_its_time_went(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", model())
    target = {"w": torch.zeros(3 << 20), "b": torch.ones(10)}
    with caplog.at_level(logging.INFO, logger="xla_ckpt"):
        report = xla_ckpt.load_checkpoint(tmp_path, model=target).report
    assert in_order(report.phases, LOAD_PHASES)
    assert {*report.phases} == {*LOAD_PHASES} - {"prove"}  # nobody asked for it
    # The large array is verified, and read again over the memory of the program. The small one is read once.
    twice = target["w"].nbytes
    assert report.phases["read"].nbytes == report.phases["verify"].nbytes == report.read_bytes == NBYTES + twice
    assert (report.needed_bytes, report.arrays, report.tag) == (NBYTES, 2, "a")
    assert sum(r.getMessage().startswith("loaded tag a") for r in caplog.records) == 1
    fresh = xla_ckpt.restore(tmp_path).report
    assert fresh.phases["read"].nbytes == NBYTES
    assert sum(phase.seconds for name, phase in fresh.phases.items() if name in ("open", "check", "plan")) > 0


def test_a_save_that_fails_has_no_report(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    handle = xla_ckpt.save_checkpoint(tmp_path / "ok", "a", model(), async_save=True)
    handle.result()
    assert handle.report is not None
    with pytest.raises(xla_ckpt.StorageError):
        xla_ckpt.save_checkpoint(tmp_path / "file", "a", model())


def saves_on_ranks(rank: int, root: Path) -> tuple[set[str], int, int]:
    report = xla_ckpt.save_checkpoint(root, "a", model()).result()
    return {*report.phases}, report.phases["write"].nbytes, report.nbytes


def test_every_rank_reports_its_own_part(tmp_path: Path) -> None:
    told = run_on_ranks(saves_on_ranks, 2, tmp_path / "ckpt")
    assert all({"describe", "snapshot", "write", "fsync", "meet"} <= phases for phases, _, _ in told)
    assert ["commit" in phases for phases, _, _ in told] == [True, False]
    assert sum(nbytes for _, _, nbytes in told) == NBYTES
    assert all(written >= nbytes for _, written, nbytes in told)


def test_phases_add_up_over_threads() -> None:
    phases = PhaseRecorder(LOAD_PHASES)
    phases.add("verify", 1.0, 10)
    phases.add("open", 0.5)
    phases.add("verify", 2.0, 5, files=1)
    assert phases.report() == {"open": Phase(0.5), "verify": Phase(3.0, 15, 1)}
    assert [*phases.report()] == ["open", "verify"]
    assert format_phases(phases.report()) == "open 500.0 ms, verify 3000.0 ms (0.0 MB, 1 file)"
