"""A root of tags in an object store: one record decides, answers get lost, and jobs are stopped and go on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import xla_ckpt
import xla_ckpt.formats.tags
from tests.storage.failing import FailingObjects, Faults
from xla_ckpt import dcp
from xla_ckpt.core.manifest import manifest_json
from xla_ckpt.core.manifest.arrays import ArrayTable
from xla_ckpt.core.manifest.manifest import Manifest, ManifestHeader
from xla_ckpt.errors import (
    CheckpointError,
    FormatError,
    NoCheckpointError,
    RootInUseError,
    SaveError,
    UnknownOutcomeError,
    UsageError,
)
from xla_ckpt.storage import resolve
from xla_ckpt.storage.base import ObjectStore, VersionConflict, read_file, write_file
from xla_ckpt.storage.memory import MemoryFiles
from xla_ckpt.storage.remote import RemoteStore
from xla_ckpt.tags import deletion
from xla_ckpt.tags.entry import DRAFT_PREFIX, LEDGER_NAME, MANIFEST_FILE
from xla_ckpt.tags.ledger_record import WRITE_ATTEMPTS
from xla_ckpt.tags.ledger_root import LedgerRoot
from xla_ckpt.tags.retention import LatestN, resolve_policy
from xla_ckpt.tags.root import Transaction, TransactionKind


@pytest.fixture
def store() -> RemoteStore:
    return RemoteStore("memory://store", MemoryFiles())


def begin(root: LedgerRoot, tag: str, text: str = "", *, pinned: bool = False) -> Transaction:
    """A save of a tag that holds a text, and lacks nothing but the commit."""
    transaction = Transaction(root, tag).begin()
    try:
        fill(transaction, tag, text, pinned=pinned)
    except BaseException:
        transaction.abort()
        raise
    return transaction


def fill(transaction: Transaction, tag: str, text: str, *, pinned: bool) -> None:
    head = ManifestHeader(tag=tag, sequence=transaction.sequence, pinned=pinned, created="2026-01-01T00:00:00+00:00")
    write_file(transaction.directory, "text", text.encode())
    write_file(
        transaction.directory,
        MANIFEST_FILE,
        manifest_json.dump_manifest(Manifest(header=head, skeleton=None, arrays=ArrayTable.from_records({}), files=())),
    )
    transaction.seal({})


def put(root: LedgerRoot, tag: str, text: str = "", *, num_kept: int | None = None, pinned: bool = False) -> None:
    transaction = begin(root, tag, text, pinned=pinned)
    try:
        transaction.commit(retention=resolve_policy(num_kept, None))
    finally:
        transaction.abort()


def text_of(root: LedgerRoot, tag: str) -> str:
    directory = root.open(tag)
    try:
        return read_file(directory, "text").decode()
    finally:
        directory.close()


def tags(root: LedgerRoot) -> list[str]:
    return [entry.tag for entry in root.list_entries()]


def stored(store: ObjectStore) -> set[str]:
    """The attempts that have files."""
    return {f"{tag}/{name}" for tag in store.list_names() for name in store.list_names(tag)}


def known(root: LedgerRoot) -> set[str]:
    ledger = root.read()
    return {*(its.attempt for its in ledger.tags.values()), *ledger.open, *ledger.doomed}


def test_a_tag_is_there_when_the_ledger_names_it(store: RemoteStore) -> None:
    root = LedgerRoot(store)
    transaction = begin(root, "a", "1")
    assert (tags(root), root.is_written("a"), root.is_native_tag("a")) == ([], True, False)
    with pytest.raises(NoCheckpointError):
        root.open("a")
    transaction.commit(report={"some": "facts"})
    assert (tags(root), root.is_written("a"), root.is_native_tag("a")) == (["a"], False, True)
    assert (text_of(root, "a"), root.read_report("a")) == ("1", {"some": "facts"})
    transaction.abort()
    put(root, "b", "2", pinned=True)
    put(root, "a", "3")
    assert [(entry.tag, entry.sequence, entry.pinned) for entry in root.list_entries()] == [
        ("b", 2, True),
        ("a", 3, False),
    ]
    assert (text_of(root, "a"), root.read_report("a")) == ("3", None)
    assert root.get_directory_name("a") == root.read().tags["a"].attempt
    assert LedgerRoot(RemoteStore("memory://", store._client)).is_root("store")


def test_what_is_abandoned_leaves_nothing(store: RemoteStore) -> None:
    root = LedgerRoot(store)
    transaction = begin(root, "a")
    transaction.abort()
    transaction.abort()
    assert (stored(store), known(root)) == (set(), set())


@pytest.mark.parametrize("meanwhile", [None, "a pin", "another commit"])
def test_a_commit_whose_answer_is_lost_counts_once(store: RemoteStore, meanwhile: str | None) -> None:
    """It was applied, and who repeats it is told that the record has changed."""
    direct, faults = LedgerRoot(store), Faults()
    put(direct, "b")
    loses = LosesAnswers("root", store, faults)
    transaction = begin(LedgerRoot(loses), "a", "1")
    loses.loses = True
    if meanwhile is not None:
        pin, commit = partial(direct.pin, "b", True), partial(put, direct, "c")
        loses.afterwards = pin if meanwhile == "a pin" else commit
    transaction.commit()
    assert not loses.loses
    transaction.abort()
    assert text_of(direct, "a") == "1"
    assert [entry.sequence for entry in direct.list_entries()] == list(range(1, len(tags(direct)) + 1))
    assert [entry.pinned for entry in direct.list_entries() if entry.tag == "b"] == [meanwhile == "a pin"]


class LosesAnswers(FailingObjects):
    """A store that writes the ledger, and once does not say so."""

    loses = False
    afterwards: Callable[[], object] = staticmethod(lambda: None)

    def write_record(self, name: str, data: bytes, version: str | None) -> str:
        written = self.inner.write_record(name, data, version)
        if self.loses:
            self.loses = False
            self.afterwards()
            raise TimeoutError("no answer")
        return written


def test_a_commit_that_arrives_when_it_was_given_up_is_refused(store: RemoteStore) -> None:
    """The storage answers no write for a while; then the requests arrive after all."""
    slow = Delays("root", store, Faults())
    put(LedgerRoot(store), "a", "old")
    transaction = begin(LedgerRoot(slow), "a", "new")
    slow.requests = []
    with pytest.raises(UnknownOutcomeError):
        transaction.commit()
    requests, slow.requests = slow.requests, None
    assert len(requests) == 2 * WRITE_ATTEMPTS, "those of the commit, and those that give it up"
    transaction.abort()
    for request in requests:
        with pytest.raises(VersionConflict):
            request()
    assert text_of(LedgerRoot(store), "a") == "old"
    assert stored(store) == {LedgerRoot(store).get_directory_name("a")}


class Delays(FailingObjects):
    """A store that keeps requests to itself."""

    requests: list[Callable[[], object]] | None = None

    def write_record(self, name: str, data: bytes, version: str | None) -> str:
        if self.requests is None:
            return self.inner.write_record(name, data, version)
        self.requests.append(lambda: self.inner.write_record(name, data, version))
        raise TimeoutError("no answer")


def test_of_two_jobs_that_save_one_tag_the_first_has_it(store: RemoteStore) -> None:
    one, other = LedgerRoot(store), LedgerRoot(store, "another")
    put(one, "a", "0")
    first, second, third = begin(one, "a", "1"), begin(other, "a", "2"), begin(other, "b", "3")
    first.commit()
    with pytest.raises(SaveError, match="another job has saved this checkpoint meanwhile"):
        second.commit()
    second.abort()
    third.commit()
    assert [(entry.tag, entry.sequence) for entry in one.list_entries()] == [("a", 2), ("b", 3)]
    assert (text_of(one, "a"), text_of(one, "b")) == ("1", "3")
    assert stored(store) == known(one)


def test_a_job_that_was_stopped_and_goes_on_commits_nothing(store: RemoteStore) -> None:
    stopped, next_job = LedgerRoot(store, "stopped"), LedgerRoot(store, "next")
    stopped.take_ownership("stopped")
    put(stopped, "a", "1")
    transaction = begin(stopped, "b", "2")
    next_job.take_ownership("next")
    put(next_job, "c", "3")
    with pytest.raises(RootInUseError, match="another process has taken over this root"):
        transaction.commit()
    write_file(store.get_directory(transaction.directory.name), "late", b"")
    transaction.abort()
    next_job.clean()
    assert tags(next_job) == ["a", "c"]
    assert stored(store) == known(next_job)


STEPS = st.lists(st.tuples(st.sampled_from("xyz"), st.sampled_from(["take", "begin", "commit", "clean"])), max_size=30)


@settings(deadline=None)
@given(STEPS)
def test_only_the_job_that_took_the_root_last_begins_and_commits(steps: list[tuple[str, str]]) -> None:
    """Each job may be stopped between any two of its steps, and go on after those of others."""
    store = RemoteStore("memory://store", MemoryFiles())
    roots = {name: LedgerRoot(store, name) for name in "xyz"}
    begun: dict[str, tuple[str, Transaction, int]] = {}
    owner, changes, committed = "", 0, list[str]()
    took: dict[str, int] = {}
    for at, (name, step) in enumerate(steps):
        if name not in took or step == "take":
            roots[name].take_ownership(name)
            owner, changes = name, changes + (owner != name)
            took[name] = changes
        if step == "begin" and name not in begun:
            tag = f"{name}{at}"
            transaction = Transaction(roots[name], tag)
            if took[name] != changes:
                with pytest.raises(RootInUseError):
                    transaction.begin()
            else:
                begun[name] = tag, transaction.begin(), changes
                fill(transaction, tag, name, pinned=False)
        elif step == "commit" and name in begun:
            tag, transaction, its_changes = begun.pop(name)
            if its_changes != changes:
                with pytest.raises(RootInUseError):
                    transaction.commit()
            else:
                transaction.commit()
                committed.append(tag)
            transaction.abort()
        elif step == "clean":
            roots[name].clean()
        assert tags(roots[name]) == committed
    for _, transaction, _ in begun.values():
        transaction.abort()
    roots["x"].clean()
    assert stored(store) == {its.attempt for its in roots["x"].read().tags.values()}


def test_a_pin_comes_between(store: RemoteStore) -> None:
    root = LedgerRoot(store)
    for tag in "ab":
        put(root, tag)
    transaction = begin(root, "c")
    assert [root.pin("a", True), root.pin("a", True)] == [True, False]
    transaction.commit(retention=LatestN(1))
    assert tags(root) == ["a", "c"]
    with pytest.raises(NoCheckpointError):
        root.pin("b", True)
    saving = begin(root, "a")
    with pytest.raises(UsageError, match="a save of this tag is running"):
        root.pin("a", False)
    with pytest.raises(UsageError, match="a save of this tag is running"):
        deletion.delete_tag(root, "a", force=True)
    saving.abort()
    assert root.pin("a", False)
    deletion.delete_tag(root, "a", force=False)
    assert tags(root) == ["c"]


def test_a_reader_has_time_and_is_told_when_it_is_over(store: RemoteStore) -> None:
    root = LedgerRoot(store)
    put(root, "a", "1")
    retired = root.open("a")
    for tag in "bc":
        put(root, tag, num_kept=1)
        root.clean()
        assert read_file(retired, "text") == b"1"
    assert retired.is_at(retired.name)
    put(root, "d", num_kept=1)
    root.clean()
    assert not retired.is_at(retired.name)
    with pytest.raises(FileNotFoundError):
        read_file(retired, "text")
    assert stored(store) == known(root)


def test_a_load_of_what_has_gone_says_so(store: RemoteStore) -> None:
    path = "memory://gone/ckpt"
    xla_ckpt.save(path, "a", {"w": torch.ones(3)})
    with xla_ckpt.formats.tags.open_tag(resolve.open_store(path), "a") as reader:
        for tag in "bcd":
            xla_ckpt.save(path, tag, {"w": torch.ones(3)}, num_kept_ckpts=1)
        xla_ckpt.finalize_checkpoint()
        with pytest.raises(CheckpointError, match="replaced or removed while it was being read"):
            reader.read_head(0)


@pytest.mark.parametrize("applied", [False, True], ids=["refused", "done, and not answered"])
def test_whatever_is_refused_the_old_or_the_new_one_is_there(store: RemoteStore, applied: bool) -> None:
    direct, text = LedgerRoot(store), "0"
    put(direct, "a", text)
    for at in range(100):
        faults = Faults(at=at, applied=applied)
        root = LedgerRoot(FailingObjects("root", store, faults))
        try:
            put(root, "a", str(at + 1))
            text = str(at + 1)
        except OSError:
            assert faults.refused[0].startswith(("put", "remove")), "the ledger is written again until it is"
        assert (tags(direct), text_of(direct, "a")) == (["a"], text), faults.refused
        direct.clean()
        assert stored(store) == known(direct)
        if not faults.refused:
            return
    pytest.fail("every change was refused")


def test_a_repair_is_a_new_attempt_of_the_same_tag() -> None:
    path = "memory://repaired/ckpt"
    for tag in "ab":
        value = np.arange(300_000)
        xla_ckpt.save(path, tag, {"x": value}, options=xla_ckpt.SaveOptions(parity="file"))
    store = resolve.open_store(path)
    assert store.object_store is not None
    root = LedgerRoot(store.object_store)
    before, directory = root.read().tags["a"], root.open("a")
    (payload,) = [name for name in directory.list_files() if name.endswith(".safetensors")]
    damaged: Any = directory
    for name in (payload, MANIFEST_FILE, "parity/manifest.json"):
        data = bytearray(read_file(directory, name))
        data[len(data) // 2] ^= 1
        damaged._client[damaged._prefix + name] = bytes(data)
        assert xla_ckpt.repair(path, "a") == (name,)
        assert xla_ckpt.verify(path, "a").ok
        directory = damaged = root.open("a")
    after = root.read().tags["a"]
    assert (after.sequence, after.created) == (before.sequence, before.created)
    assert after.attempt != before.attempt
    assert xla_ckpt.list_tags(path) == ["a", "b"]
    assert (xla_ckpt.restore(path, "a").tree["x"] == value).all()
    directory = root.open("a")
    transaction = Transaction(root, "a", TransactionKind.REPAIR).begin()
    root.retire("a")
    with pytest.raises(NoCheckpointError):
        transaction.commit()
    transaction.abort()


@pytest.mark.parametrize("kind", [TransactionKind.CHECKPOINT, TransactionKind.NEW_DIRECTORY, TransactionKind.NEW_FILE])
def test_what_has_a_fixed_name_is_written_once(store: RemoteStore, kind: TransactionKind) -> None:
    root = LedgerRoot(store)
    with Transaction(root, "x", kind) as transaction:
        write_file(transaction.directory, "x", b"1")
        with pytest.raises(UsageError, match="something is being written there"):
            Transaction(root, "x", kind).begin()
        if kind is not TransactionKind.NEW_FILE:
            write_file(root.open_draft(root.get_draft_name("x")), "of another rank", b"")
    assert store.list_names() == [], "all of it was removed"
    with pytest.raises(FileNotFoundError, match="nobody writes x"):
        root.open_draft("x")
    with Transaction(root, "x", kind) as transaction:
        write_file(transaction.directory, "x", b"2")
        transaction.seal({})
        transaction.commit()
    assert (store.list_names(), tags(root)) == (["x"], [])
    with pytest.raises(UsageError, match="cannot replace it in one step"):
        Transaction(root, "x", kind).begin()
    assert store.read_start("x" if kind is TransactionKind.NEW_FILE else "x/x", 9) == b"2"
    assert store.list_names() == ["x"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_directory_of_dcp_is_written_where_nothing_is() -> None:
    path, state = "memory://of-dcp/ckpt", {"w": torch.arange(5.0)}
    dcp.save(state, checkpoint_id=path)
    blank = {"w": torch.zeros(5)}
    dcp.load(blank, checkpoint_id=path)
    assert torch.equal(blank["w"], state["w"])
    with pytest.raises(UsageError, match="cannot replace it in one step"):
        dcp.save(state, checkpoint_id=path)
    dcp.load(blank, checkpoint_id=path)
    assert resolve.open_store("memory://of-dcp").list_names() == ["ckpt"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_tag_in_dcps_layout_is_a_directory_of_dcp() -> None:
    path, state = "memory://tag-of-dcp/ckpt", {"w": torch.arange(5.0)}
    for _ in range(2):
        xla_ckpt.save(path, "a", state, layout="dcp")
    blank = {"w": torch.zeros(5)}
    dcp.load(blank, checkpoint_id=f"{path}/a")
    assert torch.equal(blank["w"], state["w"])


@pytest.mark.parametrize("applied", [False, True])
def test_a_fixed_name_whose_record_is_not_answered(store: RemoteStore, applied: bool) -> None:
    root = LedgerRoot(FailingObjects("root", store, Faults(at=0, applied=applied)))
    transaction = Transaction(root, "x", TransactionKind.NEW_DIRECTORY)
    if applied:
        transaction.begin()
        assert store.list_names() == [DRAFT_PREFIX + "x"]
        transaction.abort()
    else:
        with pytest.raises(OSError, match="No space"):
            transaction.begin()
    assert store.list_names() == []


def test_a_damaged_ledger_is_named(store: RemoteStore) -> None:
    store.write_record(LEDGER_NAME, b"{", None)
    root = LedgerRoot(store)
    for ask in (root.list_entries, root.clean, partial(root.begin, "a", TransactionKind.TAG)):
        with pytest.raises(FormatError, match=r"the record of the tags is damaged.*\.ledger"):
            ask()
    assert store.read_start(LEDGER_NAME, 9) == b"{"
