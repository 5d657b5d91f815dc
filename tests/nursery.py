"""Where the processes of the tests are born: forked from a process that has imported what they all import.

A rank is a process of its own, as under torchrun; only its imports, which take longer than most tests do, lie before.
There are several such nurseries. The others are forked from the first. One of them has torch_xla, too: a process
without it must not seem to use it.
`tests/nursed.py` is what runs in them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any, Literal, Protocol

from tests.runs import ROOT, environment
from tests.xla import HAS_XLA

LIGHT = (
    "torch", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "numpy", "orbax.checkpoint",
    "safetensors.torch", "pytest", "hypothesis", "xla_ckpt",
)  # fmt: skip
WITH_XLA = (
    *LIGHT, "torch_xla", "torch_xla.core.xla_model", "torch_xla.runtime", "torch_xla.utils.serialization",
    "torch_xla.distributed.zero_redundancy_optimizer", "neuron_compat",
)  # fmt: skip
TRAINERS = ("transformers", "lightning", "torchtitan", "torch_checkpointing")
"""What modules of xla_ckpt.integrations import: programs that use them have imported it anyway."""

MESSAGE = 1 << 17

End = Literal["as python", "soon", "at once"]
_SECONDS_TO_END = 10


class NurseryError(RuntimeError):
    """No process can be born any more; says why."""


class ProcessError(RuntimeError):
    """What a process raised, if that cannot travel itself; or how it ended without raising anything."""


@dataclass(frozen=True)
class Program:
    """A python program, run as `python NAME ARGS` runs it."""

    code: str
    args: tuple[str, ...] = ()
    name: str = "<program>"


@dataclass(frozen=True)
class Call:
    """A call of a function that its module's name and its own lead to."""

    module: str
    function: str
    args: bytes
    """The arguments, pickled: they are unpickled where the function's module is there."""

    @classmethod
    def of(cls, function: Callable[..., object], *args: object) -> Call:
        """The call of a function at the top of a module."""
        if function.__qualname__ != function.__name__:
            raise TypeError(f"{function.__qualname__} is not at the top of its module: no other process finds it")
        return cls(function.__module__, function.__name__, pickle.dumps(args))

    def __call__(self) -> object:
        return function_of(self.module, self.function)(*pickle.loads(self.args))


@dataclass(frozen=True)
class Commits:
    """Doing what orbax's process does for another process, which has the other end of a channel."""


@dataclass(frozen=True)
class Bears:
    """Forking others on request of the test process, which has the other end of a door, with more modules."""

    modules: tuple[str, ...]


def function_of(module: str, name: str) -> Callable[..., Any]:
    """A function, in a process that is to call it."""
    had = "torch_xla" in sys.modules
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    if not had and "torch_xla" in sys.modules and MODULES:
        # It would take two seconds in every process, and the test would not see what works without.
        raise ProcessError(
            f"{module} imports torch_xla: say xla=True, or import it inside of the functions that use it"
        )
    return found


MODULES: list[str] = []
"""What the nursery that this process was born in has imported."""

DOOR: socket.socket | None = None
"""To the nursery that this process was born in."""


