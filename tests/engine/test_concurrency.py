"""What several threads, roots, processes or an exception between two statements must not break."""

from __future__ import annotations

import errno
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.crash.instants import MAIN, Interrupts, Strike
from tests.helper import InThread
from xla_ckpt.errors import SaveError
from xla_ckpt.snapshot.memory import StagingBuffer, allocate
from xla_ckpt.snapshot.shards import HOST_COPY_ENGINE, HostShard
from xla_ckpt.snapshot.snapshot import Snapshot, _allocate_staging
from xla_ckpt.storage.base import VersionConflict
from xla_ckpt.storage.local import LocalDirectory
from xla_ckpt.storage.memory import MemoryFiles
from xla_ckpt.storage.remote import RemoteStore
from xla_ckpt.storage.resolve import open_store
from xla_ckpt.tags import directory_root, orbax_commit, orbax_process
from xla_ckpt.tags.directory_root import DirectoryRoot
from xla_ckpt.tags.lease import LeaseRegistry
from xla_ckpt.tags.lease_rules import LeaseOwner
from xla_ckpt.tags.ledger_record import MAX_BACKOFF_SECONDS, LedgerRecord
from xla_ckpt.tags.ledger_rules import Ledger
from xla_ckpt.tags.orbax_commit import OrbaxCommitter
from xla_ckpt.tags.root import TransactionKind

SOON = 30.0


class Counted(InThread):
    """One that is counted, and takes its time to start."""

    started = 0

    def start(self) -> None:
        type(self).started += 1
        time.sleep(0.01)
        super().start()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, commits_here: None) -> Iterator[type[Counted]]:
    monkeypatch.setattr(Counted, "started", 0)
    monkeypatch.setattr(orbax_commit, "HelperProcess", Counted)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield Counted
    sys.setswitchinterval(interval)


def all_at_once(call: Callable[[], object], count: int = 8) -> None:
    begins = threading.Barrier(count)

    def begun() -> None:
        begins.wait()
        call()

    threads = [threading.Thread(target=begun) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)


def test_saves_that_begin_together_start_one_process(counted: type[Counted]) -> None:
    for number in range(1, 6):
        committer = OrbaxCommitter()
        all_at_once(committer.start)
        all_at_once(lambda: committer.wait_ready(SOON))
        assert counted.started == number
        committer._stop_processes()


def test_a_commit_that_takes_long_delays_none_to_another_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: type[Counted]
) -> None:
    monkeypatch.setattr(orbax_commit, "SECOND_PROCESS_AFTER_SECONDS", 0.1)
    place, hangs, goes_on = orbax_process.replace_directory, threading.Event(), threading.Event()

    def placing(store: Any, *args: Any) -> Any:
        if store.path == str(tmp_path / "hung"):
            hangs.set()
            assert goes_on.wait(SOON)
        return place(store, *args)

    monkeypatch.setattr(orbax_process, "replace_directory", placing)
    handle = xla_ckpt.save(tmp_path / "hung", "a", {"w": torch.ones(2)}, async_save=True)
    assert hangs.wait(SOON)
    for tag in "abc":
        xla_ckpt.save(tmp_path / "other", tag, {"w": torch.ones(2)})
    assert not handle.done()
    assert counted.started == 2
    goes_on.set()
    handle.result(SOON)
    xla_ckpt.save(tmp_path / "hung", "b", {"w": torch.ones(2)})
    assert counted.started == 2
    assert len(orbax_commit.ORBAX_COMMITTER._processes) == 1, "a second process stays only as long as it is needed"
    assert (xla_ckpt.list_tags(tmp_path / "hung"), xla_ckpt.list_tags(tmp_path / "other")) == (
        ["a", "b"],
        ["a", "b", "c"],
    )


def test_the_processes_of_two_jobs_are_told_apart() -> None:
    leases = LeaseRegistry()
    leases.share_with("s3://one", ["a", "b"])
    leases.share_with("s3://other", ["c"])

    def is_mine(path: str, token: str) -> bool:
        return leases._is_own(path, LeaseOwner(
            token=token, host="h", node="n", pid=1, started=1, user="u", program="p", since="", locked=False
        ))  # fmt: skip

    assert [is_mine("s3://one", token) for token in "abc"] == [True, True, False]
    assert [is_mine("s3://other", token) for token in "abc"] == [False, False, True]


class Overtaken(RemoteStore):
    """A store in which somebody else is faster, so many times."""

    times = 6

    def write_record(self, name: str, data: bytes, version: str | None) -> str:
        if self.times:
            self.times -= 1
            raise VersionConflict
        return super().write_record(name, data, version)


