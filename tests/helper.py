"""The process in which orbax commits, as tests need it: within their own process, or another one that they can find."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from xla_ckpt.storage.helper_process import HelperProcess


class InThread(HelperProcess):
    """It runs on a thread: what a test has put in place of a function concerns it, too."""

    def start(self) -> None:
        from xla_ckpt.tags.orbax_process import create_committer, serve

        def work() -> None:
            with self._child_channel:
                serve(self._child_channel, create_committer())

        threading.Thread(target=work, name="orbax", daemon=True).start()

    def close(self) -> None:
        self._channel.close()
        self._output.close()


class InFork(HelperProcess):
    """It is a fork of this process, which has imported orbax before, and so takes jobs within milliseconds."""

    first: Callable[[], object] = staticmethod(lambda: None)
    """What the fork does first."""

    def start(self) -> None:
        from xla_ckpt.tags.orbax_process import create_committer, serve

        theirs = self._child_channel.dup()  # a fork closes what it has of the parent's
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                self.first()
                with theirs:
                    serve(theirs, create_committer())
                code = 0
            finally:
                os._exit(code)
        theirs.close()
        self._child_channel.close()
        process: Any = _Forked(pid)
        self._process = process


class FromNursery(HelperProcess):
    """It is born where the tests' processes are: there orbax has been imported, which takes seconds."""

    def start(self) -> None:
        from tests.nursery import bear_committer

        process: Any = _Told(*bear_committer(self._child_channel, self._output))
        self._child_channel.close()
        self._process = process

    def close(self) -> None:
        super().close()
        told: Any = self._process
        if isinstance(told, _Told):
            told.line.close()


def commit(channel: socket.socket) -> None:
    """Be such a process."""
    from xla_ckpt.tags import orbax_process

    os.setsid()
    Path("/proc/self/comm").write_text("orbax_process")
    orbax_process.isolate_process()
    with channel:
        orbax_process.serve(channel, orbax_process.create_committer())


class _Told:
    """As much of a `Popen` as is needed, of a process whose end is told on a line."""

    def __init__(self, pid: int, line: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.line = line

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.line.settimeout(timeout)
            try:
                self.returncode = int(self.line.recv(100))
            except (TimeoutError, BlockingIOError):  # the latter where `timeout` is 0
                raise subprocess.TimeoutExpired("a process of a nursery", timeout or 0.0) from None
        return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class _Forked:
    """As much of a `Popen` as is needed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            end = os.pidfd_open(self.pid)
            try:
                if not select.select([end], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            finally:
                os.close(end)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def helpers_of(pid: int) -> list[int]:
    """The processes in which orbax commits for a process."""
    return [child for child in _children(pid) if _is_helper(Path(f"/proc/{child}"))]


def children_of(pid: int) -> list[int]:
    """The other processes that a process has started, or forked."""
    return sorted({*_children(pid)} - {*helpers_of(pid)})


def _is_helper(process: Path) -> bool:
    while not (command := (process / "cmdline").read_bytes()) and is_alive(int(process.name)):
        os.sched_yield()  # for a moment, a process that has just been started has no arguments
    return b"orbax_process" in command + (process / "comm").read_bytes()


def _children(pid: int) -> list[int]:
    """All children of a process, whichever of its threads started them, also if that thread is ending."""
    return [child.pid for child in psutil.Process(pid).children()]


def is_alive(pid: int) -> bool:
    """Whether a process runs, and is no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def come_to_its_end(pid: int) -> None:
    """Wait until a process has ended, which need not be a child of this one."""
    try:
        end = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([end], [], [], 60)[0], f"process {pid} lives on"
    finally:
        os.close(end)