class Born:
    """A running process, with what `subprocess.Popen` has for it."""

    def __init__(self, line: socket.socket, pid: int, out: IO[str], err: IO[str], outcome: IO[bytes]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = out
        """What it prints: with `live` to be read while it runs."""
        self._line, self._files, self._outcome_file = line, (out, err), outcome
        self._told = "", ""
        self._outcome = b""
        _ALIVE.add(self)

    def fileno(self) -> int:
        """Readable when it has ended."""
        return self._line.fileno()

    def has_ended(self) -> bool:
        """Whether it has ended, now."""
        return self.returncode is not None or bool(select.select([self], [], [], 0)[0])

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; what it printed."""
        if self.returncode is None:
            self._line.settimeout(timeout)
            try:
                said = self._line.recv(MESSAGE)
            except TimeoutError:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0) from None
            if not said:
                self._close()
                raise NurseryError(f"nobody knows how process {self.pid} ended: its parent is gone")
            self.returncode = int(json.loads(said))
            for file in self._files:
                if file.seekable():
                    file.seek(0)
            self._told = self._files[0].read(), self._files[1].read()
            self._outcome_file.seek(0)
            self._outcome = self._outcome_file.read()
            self._close()
        return self._told

    def _close(self) -> None:
        _ALIVE.discard(self)
        self._line.close()
        for file in (*self._files, self._outcome_file):
            file.close()

    def value(self) -> Any:
        """What its function returned, once it has ended; raises what that raised, with all that it printed."""
        outcome: tuple[str, Any] = pickle.loads(self._outcome) if self._outcome else ("ended", None)
        kind, value = outcome
        if kind == "value" and self.returncode == 0:
            return value
        error: Exception = value if kind == "error" else ProcessError(f"it ended with exit code {self.returncode}")
        out, err = self._told
        error.add_note(f"--- stdout\n{out[-8000:]}\n--- stderr\n{err[-8000:]}")
        raise error

    def send_signal(self, number: int) -> None:
        """Signal it, if it has not ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has, and nobody has waited for it yet
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


_ALIVE: set[Born] = set()


def end_all() -> None:
    """Kill what a test has left: its pipes would otherwise be reported by another test."""
    for born in list(_ALIVE):
        born.kill()
        born.communicate()


def begin() -> None:
    """Start to import what processes are born with, and do not wait for it."""
    _nursery()


def bear(
    what: Program | Call, *, env: Mapping[str, str] | None = None, xla: bool = False, also: tuple[str, ...] = (),
    live: bool = False, cwd: str | os.PathLike[str] | None = None, end: End = "soon",
) -> Born:  # fmt: skip
    """Start a process.

    Args:
        what: The program, or the call, that it runs.
        env: Its whole environment.
        xla: Whether torch_xla is imported in it from the start.
        also: Other modules that are, without torch_xla: what several programs import, and takes seconds.
        live: Whether what it prints can be read while it runs.
        cwd: Where it runs, by default where this process does.
        end: How it ends: "as python", which takes the interpreter down in full and half a second for it; "soon", when
            it has joined its threads, called its exit handlers and flushed; "at once", where these would wait for
            others that are out of reach.
    """
    if xla and not HAS_XLA:
        raise NurseryError("torch_xla is not installed, and this process would begin with it: mark the test with xla")
    nursery = _forked(WITH_XLA) if xla else _forked((*LIGHT, *also)) if also else _nursery()
    return nursery.bear(_request(what, env, cwd, end), live)


def bear_elsewhere(python: str, call: Call, env: Mapping[str, str]) -> Born:
    """Start a process of another interpreter, named as it is from the checkout, with `env` as its whole environment.

    Raises OSError if there is no such interpreter.
    """
    return _nursery(python).bear(_request(call, env, None, "soon"), live=False)


def bear_committer(channel: socket.socket, output: IO[bytes]) -> tuple[int, socket.socket]:
    """Start a process in which orbax commits: its number, and the line on which its end is told.

    It is born where this process was, or where those without torch_xla are. Raises OSError if nobody bears it.
    """
    printed = output.fileno()
    request = _request(Commits(), None, None, "at once")
    line, pid = _ask(DOOR or _nursery().door, request, printed, printed, channel.fileno())
    if pid is None:
        raise ConnectionResetError("the nursery has ended")
    return pid, line


def _ask(door: socket.socket, request: bytes, out: int, err: int, outcome: int) -> tuple[socket.socket, int | None]:
    """Have a process forked: the line on which its end is told, and its number; None if the nursery has ended."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    said = b""
    try:
        with its:
            socket.send_fds(door, [request], [its.fileno(), out, err, outcome])
        said = mine.recv(MESSAGE)
    except ConnectionError:
        pass
    finally:
        if not said:
            mine.close()
    return mine, int(json.loads(said)) if said else None


def _request(
    what: Program | Call | Commits | Bears, env: Mapping[str, str] | None, cwd: str | os.PathLike[str] | None, end: End
) -> bytes:
    place = {"env": environment() if env is None else dict(env), "cwd": str(cwd or os.getcwd())}
    return pickle.dumps({"what": what, **place, "end": end})


class _Waited(Protocol):
    """A process that can be waited for, as `subprocess.Popen` has it."""

    def wait(self, timeout: float | None = None) -> int: ...


class _Forked:
    """A process that a nursery has forked, with the line on which its end is told."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; raises subprocess.TimeoutExpired, or NurseryError if nobody knows it."""
        self._line.settimeout(timeout)
        try:
            said = self._line.recv(MESSAGE)
        except TimeoutError:
            raise subprocess.TimeoutExpired("a nursery", timeout or 0) from None
        self._line.close()
        if not said:
            raise NurseryError("the process from which the tests fork others has ended, and so has its parent")
        return int(json.loads(said))


class _Nursery:
    """A process that forks on request."""

    def __init__(self, modules: tuple[str, ...], start: Callable[[int, int, tuple[str, ...]], _Waited]) -> None:
        self._modules = modules
        self.door, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._over: str | None = None
        with its:
            try:
                self._process = start(its.fileno(), self._errors.fileno(), modules)
            except (OSError, NurseryError):  # there is no such interpreter, or no nursery to fork it from
                self.door.close()
                self._errors.close()
                raise

    def fork(self, door: int, errors: int, modules: tuple[str, ...]) -> _Waited:
        """Have a nursery forked that imports more modules."""
        line, _ = self._fork(_request(Bears(modules), None, None, "at once"), errors, errors, door)
        return _Forked(line)

    def bear(self, request: bytes, live: bool) -> Born:
        """Have a process forked."""
        out, err = (tempfile.TemporaryFile("w+", errors="replace") for _ in range(2))  # noqa: SIM115
        outcome = tempfile.TemporaryFile("w+b")  # noqa: SIM115
        printed = out.fileno()
        if live:
            out.close()
            end, printed = os.pipe()
            out = open(end, errors="replace")  # noqa: SIM115
        try:
            line, pid = self._fork(request, printed, err.fileno(), outcome.fileno())
        except BaseException:
            for file in (out, err, outcome):
                file.close()
            raise
        finally:
            if live:
                os.close(printed)
        return Born(line, pid, out, err, outcome)

    def _fork(self, request: bytes, out: int, err: int, outcome: int) -> tuple[socket.socket, int]:
        if self._over is not None:
            raise NurseryError(self._over)
        line, pid = _ask(self.door, request, out, err, outcome)
        if pid is None:
            raise NurseryError(self._why())
        return line, pid

    def _why(self) -> str:
        """What keeps it from forking; if it has ended it is not asked again."""
        try:
            code = self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            return f"the process from which the tests fork others lives, but cannot fork\n{self._printed()}"
        self._over = (
            f"the process from which the tests fork others has ended with exit code {code}. "
            f"It imports {', '.join(self._modules)}.\n{self._printed()}"
        )
        self.door.close()
        self._errors.close()
        return self._over

    def _printed(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-4000:]


def _of_python(python: str, door: int, errors: int, modules: tuple[str, ...]) -> _Waited:
    """Start a nursery from nothing."""
    command = [python, "-m", "tests.nursed", str(door), *modules]
    env = environment({"OMP_NUM_THREADS": "1"})
    return subprocess.Popen(command, pass_fds=[door], env=env, cwd=ROOT, stderr=errors)


@functools.cache
def _nursery(python: str = sys.executable) -> _Nursery:
    return _Nursery(LIGHT, functools.partial(_of_python, python))


@functools.cache
def _forked(modules: tuple[str, ...]) -> _Nursery:
    return _Nursery(modules, _nursery().fork)
