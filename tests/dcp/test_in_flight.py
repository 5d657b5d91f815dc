"""Saves by DCP's calls are saves of the process: they are waited for, and reported."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.jobs import run_on_ranks
from xla_ckpt import dcp
from xla_ckpt.dcp import writer
from xla_ckpt.dcp.calls import DcpSave

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Holds back the writing of every save until it is set."""
    opened, write = threading.Event(), writer.write_files

    def waiting(*args: Any, **options: Any) -> Any:
        assert opened.wait(60)
        return write(*args, **options)

    monkeypatch.setattr(writer, "write_files", waiting)
    return opened


@pytest.fixture
def reports() -> Iterator[list[Any]]:
    """What `on_report` hears."""
    heard: list[Any] = []
    remove = xla_ckpt.on_report(heard.append)
    yield heard
    remove()


def test_finalize_waits_for_a_save_in_the_background(tmp_path: Path, gate: threading.Event) -> None:
    future = dcp.async_save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "a", no_dist=True)
    assert not future.done()  # type: ignore[union-attr]
    threading.Timer(0.2, gate.set).start()
    xla_ckpt.finalize_checkpoint()
    assert future.done()  # type: ignore[union-attr]
    assert (tmp_path / "a" / ".metadata").exists()


def test_a_failed_one_is_told_by_its_future_and_not_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reports: list[Any]
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_files", refuse)
        future = dcp.async_save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "a", no_dist=True)
        xla_ckpt.finalize_checkpoint()
    assert isinstance(future.exception(), xla_ckpt.StorageError)  # type: ignore[union-attr]
    (report,) = reports
    assert report.error is future.exception()  # type: ignore[union-attr]
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "a", no_dist=True)
    assert reports[1].error is None


def test_saves_have_reports_and_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reports: list[Any]) -> None:
    monkeypatch.setenv("XLA_CKPT_TRACE", str(tmp_path / "traces"))
    state = {"w": torch.ones(1000), "b": torch.ones(24)}
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    dcp.async_save(state, checkpoint_id=tmp_path / "b", no_dist=True).result()  # type: ignore[union-attr]
    xla_ckpt.finalize_checkpoint()
    assert [(r.path, r.tag, r.nbytes, r.files, r.error) for r in reports] == [
        (str(tmp_path), "a", 4096, 1, None),
        (str(tmp_path), "b", 4096, 1, None),
    ]
    assert all(r.phases["write"].nbytes >= 4096 and r.seconds > 0 for r in reports)
    assert reports[1].stall > 0
    names = sorted(path.name for path in (tmp_path / "traces").iterdir())
    assert names == ["save-a-rank0.json", "save-b-rank0.json"]
    assert json.loads((tmp_path / "traces" / names[0]).read_text())["traceEvents"]


def test_the_report_of_an_interrupted_save_says_so(tmp_path: Path, reports: list[Any]) -> None:
    def interrupted() -> Any:
        raise KeyboardInterrupt

    save = DcpSave(
        path=str(tmp_path / "a"), writer=dcp.StorageWriter(tmp_path / "a"), rank=0, world=1, save=interrupted
    )
    with pytest.raises(KeyboardInterrupt) as caught:
        save.run()
    assert [report.error for report in reports] == [caught.value]


def hears(rank: int, root: Path) -> list[tuple[str, int]]:
    heard: list[Any] = []
    xla_ckpt.on_report(heard.append)
    for i in range(3):
        dcp.async_save({f"w{rank}": torch.full((10,), float(i))}, checkpoint_id=root / str(i))
    xla_ckpt.finalize_checkpoint()
    return [(report.tag, report.nbytes) for report in heard]


def test_each_rank_hears_of_its_part_in_the_order_of_the_calls(tmp_path: Path) -> None:
    assert run_on_ranks(hears, 2, tmp_path) == [[("0", 40), ("1", 40), ("2", 40)]] * 2
