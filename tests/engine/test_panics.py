"""Exceptions in the background that are no `Exception`: a panic of an extension module, or an exit. None hangs."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.buckets.s3_server import S3Server
from tests.engine.test_upload import Counted, Machine
from tests.jobs import run_on_ranks
from tests.storage.failing import Faults
from xla_ckpt import SaveOptions
from xla_ckpt.errors import CheckpointError, SaveError
from xla_ckpt.saving import run as saving_run
from xla_ckpt.saving.background import BACKGROUND_TASKS
from xla_ckpt.snapshot.shards import HostShard
from xla_ckpt.storage.memory import MemoryFiles
from xla_ckpt.storage.remote import RemoteStore


class PanicException(BaseException):
    """As PyO3 raises it."""


def panics(*_: Any, **__: Any) -> Any:
    raise PanicException("index out of bounds")


@pytest.mark.parametrize("kind", [PanicException, SystemExit, KeyboardInterrupt])
def test_work_after_a_save_that_panics_is_an_error_of_finalize(kind: type[BaseException]) -> None:
    done = list[int]()

    def raises() -> None:
        raise kind("x")

    BACKGROUND_TASKS.add("making a product", raises)
    BACKGROUND_TASKS.add("making another one", lambda: done.append(1))
    with pytest.raises(SaveError, match=f"making a product failed: {kind.__name__}"):
        xla_ckpt.finalize_checkpoint()
    assert done == [1]
    xla_ckpt.finalize_checkpoint()


class PanicsOnce(Faults):
    """Panics at the first change."""

    def change(self, what: str, *, needs_space: bool = True) -> None:
        if not self.refused:
            self.refused.append(what)
            panics()


def test_an_upload_that_panics_is_told_and_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_CKPT_LEASE", "off")
    machine = Machine(tmp_path / "run", Counted("root", RemoteStore("memory://store", MemoryFiles()), PanicsOnce()))
    machine.save("a")
    with pytest.raises(SaveError, match="PanicException: index out of bounds"):
        machine.upload()
    machine.uploader.finish()
    assert [entry.tag for entry in machine.uploader.root.remote.list_entries()] == ["a"]


def test_a_copy_that_panics_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters())
    with monkeypatch.context() as patch:
        patch.setattr(HostShard, "begin_copy", panics)
        handle = xla_ckpt.save_checkpoint(
            tmp_path, "a", model, optimizer, async_save=True, options=SaveOptions(snapshot="overlap")
        )
        with pytest.raises(SaveError, match="PanicException: index out of bounds"):
            handle.result(60)
    optimizer.step()
    xla_ckpt.save_checkpoint(tmp_path, "b", model, optimizer)
    assert xla_ckpt.list_tags(tmp_path) == ["b"]


def test_a_panic_of_the_object_store_is_an_error_of_the_storage(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from xla_ckpt.storage.remote_client import get_client

    root = f"s3://{s3.new_bucket()}/run"
    xla_ckpt.save(root, "a", {"w": torch.ones(3)})
    with monkeypatch.context() as patch:
        patch.setattr("obstore.store.S3Store.put", panics)
        with pytest.raises(CheckpointError, match="obstore has panicked: index out of bounds"):
            xla_ckpt.save(root, "b", {"w": torch.ones(3)})
    get_client.cache_clear()
    xla_ckpt.save(root, "c", {"w": torch.ones(3)})
    assert xla_ckpt.list_tags(root) == ["a", "c"]


def exits(*_: Any) -> None:
    sys.exit(3)


@pytest.mark.parametrize("async_save", [False, True])
def test_a_function_that_exits_when_it_hears_of_a_save_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, async_save: bool
) -> None:
    remove = xla_ckpt.on_report(exits)
    try:
        handle = xla_ckpt.save(tmp_path, "a", {"w": torch.ones(3)}, async_save=async_save)
        assert handle.result(60).tag == "a"
    finally:
        remove()
    assert [record.levelno for record in caplog.records if "on_report" in record.message] == [logging.ERROR]


def test_a_function_that_exits_when_it_hears_of_an_error_leaves_it_to_be_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving_run, "write_files", panics)
    handle = xla_ckpt.save(tmp_path, "a", {"w": torch.ones(3)}, async_save=True, options=SaveOptions(on_error=exits))
    with pytest.raises(SaveError, match="PanicException"):
        handle.result(60)


def panics_on_one_rank(rank: int, root: Path, which: int) -> str:
    if rank == which:
        saving_run.write_files = panics
    try:
        xla_ckpt.save(root, "a", {"w": torch.ones(3)}, options=SaveOptions(timeout=120))
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


@pytest.mark.parametrize("which", [0, 1])
def test_all_ranks_hear_of_a_panic_of_one(tmp_path: Path, which: int) -> None:
    told = run_on_ranks(panics_on_one_rank, 2, tmp_path, which)
    assert all("PanicException" in text for text in told), told
