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

from xla_ckpt.storage.program import Program


class InThread(Program):
    """It runs on a thread: what a test has put in place of a function concerns it, too."""

    def start(self) -> None:
        from xla_ckpt.tags.orbax_process import committer, serve

        def work() -> None:
            with self._theirs:
                serve(self._theirs, committer())

        threading.Thread(target=work, name="orbax", daemon=True).start()

    def end(self) -> None:
        self._channel.close()
        self._output.close()


class InFork(Program):
    """It is a fork of this process, which has imported orbax before, and so takes jobs within milliseconds."""

    first: Callable[[], object] = staticmethod(lambda: None)
    """What the fork does first."""

    def start(self) -> None:
        from xla_ckpt.tags.orbax_process import committer, serve

        theirs = self._theirs.dup()  # a fork closes what it has of the parent's
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                self.first()
                with theirs:
                    serve(theirs, committer())
                code = 0
            finally:
                os._exit(code)
        theirs.close()
        self._theirs.close()
        process: Any = _Forked(pid)
        self._process = process


class Prepared(Program):
    """It was forked with this process, from one that has imported orbax, and waits: to import it anew takes seconds."""

    waiting: tuple[int, socket.socket, int] | None = None
    """The process for which it waits, the channel to it, and its own number."""

    @classmethod
    def prepare(cls) -> None:
        """Fork it. No thread runs yet."""
        from xla_ckpt.tags import orbax_commit, orbax_process

        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            os.setsid()
            os.closerange(theirs.fileno() + 1, 1 << 10)
            for descriptor in range(3):  # who reads what the program prints does not wait for this process
                os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
            Path("/proc/self/comm").write_text("orbax_process")
            try:
                if theirs.recv(1):
                    orbax_process.be_alone()
                    orbax_process.serve(theirs, orbax_process.committer())
            finally:
                os._exit(0)
        theirs.close()
        cls.waiting = os.getpid(), ours, pid
        orbax_commit.Program = cls  # type: ignore[attr-defined]

    @classmethod
    def dismiss(cls) -> None:
        """Have it end, if it waits: this process is to start one as every program does."""
        from xla_ckpt.tags import orbax_commit

        waiting, cls.waiting = cls.waiting, None
        orbax_commit.Program = Program  # type: ignore[attr-defined]
        if waiting is not None:
            waiting[1].close()
            os.waitpid(waiting[2], 0)

    def start(self) -> None:
        """Wake it up; where there is none any more, start a process as every program does."""
        waiting, Prepared.waiting = Prepared.waiting, None
        if waiting is None or waiting[0] != os.getpid():
            super().start()
            return
        self._channel.close()
        self._theirs.close()
        _, self._channel, pid = waiting
        process: Any = _Forked(pid)
        self._process = process
        self._channel.send(b"!")


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
    return b"orbax_process" in (process / "cmdline").read_bytes() + (process / "comm").read_bytes()


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
