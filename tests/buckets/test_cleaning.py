"""``xla-ckpt clean`` and ``adopt`` in a bucket: what killed writers left goes, and a lost ledger is made anew."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import xla_ckpt
from tests.buckets.s3_server import S3Server
from tests.buckets.test_jobs import HOW, another, files_of, ledger_of
from tests.cli.test_cli import call
from tests.jobs import run_alone
from tests.nursery import Call, bear
from tests.runs import environment
from tests.tags.test_lease import Job, save, set_up
from tests.tags.test_ledger import begin, put, text_of
from xla_ckpt.cli.main import main
from xla_ckpt.storage.base import write_file
from xla_ckpt.storage.resolve import open_store
from xla_ckpt.tags import ledger_record
from xla_ckpt.tags import ledger_rules as rules
from xla_ckpt.tags.entry import DRAFT_PREFIX, LEDGER_NAME
from xla_ckpt.tags.ledger_root import LedgerDraft
from xla_ckpt.tags.resolve import open_root
from xla_ckpt.tags.root import Transaction, TransactionKind

Capture = pytest.CaptureFixture[str]


def dies_in_mid_save(root: str) -> None:
    save(root, "first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LedgerDraft, "commit", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
        save(root, "second")


def cleans(root: str) -> int:
    set_up(**HOW)
    return main(["clean", root])


def test_what_a_killed_job_was_writing_goes(root: str) -> None:
    killed = bear(Call.of(dies_in_mid_save, root), env=environment())
    killed.communicate(60)
    assert len(files_of(root)) == 2
    assert run_alone(cleans, root) == 0
    assert files_of(root) == {ledger_of(root).get_directory_name("first")}
    assert not ledger_of(root).read().open
    assert another(root) == ("", []), "the lease was given back"


def test_what_a_living_job_writes_stays(root: str, tmp_path: Path, capsys: Capture) -> None:
    job = Job(root, tmp_path / "job", **HOW)
    writing = begin(ledger_of(root), "writing")
    assert run_alone(cleans, root) == 0
    writing.commit()
    assert job.go_on() == ""
    assert xla_ckpt.list_tags(root) == ["first", "writing", "second"]


def test_files_that_no_ledger_names_go_unless_they_are_a_whole_tag(root: str, capsys: Capture) -> None:
    ledger = ledger_of(root)
    put(ledger, "a", "1")
    late = begin(ledger, "b", "2")
    late.abort()
    write_file(ledger.store.get_directory(late.directory.name), "late", b"from a process that was stopped")
    whole = begin(ledger, "c", "4")
    record = ledger._record
    record.edit(lambda its: rules.forget_attempts(rules.give_up_attempts(its, its.open), its.open))
    assert files_of(root) == {ledger.get_directory_name("a"), late.directory.name, whole.directory.name}
    code, out, _ = call(capsys, "clean", root, "--json")
    answer = json.loads(out)
    assert (code, answer["removed"]) == (0, [late.directory.name])
    assert [its["name"] for its in answer["kept"]] == [whole.directory.name]
    assert files_of(root) == {ledger.get_directory_name("a"), whole.directory.name}
    assert "complete, and in no record" in call(capsys, "clean", root)[1]
    assert call(capsys, "adopt", root, "a", "c")[:2] == (0, "a: was known already\nc: adopted\n")
    assert (text_of(ledger, "a"), text_of(ledger, "c")) == ("1", "4")
    code, out, err = call(capsys, "adopt", root, "x")
    assert (code, out) == (1, "")
    assert "there is no such checkpoint" in err


@pytest.mark.parametrize("how", ["removed", "damaged"])
def test_a_lost_ledger_is_made_anew(root: str, how: str, capsys: Capture) -> None:
    ledger = ledger_of(root)
    for step in range(4):
        put(ledger, f"step_{step}", str(step))
    put(ledger, "step_0", "again", pinned=True)  # the version before still has its files
    ledger.retire("step_3")
    unfinished = Transaction(ledger, "unfinished").begin()
    write_file(unfinished.directory, "text", b"")
    ledger.store.remove(LEDGER_NAME)
    if how == "removed":
        code, _, err = call(capsys, "ls", root)
        assert (code, "no record of them" in err, "xla-ckpt adopt" in err) == (1, True, True)
    if how == "damaged":
        ledger.store.write_record(LEDGER_NAME, b"{", None)
        code, _, err = call(capsys, "clean", root)
        assert (code, "the record of the tags is damaged" in err, "xla-ckpt adopt" in err) == (1, True, True)
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="xla-ckpt adopt ROOT makes a new one"):
        save(root, "later")
    assert "step_2" in ledger.store.list_names()
    assert call(capsys, "adopt", root)[0] == 0
    after = ledger.read()
    names = ["step_1", "step_2", "step_3", "step_0"]
    assert [(entry.tag, entry.sequence, entry.pinned) for entry in ledger.list_entries()] == [
        (name, at + 2, name == "step_0") for at, name in enumerate(names)
    ]
    assert [text_of(ledger, name) for name in names] == ["1", "2", "3", "again"]
    assert len(after.doomed) == 1
    with pytest.raises(xla_ckpt.RootInUseError):
        unfinished.commit()
    unfinished.abort()
    for tag in "xyz":
        save(root, tag)
    ledger.clean()
    assert xla_ckpt.list_tags(root) == [*names, *"xyz"]
    assert files_of(root) == {its.attempt for its in ledger.read().tags.values()}


READS: dict[str, Callable[[str], object]] = {
    "has_checkpoint": xla_ckpt.has_checkpoint,
    "has_checkpoint of a tag": lambda root: xla_ckpt.has_checkpoint(f"{root}/b"),
    "list_tags": xla_ckpt.list_tags,
    "latest_tag": xla_ckpt.latest_tag,
    "load_checkpoint": lambda root: xla_ckpt.load_checkpoint(root, model=torch.nn.Linear(2, 2)),
    "load_checkpoint of a tag": lambda root: xla_ckpt.load_checkpoint(root, "b", model=torch.nn.Linear(2, 2)),
    "load_checkpoint of a tag's path": lambda root: xla_ckpt.load_checkpoint(f"{root}/b", model=torch.nn.Linear(2, 2)),
    "load_checkpoint of another tag": lambda root: xla_ckpt.load_checkpoint(root, "x", model=torch.nn.Linear(2, 2)),
    "restore": xla_ckpt.restore,
    "verify": xla_ckpt.verify,
    "Checkpoints": lambda root: xla_ckpt.Checkpoints(root).tags(),
    "convert": lambda root: xla_ckpt.convert(root, f"{root}-native"),
    "diff": lambda root: xla_ckpt.diff(f"{root}/b", f"{root}/a"),
}


@pytest.fixture
def without_ledger(root: str) -> str:
    """A root with the tags a and b, of which the ledger is gone."""
    ledger = ledger_of(root)
    for tag in "ab":
        put(ledger, tag, tag)
    ledger.store.remove(LEDGER_NAME)
    return root


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_reads_of_a_root_without_its_ledger_raise_the_error_of_saves(
    without_ledger: str, read: Callable[[str], object], s3: S3Server
) -> None:
    message = "complete tags, and no record of them.*xla-ckpt adopt ROOT makes a new one"
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match=message):
        read(without_ledger)
    assert not [request for request in s3.requests if request.method == "DELETE"]


def test_reads_after_a_refused_save_find_the_ledger_still_lost(without_ledger: str, capsys: Capture) -> None:
    with pytest.raises(xla_ckpt.CorruptCheckpointError):
        save(without_ledger, "later")
    assert ledger_of(without_ledger).read().sequence == 0, "the save has left an empty ledger"
    for read in (xla_ckpt.has_checkpoint, xla_ckpt.list_tags):
        with pytest.raises(xla_ckpt.CorruptCheckpointError, match="xla-ckpt adopt"):
            read(without_ledger)
    assert call(capsys, "ls", without_ledger)[0] == 1
    assert call(capsys, "adopt", without_ledger)[0] == 0
    assert xla_ckpt.list_tags(without_ledger) == ["a", "b"]


def test_a_root_whose_first_save_was_killed_has_no_tags(root: str) -> None:
    ledger = ledger_of(root)
    write_file(Transaction(ledger, "unfinished").begin().directory, "text", b"")
    for _ in range(2):
        assert not xla_ckpt.has_checkpoint(root)
        assert xla_ckpt.list_tags(root) == []
        ledger.store.remove(LEDGER_NAME)


def test_the_first_commit_during_a_read_is_no_lost_ledger(root: str) -> None:
    look = open_store(root).snapshot_view()
    assert look.object_store is not None
    assert look.object_store.read_record(LEDGER_NAME) is None
    put(ledger_of(root), "a", "1")
    assert open_root(look).list_entries() == [], "a look sees one state"
    assert xla_ckpt.list_tags(root) == ["a"]


@pytest.mark.parametrize("wrote", ["nothing", "a file"])
def test_a_record_of_a_killed_writer_goes_after_a_day(
    wrote: str, root: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = ledger_of(root)
    transaction = Transaction(ledger, "x", TransactionKind.NEW_DIRECTORY).begin()
    if wrote == "a file":
        write_file(transaction.directory, "x", b"1")
    assert "somebody wrote x a short time ago" in call(capsys, "clean", root)[1]
    monkeypatch.setattr(ledger_record, "ABANDONED_SECONDS", -60.0)
    code, out, _ = call(capsys, "clean", root)
    assert (code, f"{DRAFT_PREFIX}x: removed" in out) == (0, True)
    if wrote == "nothing":
        assert ledger.store.list_names() == []
        Transaction(ledger, "x", TransactionKind.NEW_DIRECTORY).begin().abort()
    else:
        assert "its writer was killed" in out
        assert ledger.store.list_names() == ["x"]
