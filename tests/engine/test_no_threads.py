"""Saves in flight where no further thread is to be had."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.engine.test_async import ended, stored_model
from tests.no_threads import no_thread_after_that_of_a_save, start_as_the_last
from xla_ckpt import Product, SaveOptions
from xla_ckpt.tags import lease
from xla_ckpt.tags.lease import RecordLease
from xla_ckpt.tags.lease_rules import LeaseOwner


def state() -> dict[str, torch.Tensor]:
    return {"w": torch.full((1 << 20,), 7.0), **{f"small.{i}": torch.full((100,), 7.0) for i in range(40)}}


@pytest.mark.parametrize("snapshot", ["host", "overlap"])
def test_a_save_does_all_of_it_on_its_own_thread(tmp_path: Path, snapshot: Any) -> None:
    options = SaveOptions(snapshot=snapshot, products=(Product(to=f"{tmp_path}/hf/{{tag}}"),))
    with no_thread_after_that_of_a_save():
        xla_ckpt.save_checkpoint(tmp_path / "run", "step_1", state(), async_save=True, options=options).result(60)
        with pytest.raises(RuntimeError, match="thread"):
            threading.Thread(target=print).start()
        xla_ckpt.finalize_checkpoint()
    assert xla_ckpt.verify(tmp_path / "run").ok
    tree = xla_ckpt.restore(tmp_path / "run").tree["model"]
    assert all(torch.equal(tree[name], value) for name, value in state().items())
    assert (tmp_path / "hf" / "step_1" / "model.safetensors").is_file()


def test_a_save_says_itself_that_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job took the lease of a long save over, which was refused then. (A bucket has no locks.)"""
    beats: list[int] = []
    beat = RecordLease.write_heartbeat

    def counted(self: RecordLease, owner: LeaseOwner) -> None:
        beats.append(owner.beat)
        beat(self, owner)

    monkeypatch.setattr(lease, "HEARTBEAT_SECONDS", 0.0)
    monkeypatch.setattr(RecordLease, "write_heartbeat", counted)
    with no_thread_after_that_of_a_save():
        xla_ckpt.save("memory://long", "a", {"w": torch.ones(1 << 24)}, async_save=True).result(60)
    assert len(beats) > 1
    assert beats == list(range(beats[0], beats[0] + len(beats)))


def saves_without_further_threads(root: Path) -> None:
    threading.Thread.start = start_as_the_last(threading.Thread.start)  # type: ignore[method-assign]
    xla_ckpt.save_checkpoint(root, "a", {"w": torch.full((1 << 20,), 7.0)}, async_save=True)


def test_the_end_of_a_program_loses_no_save(tmp_path: Path) -> None:
    process = ended(
        "from tests.engine import test_no_threads; test_no_threads.saves_without_further_threads(Path(sys.argv[1]))",
        tmp_path,
    )
    assert (process.returncode, stored_model(tmp_path)) == (0, 7), process.communicate()
