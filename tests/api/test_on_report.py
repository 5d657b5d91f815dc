"""`on_report`: functions of the program that hear of each save and load."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import xla_ckpt
from tests.jobs import run_on_ranks

Report = xla_ckpt.SaveReport | xla_ckpt.LoadReport


def test_each_save_and_load_is_told_with_its_report(tmp_path: Path) -> None:
    told: list[tuple[Report, str]] = []
    remove = xla_ckpt.on_report(lambda report: told.append((report, threading.current_thread().name)))
    try:
        saved = xla_ckpt.save(tmp_path, "a", {"w": torch.ones(2)}, async_save=True).result()
        assert told == [(saved, "xla_ckpt-save-a")]  # by then: who waits for the save may look at what was told
        loaded = xla_ckpt.restore(tmp_path).report
        assert told[1:] == [(loaded, threading.current_thread().name)]
        assert all(report.error is None and report.seconds > 0 for report, _ in told)
    finally:
        remove()
        remove()
    xla_ckpt.save(tmp_path, "b", {"w": torch.ones(2)})
    assert len(told) == 2


def test_what_failed_is_told_with_its_error(tmp_path: Path) -> None:
    told: list[Report] = []
    remove = xla_ckpt.on_report(told.append)
    try:
        with pytest.raises(xla_ckpt.InvalidTagError) as refused:
            xla_ckpt.save(tmp_path, "a/b", {"w": torch.ones(2)})
        with pytest.raises(xla_ckpt.NoCheckpointError) as absent:
            xla_ckpt.restore(tmp_path)
        xla_ckpt.save(tmp_path, "a", {"w": torch.ones(2)})
        (tmp_path / "a" / "tree" / "00001-of-00001.safetensors").write_bytes(b"")
        with pytest.raises(xla_ckpt.CorruptCheckpointError) as damaged:
            xla_ckpt.restore(tmp_path, "a")
    finally:
        remove()
    assert [report.error for report in told] == [refused.value, absent.value, None, damaged.value]
    assert [report.tag for report in told] == ["a/b", "", "a", "a"]
    assert isinstance(told[0], xla_ckpt.SaveReport)
    assert (told[0].sequence, told[0].nbytes) == (0, 0)


def test_a_function_that_fails_is_logged_and_the_others_are_called(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Report] = []

    def fails(report: Report) -> None:
        raise RuntimeError("the board is gone")

    removals = [xla_ckpt.on_report(fails), xla_ckpt.on_report(told.append)]
    try:
        report = xla_ckpt.save(tmp_path, "a", {"w": torch.ones(2)}).result()
        assert xla_ckpt.restore(tmp_path).report.tag == "a"
    finally:
        for remove in removals:
            remove()
    assert report.sequence == 1
    assert len(told) == 2
    assert [r.exc_info[1].args for r in caplog.records if r.exc_info] == [("the board is gone",)] * 2


def test_a_function_that_waits_for_the_save_itself_is_told_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And hangs nobody."""
    handles: list[xla_ckpt.SaveHandle] = []
    begun = threading.Event()

    def waits(report: Report) -> None:
        assert begun.wait(60)
        handles[0].result()

    remove = xla_ckpt.on_report(waits)
    try:
        handles.append(xla_ckpt.save(tmp_path, "a", {"w": torch.ones(2)}, async_save=True))
        begun.set()
        assert handles[0].result(60).sequence == 1
    finally:
        remove()
    (logged,) = [r.exc_info[1] for r in caplog.records if r.exc_info]
    assert isinstance(logged, xla_ckpt.UsageError)


def test_a_function_may_save_where_it_hears_that_a_save_was_refused(tmp_path: Path) -> None:
    def saves(report: Report) -> None:
        if report.error is not None:
            xla_ckpt.save(tmp_path, "instead", {"w": torch.ones(2)})

    remove = xla_ckpt.on_report(saves)
    try:
        with pytest.raises(xla_ckpt.InvalidTagError):
            xla_ckpt.save(tmp_path, "a/b", {"w": torch.ones(2)})
    finally:
        remove()
    assert xla_ckpt.list_tags(tmp_path) == ["instead"]


def hears(rank: int, root: Path) -> list[tuple[str, int, str]]:
    told: list[tuple[str, int, str]] = []
    xla_ckpt.on_report(lambda r: told.append((type(r).__name__, r.nbytes, type(r.error).__name__)))
    tree = {"w": torch.full((3,), float(rank))}
    xla_ckpt.save(root, "a", tree, mesh=xla_ckpt.Mesh(tp=2), shardings=[("w", ("tp",))])
    with pytest.raises(xla_ckpt.DivergentReplicasError):
        xla_ckpt.save(root, "b", tree)
    return told


def test_each_rank_hears_of_its_own_part_and_of_the_common_error(tmp_path: Path) -> None:
    expected = [("SaveReport", 12, "NoneType"), ("SaveReport", 0, "DivergentReplicasError")]
    assert run_on_ranks(hears, 2, tmp_path) == [expected, expected]
