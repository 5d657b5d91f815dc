"""Two jobs on one root in a bucket: the second is told, and what is taken over commits nothing any more."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import xla_ckpt
from tests.buckets.s3_server import Fault, S3Server
from tests.jobs import run_alone
from tests.nursery import Call, bear
from tests.runs import environment
from tests.tags.test_lease import Job, save, set_up
from tests.tags.test_ledger import begin, put
from xla_ckpt.storage.resolve import open_store
from xla_ckpt.tags.entry import LEASE_NAME
from xla_ckpt.tags.lease import LEASES
from xla_ckpt.tags.ledger_root import LedgerDraft, LedgerRoot

HOW = {"beat": 0.1, "silence": 2.0}
"""Long enough for a server that answers slowly, because others have the processors."""


def ledger_of(root: str) -> LedgerRoot:
    store = open_store(root).object_store
    assert store is not None
    return LedgerRoot(store)


def files_of(root: str) -> set[str]:
    """The attempts that have files."""
    store = open_store(root)
    return {f"{tag}/{name}" for tag in store.list_names() if not tag.startswith(".") for name in store.list_names(tag)}


def saves_after(root: str, tag: str, how: dict[str, Any], options: dict[str, Any]) -> tuple[str, list[str]]:
    """Another job, which saves once: what that says, and what is logged."""
    set_up(**how)
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logging.getLogger("xla_ckpt.tags.lease").addHandler(handler)
    try:
        save(root, tag, **options)
    except xla_ckpt.CheckpointError as error:
        return f"{type(error).__name__}: {error}", told
    return "", told


def another(root: str, tag: str = "other", env: dict[str, str] | None = None, **options: Any) -> tuple[str, list[str]]:
    return run_alone(saves_after, root, tag, HOW, options, env=env)


@pytest.fixture
def gives_back() -> Iterator[None]:
    """This process gives its leases back when the test ends: it lives on."""
    yield
    LEASES.release_all()


def test_a_second_job_is_told_and_the_first_goes_on(root: str, tmp_path: Path) -> None:
    first = Job(root, tmp_path / "job", **HOW)
    before = ledger_of(root).read()
    said, told = another(root)
    assert said.startswith("RootInUseError: another process saves to this root [tag other, rank 0")
    assert f"process {first.process.pid} of " in said
    assert len(told) == 1, "it waited, and said so"
    assert ledger_of(root).read() == before
    assert first.go_on() == ""
    assert xla_ckpt.list_tags(root) == ["first", "second"]
    said, told = another(root)
    assert (said, told) == ("", []), "the first one has given it back"


def test_what_a_killed_job_left_is_taken_over_when_it_is_silent(root: str, tmp_path: Path) -> None:
    first = Job(root, tmp_path / "job", **HOW)
    first.end()
    said, _ = another(root, timeout=1.0)
    assert said.startswith("RootInUseError"), "a wait is no longer than the timeout of the save"
    said, told = another(root)
    assert said == ""
    assert "waiting to see" in told[0]
    assert f"process {first.process.pid} of " in told[1]
    assert "not heard of for" in told[1]
    assert xla_ckpt.list_tags(root) == ["first", "other"]
    assert ledger_of(root).read().epoch == 1


def stops_before_its_commit(root: str, folder: Path, how: dict[str, Any]) -> list[str]:
    """A job that waits before the commit of its second save; what that save and a third one say."""
    set_up(**how)
    save(root, "first")
    commit = LedgerDraft.commit

    def late(self: LedgerDraft, **arguments: Any) -> float:
        (folder / "saved").open("w").close()
        (folder / "go on").open().close()
        return commit(self, **arguments)

    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LedgerDraft, "commit", late)
        with pytest.raises(xla_ckpt.RootInUseError) as refused:
            save(root, "second")
    said.append(str(refused.value))
    with pytest.raises(xla_ckpt.RootInUseError) as refused:
        save(root, "third")
    return [*said, str(refused.value)]


@pytest.mark.parametrize("how", ["silent", "by force"])
def test_a_job_that_is_stopped_in_mid_save_commits_nothing_when_it_was_replaced(
    how: str, root: str, tmp_path: Path
) -> None:
    for name in ("saved", "go on"):
        os.mkfifo(tmp_path / name)
    first = bear(Call.of(stops_before_its_commit, root, tmp_path, HOW), env=environment())
    (tmp_path / "saved").open().close()
    assert len(files_of(root)) == 2
    first.send_signal(signal.SIGSTOP)
    said, told = another(root, env={"XLA_CKPT_LEASE": "take"} if how == "by force" else None)
    assert said == ""
    assert len(told) == (1 if how == "by force" else 2)
    first.send_signal(signal.SIGCONT)
    (tmp_path / "go on").open("w").close()
    first.communicate(60)
    second, third = first.value()
    assert "another process has taken over this root since this save began" in second
    assert "nothing is saved there any more" in third, "also when nobody has it any more"
    ledger = ledger_of(root).read()
    assert list(ledger.tags) == ["first", "other"]
    assert files_of(root) == {its.attempt for its in ledger.tags.values()}, "what it had written is gone"
    assert (dict(ledger.open), dict(ledger.doomed)) == ({}, {})


def killed_before_its_commit(root: str, how: dict[str, Any]) -> None:
    set_up(**how)
    save(root, "first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LedgerDraft, "commit", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        save(root, "second")


def test_what_was_killed_in_mid_save_is_swept_by_the_next_job(root: str) -> None:
    killed = bear(Call.of(killed_before_its_commit, root, HOW), env=environment())
    killed.communicate(60)
    assert killed.returncode == -signal.SIGKILL
    assert len(files_of(root)) == 2
    assert another(root)[0] == ""
    ledger = ledger_of(root).read()
    assert list(ledger.tags) == ["first", "other"]
    assert files_of(root) == {its.attempt for its in ledger.tags.values()}


def test_a_child_does_not_give_up_what_its_parent_writes(root: str, gives_back: None) -> None:
    parent = ledger_of(root)
    parent.acquire_lease(60)
    transaction = begin(parent, "parent", "1")
    assert another(root, "child") == ("", []), "it shares the lease"
    transaction.commit()
    put(parent, "again")
    assert xla_ckpt.list_tags(root) == ["child", "parent", "again"]
    assert parent.read().epoch == 0


def test_the_lease_may_be_left_out(root: str, gives_back: None) -> None:
    ledger_of(root).acquire_lease(60)
    record = open_store(root).read_start(LEASE_NAME, 1 << 14)
    assert json.loads(record)["pid"] == os.getpid()
    assert another(root, env={"XLA_CKPT_LEASE": "off"}) == ("", [])
    assert xla_ckpt.list_tags(root) == ["other"]


@pytest.mark.parametrize("data", [b"\xff{", b"", b"[" * 100_000, b'{"token": 3}'])
def test_a_damaged_lease_is_watched_and_taken_over(data: bytes, root: str) -> None:
    ledger_of(root).store.write_record(LEASE_NAME, data, None)
    said, told = another(root)
    assert said == ""
    assert len(told) == 2
    assert all(line.isprintable() for line in told)


@pytest.mark.parametrize("kind", ["after500", "drop", "refuse409", "before503"])
def test_the_lease_is_taken_although_answers_are_lost(root: str, s3: S3Server, kind: Any, gives_back: None) -> None:
    s3.faults.append(Fault("PUT", f"/{LEASE_NAME}", kind, count=1))
    ledger_of(root).acquire_lease(60)
    assert s3.faults[0].count == 0
    assert json.loads(open_store(root).read_start(LEASE_NAME, 1 << 14))["pid"] == os.getpid()
    s3.faults.append(Fault("PUT", f"/{LEASE_NAME}", kind, count=1))
    LEASES.release_all()
    assert open_store(root).read_start(LEASE_NAME, 10) == b"{}", "nobody has to wait for its silence"
