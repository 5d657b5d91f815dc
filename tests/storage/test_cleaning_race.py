"""What other jobs do at the very moment at which one cleans up: nothing of theirs is removed."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.storage.failing import FailingStore, Faults
from xla_ckpt.storage import local
from xla_ckpt.storage.base import Directory, read_file, write_file
from xla_ckpt.storage.local import LocalDirectory, LocalStore
from xla_ckpt.tags.directory_operations import clean_root, move_to_trash
from xla_ckpt.tags.entry import TRASH_NAME


@pytest.mark.parametrize("instant", ["before it is opened", "before it is locked"])
def test_a_directory_is_made_again_if_it_was_removed_before_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instant: str
) -> None:
    store, removed = LocalStore(str(tmp_path)), []

    def remove(path: str) -> None:
        if not removed:
            shutil.rmtree(path)
            removed.append(path)

    mkdir, mark = os.mkdir, local._lock_with_retries
    if instant == "before it is opened":
        monkeypatch.setattr(os, "mkdir", lambda path, *a, **k: (mkdir(path, *a, **k), remove(path)))
    else:
        monkeypatch.setattr(
            local, "_lock_with_retries", lambda directory, how: (remove(directory.path), mark(directory, how))
        )
    directory = store.make_directory("a")
    assert removed
    directory.create("f", 1).commit()
    assert directory.list_files() == ["f"]
    assert (tmp_path / "a/f").exists()
    assert store.is_in_use("a")
    directory.close()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_directory_that_goes_before_its_lock_is_not_read(
    replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever removes it has asked whether it is in use while it had no lock yet."""
    store = LocalStore(str(tmp_path))
    for name in "ab":
        store.make_directory(name).close()
    (tmp_path / "b/file").write_bytes(b"new")
    mark, todo = local._lock_with_retries, [True]

    def removes_and_marks(directory: LocalDirectory, how: int) -> None:
        if todo and todo.pop():
            assert not store.is_in_use("a")
            store.remove("a")
            if replaced:
                os.rename(tmp_path / "b", tmp_path / "a")
        mark(directory, how)

    monkeypatch.setattr(local, "_lock_with_retries", removes_and_marks)
    if not replaced:
        with pytest.raises(FileNotFoundError):
            store.open("a")
        return
    directory = store.open("a")
    assert read_file(directory, "file") == b"new"
    assert store.is_in_use("a")
    directory.close()


@pytest.mark.parametrize("instant", ["before it is locked", "before it is removed"])
def test_of_two_programs_that_clean_up_neither_removes_what_a_third_one_fills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instant: str
) -> None:
    """What a killed save has left has the name that the next save of that tag takes."""
    ours, other = LocalStore(str(tmp_path)), LocalStore(str(tmp_path))
    ours.make_directory("draft").close()
    filled: list[Directory] = []

    def other_programs_are_faster() -> None:
        if not filled:
            filled.append(ours.make_directory("never"))
            if other.remove_unused("draft"):
                filled[0] = other.make_directory("draft")

    lock, rmtree = LocalDirectory.lock, shutil.rmtree
    if instant == "before it is locked":
        monkeypatch.setattr(LocalDirectory, "lock", lambda at, how: (other_programs_are_faster(), lock(at, how)))
        with pytest.raises(FileNotFoundError, match="another program removed it"):
            ours.remove_unused("draft")
        assert ours.is_in_use("draft")
    else:
        monkeypatch.setattr(shutil, "rmtree", lambda *at, **more: (other_programs_are_faster(), rmtree(*at, **more)))
        assert ours.remove_unused("draft")
        assert filled[0].name == "never", "the other one was told that it is in use"
    filled[0].close()


class RetiresMeanwhile(FailingStore):
    """A store in which another job moves the tag `a` into the trash at the last moment before that is removed."""

    def remove(self, name: str) -> None:
        self._retire(name)
        super().remove(name)

    def remove_empty(self, name: str) -> bool:
        self._retire(name)
        return super().remove_empty(name)

    def _retire(self, name: str) -> None:
        if name == TRASH_NAME and self.inner.has("a"):
            move_to_trash(self.inner, "a")


def test_the_trash_is_not_removed_with_a_tag_that_has_just_come_into_it(tmp_path: Path) -> None:
    """The tag may be read still: it goes when nobody reads it any more."""
    store = LocalStore(str(tmp_path / "root"))
    store.prepare()
    store.make_directory(TRASH_NAME).close()
    made = store.make_directory("a")
    write_file(made, "file", b"bytes")
    made.close()
    reader = store.open("a")
    clean_root(RetiresMeanwhile("root", store, Faults()))
    assert (store.list_names(), store.list_names(TRASH_NAME)) == ([TRASH_NAME], ["a-0"])
    assert read_file(reader, "file") == b"bytes"
    clean_root(store)
    assert read_file(reader, "file") == b"bytes"
    reader.close()
    clean_root(store)
    assert store.list_names() == []


@pytest.mark.parametrize("how", ["made", "opened"])
def test_who_looks_at_the_wrong_moment_does_not_leave_a_directory_unmarked(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking whether a directory is in use takes its lock for an instant, in which its owner cannot mark it."""
    store = LocalStore(str(tmp_path))
    if how == "opened":
        store.make_directory("a").close()
    flock, probes = fcntl.flock, []

    def at_the_wrong_moment(fd: int, operation: int) -> None:
        if len(probes) < 3:  # somebody else has it, three times
            other = os.open(tmp_path / "a", os.O_RDONLY)
            flock(other, fcntl.LOCK_EX)
            probes.append(other)
            try:
                flock(fd, operation)
            finally:
                os.close(other)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", at_the_wrong_moment)
    directory = store.make_directory("a") if how == "made" else store.open("a")
    monkeypatch.undo()
    assert len(probes) == 3
    assert store.is_in_use("a")
    directory.close()
    assert not store.is_in_use("a")


@pytest.mark.parametrize("how", ["rmdir", "unlink"])
def test_a_directory_goes_although_its_user_writes_to_it_meanwhile(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was taken over shows one more sign of life: a file is new, or the one that was listed has another name."""
    directory, call = tmp_path / "lease", getattr(os, how)
    directory.mkdir()
    (directory / "owner.json").touch()
    (directory / "owner.json.new").touch()
    written: list[str] = []

    def meanwhile(path: str, *args: Any, **more: Any) -> None:
        if not written:
            written.append(path)
            (directory / "owner.json.new").touch()
            (directory / "owner.json.new").rename(directory / "owner.json")
        call(path, *args, **more)

    monkeypatch.setattr(os, how, meanwhile)
    LocalStore(str(tmp_path)).remove("lease")
    assert written
    assert not directory.exists()
