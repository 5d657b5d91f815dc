"""Directories that take their name in one step, and what a writer that was killed leaves behind."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.storage.failing import FailingStore, Faults
from xla_ckpt.errors import NotDurableError, SaveError
from xla_ckpt.storage.base import Store, read_whole, write_small
from xla_ckpt.storage.door import above, store_at
from xla_ckpt.tags import replacement


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return store_at(tmp_path / "root" if request.param == "local" else f"memory://{tmp_path.name}/root")


def fill(made: replacement.Replacement, text: bytes) -> None:
    write_small(made.directory, "file", text)
    made.directory.sync()


def content(store: Store, name: str = "a") -> bytes:
    directory = store.open(replacement.where(store, name))
    try:
        return read_whole(directory, "file")
    finally:
        directory.close()


def put(store: Store, text: bytes) -> None:
    made = replacement.begin(store, "a")
    fill(made, text)
    replacement.commit(made)


def test_a_directory_appears_and_is_replaced(store: Store) -> None:
    for text in (b"1", b"2", b"3"):
        put(store, text)
        assert store.names() == ["a"]
        assert content(store) == text


def test_one_that_is_abandoned_leaves_nothing(store: Store) -> None:
    put(store, b"1")
    made = replacement.begin(store, "a")
    fill(made, b"2")
    replacement.abandon(made)
    replacement.abandon(made)
    assert store.names() == ["a"]
    assert content(store) == b"1"


def test_what_killed_writers_left_is_removed(store: Store) -> None:
    put(store, b"1")
    for name in (".new-a", ".new-a-1", ".old-a", ".new-another"):
        store.make(name).close()
    put(store, b"2")
    assert store.names() == [".new-another", "a"]
    assert content(store) == b"2"


def test_what_another_writer_still_writes_is_left_alone(store: Store) -> None:
    first = replacement.begin(store, "a")
    second = replacement.begin(store, "a")
    assert {first.directory.name, second.directory.name} == {".new-a", ".new-a-1"}
    for made, text in ((first, b"1"), (second, b"2")):
        fill(made, text)
    replacement.commit(first)
    with pytest.raises(SaveError, match="another job has saved this checkpoint meanwhile"):
        replacement.commit(second)
    replacement.abandon(second)
    assert content(store) == b"1"
    assert store.names() == ["a"]


class CannotExchange(FailingStore):
    def exchange(self, one: str, other: str) -> bool:
        return False


def test_a_storage_that_cannot_exchange_names(store: Store) -> None:
    plain = CannotExchange("root", store, Faults())
    put(plain, b"1")
    put(plain, b"2")
    assert store.names() == ["a"]
    assert content(store) == b"2"
    # Killed between the two renames: the old version is found, and the next writer puts it back.
    store.rename("a", ".old-a")
    assert content(store) == b"2"
    replacement.clean(plain, "a")
    assert store.names() == ["a"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_whatever_is_refused_the_old_or_the_new_one_is_there(store: Store, exchanges: bool) -> None:
    kind = FailingStore if exchanges else CannotExchange
    put(store, b"old")
    for at in range(40):
        faults = Faults(at=at, number=errno.EIO)
        failing = kind("root", store, faults)
        made = None
        try:
            made = replacement.begin(failing, "a")
            fill(made, b"new")
            replacement.commit(made)
        except OSError:
            if made is not None:
                replacement.abandon(made)
            assert content(store) in (b"old", b"new")
        else:
            assert content(store) == b"new"
            if not faults.refused:
                break
        replacement.clean(store, "a")
        assert store.names() == ["a"]
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


def test_a_directory_that_is_neither_durable_nor_taken_back_keeps_its_old_version(store: Store) -> None:
    put(store, b"old")
    failing = RefusesFromTheExchangeOn("root", store, Faults())
    made = replacement.begin(failing, "a")
    fill(made, b"new")
    with pytest.raises(NotDurableError, match="a is in place and complete"):
        replacement.commit(made)
    assert failing.faults.refused == ["sync the root", "exchange .new-a and a"]
    replacement.abandon(made)
    assert content(store) == b"new"
    assert store.names() == [".new-a", "a"]  # a loss of power may give the old version its name again
    replacement.clean(store, "a")
    assert store.names() == ["a"]


def test_a_link_to_a_checkpoint_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "real")
    store, name = above(tmp_path / "latest", follow=True)
    assert (store.path, name) == (str(tmp_path), "real")
    assert above(tmp_path / "latest")[1] == "latest"