def test_a_lost_race_is_run_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = list[float]()
    monkeypatch.setattr(time, "sleep", pauses.append)
    record = LedgerRecord(Overtaken("memory://x", MemoryFiles()))
    assert record.edit(lambda ledger: Ledger(sequence=ledger.sequence + 1)).sequence == 1
    assert len(pauses) == Overtaken.times
    assert 0 < sum(pauses) <= len(pauses) * MAX_BACKOFF_SECONDS


@pytest.mark.parametrize("refused", ["write", "rename", "close"])
def test_a_small_file_that_cannot_be_replaced_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    directory = LocalDirectory(tmp_path)
    directory.write_atomic("a", b"old")

    def refuses(*args: Any, **options: Any) -> Any:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch:
        patch.setattr(os, refused, refuses)
        with pytest.raises(OSError, match="quota"):
            directory.write_atomic("a", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"old")]
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:1]))
    directory.write_atomic("a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new", "short writes go on"


def test_the_error_of_a_save_is_raised_the_same_each_time() -> None:
    handle = failed("memory://failed")
    depths = set()
    for _ in range(4):
        with pytest.raises(SaveError) as raised:
            handle.result()
        depths.add(len(traceback.extract_tb(raised.value.__traceback__)))
    assert len(depths) == 1


def failed(root: str) -> xla_ckpt.SaveHandle:
    """An asynchronous save that has failed."""
    from xla_ckpt.saving import run as saving_run

    def writes(*_: Any, **__: Any) -> Any:
        raise ValueError("x")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving_run, "write_files", writes)
        handle = xla_ckpt.save(root, "a", {"w": torch.ones(3)}, async_save=True)
        handle.wait()
    return handle


def test_at_whatever_instant_a_snapshot_is_interrupted_its_memory_is_lent_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from xla_ckpt.snapshot.arena import HOST_MEMORY_POOL

    staging, struck = StagingBuffer(), 0
    monkeypatch.setattr(HOST_MEMORY_POOL, "get_staging", lambda link: staging)
    batch = [(("w", 0), HostShard(memoryview(bytes(100)), None, immutable=True))]
    while True:
        interrupts, met = Interrupts(Strike(MAIN, struck + 1, "SIGUSR1")), None
        try:
            with interrupts.coming():
                snapshot = Snapshot()
                list(_allocate_staging(HOST_COPY_ENGINE, batch, snapshot))
        except Exception as error:
            met = error.with_traceback(None)
        snapshot = Snapshot()
        gc.collect(1)
        assert not staging._is_lent, interrupts.where
        if interrupts.raised is None:
            break
        assert met is interrupts.raised or interrupts.raised in interrupts.ignored
        struck += 3  # most of them are where handlers are set, one signal after the other
    assert struck > 10


def test_a_snapshot_may_be_collected_while_its_thread_borrows_memory() -> None:
    """The garbage collector runs on whichever thread makes an object, also within a lock of this library."""
    snapshot, ended = Snapshot(), threading.Event()

    def allocates(nbytes: int) -> Any:
        snapshot.release()
        return allocate(nbytes)

    staging = StagingBuffer()
    snapshot.staging_buffers.append((staging, staging.borrow(10)))
    staging._allocate = allocates

    def borrows() -> None:
        staging.borrow(20)
        with snapshot.progress._lock:
            snapshot.release()
        ended.set()

    threading.Thread(target=borrows, daemon=True).start()
    assert ended.wait(SOON)


def test_what_is_replaced_is_what_is_held_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program puts a directory in its place between two looks."""
    monkeypatch.setenv("XLA_CKPT_LEASE", "off")
    xla_ckpt.save(tmp_path, "a", {"w": torch.ones(2)})
    store = open_store(tmp_path).file_system
    assert store is not None
    opened, looks = directory_root._open_if_exists, list[str]()

    def opening(*args: Any) -> Any:
        directory = opened(*args)
        looks.append(args[1])
        if len(looks) == 1:
            (tmp_path / "a").rename(tmp_path / "b")
            (tmp_path / "a").mkdir()
        return directory

    monkeypatch.setattr(directory_root, "_open_if_exists", opening)
    draft = DirectoryRoot(store).begin("a", TransactionKind.CHECKPOINT)
    assert draft.previous is not None
    assert draft.previous.identity == draft.replaced_identity == store.get_identity("a")
    draft.abort()
    assert looks == ["a", "a"]
