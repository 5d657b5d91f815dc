"""Locks of directories, where a process forks while it has them: a data loader's worker, or any other program."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.jobs import run_alone
from xla_ckpt.storage.base import Directory
from xla_ckpt.storage.local import LocalDirectory
from xla_ckpt.storage.resolve import open_store


@pytest.mark.parametrize("writes", [False, True])
def test_a_child_does_not_keep_the_lock_of_a_directory_that_its_parent_has_closed(tmp_path: Path, writes: bool) -> None:
    store = open_store(tmp_path)
    store.make_directory("a").close()
    directory: Directory = store.make_directory("b") if writes else store.open("a")
    assert isinstance(directory, LocalDirectory)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[directory.fd]):
        assert store.is_in_use(directory.name)
        directory.close()
        assert not store.is_in_use(directory.name)


def closes_what_its_parent_has_open(root: Path) -> tuple[int, bool, bool]:
    store = open_store(root)
    store.make_directory("a").close()
    directory = store.open("a")
    if (child := os.fork()) == 0:
        directory.close()
        os._exit(7)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    held = store.is_in_use("a")
    directory.close()
    return ended, held, store.is_in_use("a")


def test_a_child_that_closes_a_directory_leaves_its_parent_the_lock(tmp_path: Path) -> None:
    assert run_alone(closes_what_its_parent_has_open, tmp_path) == (7, True, False)
