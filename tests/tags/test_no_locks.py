"""File systems without locks: what may be in use is left alone until it is old."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.runs import names_in
from xla_ckpt.storage import local
from xla_ckpt.storage.base import write_file
from xla_ckpt.storage.local import LocalDirectory, LocalStore
from xla_ckpt.tags.directory_operations import clean_root
from xla_ckpt.tags.directory_root import DirectoryRoot
from xla_ckpt.tags.root import Transaction

UNSUPPORTED = [errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS]


@pytest.fixture(params=UNSUPPORTED, ids=errno.errorcode.__getitem__)
def no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A file system that answers each lock with this error."""

    def refuse(fd: int, how: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)
    local._WARNED_ERRNOS.clear()
    yield request.param
    local._WARNED_ERRNOS.clear()


def put(root: Path, tag: str, value: Any = 0, **options: Any) -> None:
    xla_ckpt.save(root, tag, {"value": value, "w": torch.ones(10)}, **options)
    xla_ckpt.finalize_checkpoint()  # cleaning goes on after the commit


def age(path: Path, seconds: float) -> None:
    """Nothing in this directory has changed for so long."""
    then = time.time() - seconds
    for place in (path, *path.rglob("*")):
        os.utime(place, (then, then))


def begin(root: Path, tag: str) -> Transaction:
    return Transaction(DirectoryRoot(LocalStore(str(root))), tag).begin()


def names(root: Path) -> list[str]:
    return names_in(root)


@pytest.mark.usefixtures("no_locks")
def test_a_save_that_is_alive_is_not_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another job cleans the same root, twice, while this one writes."""
    draft = begin(tmp_path, "a")
    write_file(draft.directory, "model/half", b"x" * 100)
    clean_root(LocalStore(str(tmp_path)))
    clean_root(LocalStore(str(tmp_path)))
    assert draft.directory.list_files().count("model/half") == 1
    write_file(draft.directory, "manifest.json", b"{}")
    draft.seal({})
    draft.commit()
    draft.abort()
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a/model/half").read_bytes() == b"x" * 100
    told = [r.getMessage() for r in caplog.records if "cannot find out whether" in r.getMessage()]
    assert len(told) == 1
    assert str(tmp_path) in told[0]
    assert "60 minutes" in told[0]


@pytest.mark.usefixtures("no_locks")
def test_what_a_killed_save_left_is_removed_when_it_is_old(tmp_path: Path) -> None:
    put(tmp_path, "good")
    left = tmp_path / ".new-b"
    (left / "model").mkdir(parents=True)
    for name in ("first", "second"):
        (left / "model" / name).write_bytes(b"x")
    age(left, local.UNLOCKED_IDLE_SECONDS + 60)
    os.utime(left / "model/second")  # one file is being written
    clean_root(LocalStore(str(tmp_path)))
    assert names(tmp_path) == [".new-b", "good"]
    age(left, local.UNLOCKED_IDLE_SECONDS + 60)
    clean_root(LocalStore(str(tmp_path)))
    assert names(tmp_path) == ["good"]


@pytest.mark.usefixtures("no_locks")
def test_retention_waits_until_a_tag_is_old(tmp_path: Path) -> None:
    for tag in "abc":
        put(tmp_path, tag, num_kept_ckpts=1)
    assert xla_ckpt.list_tags(tmp_path) == ["a", "b", "c"]
    age(tmp_path / "a", local.UNLOCKED_IDLE_SECONDS + 60)
    put(tmp_path, "d", num_kept_ckpts=1)
    assert names(tmp_path) == ["b", "c", "d"]


@pytest.mark.usefixtures("no_locks")
def test_a_tag_is_replaced_while_its_old_versions_are_young(tmp_path: Path) -> None:
    for value in range(4):
        put(tmp_path, "best", value)
        assert xla_ckpt.restore(tmp_path, "best", {"value": None}).tree == {"value": value}
    assert xla_ckpt.list_tags(tmp_path) == ["best"]
    for old in (tmp_path / ".trash").iterdir():
        age(old, local.UNLOCKED_IDLE_SECONDS + 60)
    put(tmp_path, "best", 4)
    left = [*(tmp_path / ".trash").iterdir()]
    assert len(left) == 1  # the version that has just been replaced


@pytest.mark.usefixtures("no_locks")
def test_a_save_that_failed_removes_its_own_directory(tmp_path: Path) -> None:
    draft = begin(tmp_path, "a")
    write_file(draft.directory, "model/half", b"x")
    draft.abort()
    assert names(tmp_path) == []


def test_a_directory_that_cannot_be_opened_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with too many open files: whether it is in use is not known."""
    left = tmp_path / ".new-b"
    left.mkdir()

    def refuse(path: str, *, subpath: str) -> LocalDirectory:
        if subpath == left.name:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return LocalDirectory(path, subpath=subpath)

    with monkeypatch.context() as patch:
        patch.setattr(local, "LocalDirectory", refuse)
        assert LocalStore(str(tmp_path)).is_in_use(left.name)
        clean_root(LocalStore(str(tmp_path)))
    local._WARNED_ERRNOS.clear()
    assert left.is_dir()
    assert not LocalStore(str(tmp_path)).is_in_use(left.name)
    assert not LocalStore(str(tmp_path)).is_in_use("absent")


@pytest.mark.usefixtures("no_locks")
def test_a_job_that_starts_again_saves_the_tag_in_which_it_was_killed(tmp_path: Path) -> None:
    """What the killed save left looks as if it were in use."""
    left = tmp_path / ".new-a" / "model"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"x")
    for value in range(2):
        put(tmp_path, "a", value)
        assert xla_ckpt.restore(tmp_path, "a", {"value": None}).tree == {"value": value}
    assert (left / "half").exists()
    age(tmp_path / ".new-a", local.UNLOCKED_IDLE_SECONDS + 60)
    put(tmp_path, "b")
    assert not left.exists()


def test_a_draft_that_became_a_tag_leaves_the_next_one_alone(tmp_path: Path) -> None:
    """Its name is free as soon as it is committed, and may be taken by another job before it is let go of."""
    store = LocalStore(str(tmp_path))
    first = begin(tmp_path, "a")
    write_file(first.directory, "manifest.json", b"{}")
    first.seal({})
    other = begin(tmp_path, "a")
    assert (first.directory.name, other.directory.name) == (".new-a", ".new-a-1")
    first.commit()
    third = begin(tmp_path, "a")
    assert third.directory.name == ".new-a"
    first.abort()
    assert store.list_names() == [".new-a", ".new-a-1", "a"]
    other.abort()
    third.abort()
    assert store.list_names() == ["a"]
