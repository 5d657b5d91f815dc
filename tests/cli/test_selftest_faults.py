"""``xla-ckpt selftest`` where system calls fail, and on a disk that is full: what it says is true."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runs import environment, names_in

PROGRAM = """
import sys
from xla_ckpt.cli.main import main
from xla_ckpt.cli.selftest import device_checks, storage_checks
storage_checks.KILL_FRACTIONS = (0.5,)
del device_checks.DEVICE_CHECKS[1:]
sys.exit(main())
"""
"""The command, which kills one save only, and looks at the devices of torch alone."""

SELFTEST = [sys.executable, "-c", PROGRAM, "selftest", "--json"]


def checked(command: list[str], root: Path) -> tuple[dict[str, Any], str]:
    """What each check of a selftest says, and the errors that it prints."""
    done = subprocess.run([*command, str(root)], capture_output=True, text=True, env=environment(), check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return {answer["check"]: answer for answer in json.loads(done.stdout)["checks"]}, done.stderr


def faulty(tmp_path: Path, call: str, error: str, when: str) -> tuple[dict[str, Any], str]:
    """The same, while some of a system call's calls in each thread fail, by strace."""
    if shutil.which("strace") is None:
        pytest.skip("there is no strace")
    if subprocess.run(["strace", "-o", "/dev/null", "true"], check=False, capture_output=True).returncode:
        pytest.skip("strace may not trace here")
    (tmp_path / "root").mkdir()
    trace = tmp_path / "trace"
    strace = ["strace", "-f", "--seccomp-bpf", "-qq", "-o", str(trace), "-e", f"trace={call}"]
    answers, errors = checked([*strace, "-e", f"inject={call}:error={error}:when={when}", *SELFTEST], tmp_path / "root")
    assert "INJECTED" in trace.read_text()
    return answers, errors


def broken(answers: dict[str, Any]) -> set[str]:
    """The checks whose promises do not hold. That of the fsync does not where the tests run in memory."""
    return {name for name, answer in answers.items() if answer["verdict"] == "does not hold"} - {"fsync"}


@pytest.mark.parametrize(
    ("call", "error", "when", "unseen"),
    [
        ("fsync", "EIO", "3+7", {"rename", "lease", "speed"}),
        ("fsync", "ENOSPC", "3", {"lease"}),  # the process that saves ends
        ("renameat2", "EIO", "1+1", {"rename"}),
    ],
)
def test_calls_that_fail_break_no_promise(tmp_path: Path, call: str, error: str, when: str, unseen: set[str]) -> None:
    answers, _ = faulty(tmp_path, call, error, when)
    assert broken(answers) == set()
    assert unseen <= {name for name, answer in answers.items() if answer["verdict"] == "could not be seen"}
    assert names_in(tmp_path / "root") == []


def test_a_folder_that_stays_is_named(tmp_path: Path) -> None:
    answers, errors = faulty(tmp_path, "unlinkat", "EIO", "1+1")
    assert broken(answers) == set()
    (name,) = names_in(tmp_path / "root")
    assert f"{tmp_path}/root/{name}]. Remove it by hand" in errors


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 MB in memory."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(place)]
    if os.getuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("root is needed to mount a file system")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_small_disk(small_disk: Path) -> None:
    answers, errors = checked(SELFTEST, small_disk)
    assert errors == ""
    assert broken(answers) == {"room"}
    for name in ("bytes", "speed"):
        assert "There was no room" in answers[name]["sentence"]
    assert names_in(small_disk) == []
