"""Directories that take their name in one step, and what a writer that was killed leaves behind."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.storage.failing import FailingStore, Faults
from xla_ckpt.errors import NotDurableError, SaveError
from xla_ckpt.storage.base import FileSystem, read_file, write_file
from xla_ckpt.storage.local import LocalStore
from xla_ckpt.storage.resolve import open_parent
from xla_ckpt.tags.directory_operations import clean_root
from xla_ckpt.tags.directory_root import DirectoryRoot
from xla_ckpt.tags.root import Transaction, TransactionKind


@pytest.fixture
def store(tmp_path: Path) -> FileSystem:
    return LocalStore(str(tmp_path / "root"))


def begin(store: FileSystem) -> Transaction:
    return Transaction(DirectoryRoot(store), "a", TransactionKind.CHECKPOINT).begin()


def fill(transaction: Transaction, text: bytes) -> None:
    write_file(transaction.directory, "file", text)
    transaction.seal({})


def content(store: FileSystem, name: str = "a") -> bytes:
    directory = store.open(DirectoryRoot(store).get_directory_name(name))
    try:
        return read_file(directory, "file")
    finally:
        directory.close()


def put(store: FileSystem, text: bytes) -> None:
    made = begin(store)
    fill(made, text)
    made.commit()


def test_a_directory_appears_and_is_replaced(store: FileSystem) -> None:
    for text in (b"1", b"2", b"3"):
        put(store, text)
        assert store.list_names() == ["a"]
        assert content(store) == text


def test_one_that_is_abandoned_leaves_nothing(store: FileSystem) -> None:
    put(store, b"1")
    made = begin(store)
    fill(made, b"2")
    made.abort()
    made.abort()
    assert store.list_names() == ["a"]
    assert content(store) == b"1"


def test_what_killed_writers_left_is_removed(store: FileSystem) -> None:
    put(store, b"1")
    for name in (".new-a", ".new-a-1", ".old-a", ".new-another"):
        store.make_directory(name).close()
    put(store, b"2")
    assert store.list_names() == [".new-another", "a"]
    assert content(store) == b"2"


def test_what_another_writer_still_writes_is_left_alone(store: FileSystem) -> None:
    first = begin(store)
    second = begin(store)
    assert {first.directory.name, second.directory.name} == {".new-a", ".new-a-1"}
    for made, text in ((first, b"1"), (second, b"2")):
        fill(made, text)
    first.commit()
    with pytest.raises(SaveError, match="another job has saved this checkpoint meanwhile"):
        second.commit()
    second.abort()
    assert content(store) == b"1"
    assert store.list_names() == ["a"]


class CannotExchange(FailingStore):
    def exchange(self, one: str, other: str) -> bool:
        return False


def test_a_storage_that_cannot_exchange_names(store: FileSystem) -> None:
    plain = CannotExchange("root", store, Faults())
    put(plain, b"1")
    put(plain, b"2")
    assert store.list_names() == ["a"]
    assert content(store) == b"2"
    # Killed between the two renames: the old version is found, and the next writer puts it back.
    store.rename("a", ".old-a")
    assert content(store) == b"2"
    clean_root(plain, "a")
    assert store.list_names() == ["a"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_whatever_is_refused_the_old_or_the_new_one_is_there(store: FileSystem, exchanges: bool) -> None:
    kind = FailingStore if exchanges else CannotExchange
    put(store, b"old")
    for at in range(40):
        faults = Faults(at=at, number=errno.EIO)
        failing = kind("root", store, faults)
        made = None
        try:
            made = begin(failing)
            fill(made, b"new")
            made.commit()
        except OSError:
            if made is not None:
                made.abort()
            assert content(store) in (b"old", b"new")
        else:
            assert content(store) == b"new"
            if not faults.refused:
                break
        clean_root(store, "a")
        assert store.list_names() == ["a"]
        put(store, b"old")
    else:
        pytest.fail("every change was refused")


class RefusesFromTheExchangeOn(FailingStore):
    """A storage that exchanges two names, and then does nothing any more."""

    def exchange(self, one: str, other: str) -> bool:
        done = super().exchange(one, other)
        self.faults.at, self.faults.number = self.faults.done, errno.EIO
        return done

    def sync(self) -> None:
        try:
            super().sync()
        finally:
            if self.faults.refused:
                self.faults.at = self.faults.done


def test_a_directory_that_is_neither_durable_nor_taken_back_keeps_its_old_version(store: FileSystem) -> None:
    put(store, b"old")
    failing = RefusesFromTheExchangeOn("root", store, Faults())
    made = begin(failing)
    fill(made, b"new")
    with pytest.raises(NotDurableError, match="a is in place and complete"):
        made.commit()
    assert failing.faults.refused == ["sync the root", "exchange .new-a and a"]
    made.abort()
    assert content(store) == b"new"
    assert store.list_names() == [".new-a", "a"]  # a loss of power may give the old version its name again
    clean_root(store, "a")
    assert store.list_names() == ["a"]


def test_a_link_to_a_checkpoint_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "real")
    store, name = open_parent(tmp_path / "latest")
    assert (store.path, name) == (str(tmp_path), "real")
    (tmp_path / "real/file.pt").write_bytes(b"")
    (tmp_path / "model.pt").symlink_to(tmp_path / "real/file.pt")
    assert open_parent(tmp_path / "model.pt")[1] == "model.pt", "the name says what is in a file"
