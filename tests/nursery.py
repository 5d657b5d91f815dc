"""Where the processes of the tests are born: forked from a process that has imported what they all import.

A rank is a process of its own, as under torchrun; only its imports, which take longer than most tests do, lie before.
There are two such nurseries, and the second has torch_xla: a process without it must not seem to use it.
Nothing else is done before the fork: no thread runs, no device is open.

    python -m tests.nursery FD MODULE ...    is such a process; it ends when the test process does.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import os
import pickle
import pkgutil
import random
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from tests.helper import Prepared
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
TRAINERS = ("transformers", "lightning", "torchtitan")
"""What modules of xla_ckpt.integrations import: programs that use them have imported it anyway."""

_MESSAGE = 1 << 17

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


def function_of(module: str, name: str) -> Callable[..., Any]:
    """A function, in a process that is to call it."""
    had = "torch_xla" in sys.modules
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    if not had and "torch_xla" in sys.modules and _MODULES:
        # It would take two seconds in every process, and the test would not see what works without.
        raise ProcessError(
            f"{module} imports torch_xla: say xla=True, or import it inside of the functions that use it"
        )
    return found


_MODULES: list[str] = []
"""What the nursery that this process was born in has imported."""


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
                said = self._line.recv(_MESSAGE)
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


def bear(
    what: Program | Call, *, env: Mapping[str, str] | None = None, xla: bool = False, live: bool = False,
    cwd: str | os.PathLike[str] | None = None, end: End = "soon",
) -> Born:  # fmt: skip
    """Start a process.

    Args:
        what: The program, or the call, that it runs.
        env: Its whole environment.
        xla: Whether torch_xla is imported in it from the start.
        live: Whether what it prints can be read while it runs.
        cwd: Where it runs, by default where this process does.
        end: How it ends: "as python", which takes the interpreter down in full and half a second for it; "soon", when
            it has joined its threads, called its exit handlers and flushed; "at once", where these would wait for
            others that are out of reach.
    """
    if xla and not HAS_XLA:
        raise NurseryError("torch_xla is not installed, and this process would begin with it: mark the test with xla")
    return _nursery(WITH_XLA if xla else LIGHT).bear(_request(what, env, cwd, end), live)


def bear_elsewhere(python: str, call: Call, env: Mapping[str, str]) -> Born:
    """Start a process of another interpreter, named as it is from the checkout, with `env` as its whole environment.

    Raises OSError if there is no such interpreter.
    """
    return _nursery(LIGHT, python).bear(_request(call, env, None, "soon"), live=False)


def _request(
    what: Program | Call, env: Mapping[str, str] | None, cwd: str | os.PathLike[str] | None, end: End
) -> bytes:
    place = {"env": environment() if env is None else dict(env), "cwd": str(cwd or os.getcwd())}
    return pickle.dumps({"what": what, **place, "end": end})


class _Nursery:
    """A process that forks on request."""

    def __init__(self, modules: tuple[str, ...], python: str = sys.executable) -> None:
        self._modules = modules
        self._door, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._over: str | None = None
        with its:
            command = [python, "-m", "tests.nursery", str(its.fileno()), *modules]
            env = environment({"OMP_NUM_THREADS": "1"})
            try:
                self._process = subprocess.Popen(
                    command, pass_fds=[its.fileno()], env=env, cwd=ROOT, stderr=self._errors.fileno()
                )
            except OSError:  # there is no such interpreter
                self._door.close()
                self._errors.close()
                raise

    def bear(self, request: bytes, live: bool) -> Born:
        """Have a process forked."""
        if self._over is not None:
            raise NurseryError(self._over)
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        out, err = (tempfile.TemporaryFile("w+", errors="replace") for _ in range(2))  # noqa: SIM115
        outcome = tempfile.TemporaryFile("w+b")  # noqa: SIM115
        printed = out.fileno()
        if live:
            out.close()
            end, printed = os.pipe()
            out = open(end, errors="replace")  # noqa: SIM115
        said = b""
        try:
            with its:
                socket.send_fds(self._door, [request], [its.fileno(), printed, err.fileno(), outcome.fileno()])
            said = mine.recv(_MESSAGE)
        except ConnectionError:  # it has ended; what follows says why
            pass
        finally:
            if live:
                os.close(printed)
            if not said:
                for file in (mine, out, err, outcome):
                    file.close()
        if not said:
            raise NurseryError(self._why())
        return Born(mine, int(json.loads(said)), out, err, outcome)

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
        self._door.close()
        self._errors.close()
        return self._over

    def _printed(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-4000:]


@functools.cache
def _nursery(modules: tuple[str, ...], python: str = sys.executable) -> _Nursery:
    return _Nursery(modules, python)


# --- in the nursery ------------------------------------------------------------------------------------------------


def _serve(door: socket.socket) -> dict[str, Any] | None:
    """Fork for every request; returns the request in the process that has to run it, None when all is over."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, descriptors, _, _ = socket.recv_fds(door, _MESSAGE, 4)
        if not message:
            return None
        if os.fork() == 0:
            door.close()
            return _nursed(message, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _nursed(message: bytes, line: int, out: int, err: int, outcome: int) -> dict[str, Any]:
    """Fork once more: one process runs the program, and its parent tells its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid:
        for descriptor in (out, err, outcome):
            os.close(descriptor)
        with socket.socket(fileno=line) as told:
            told.send(json.dumps(pid).encode())
            _, status = os.waitpid(pid, 0)
            told.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    os.close(line)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    return {**pickle.loads(message), "outcome": outcome}


def _run(request: dict[str, Any]) -> None:
    """Do what was asked for, and end."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    random.seed()
    importlib.import_module("numpy").random.seed()
    faulthandler.enable()  # SIGABRT shows where a program hangs
    what = request["what"]
    Prepared.prepare()
    if request["end"] == "as python":
        gc.unfreeze()  # triton's bindings complain of what is never collected
        _do(what, request["outcome"])
        return
    try:
        _do(what, request["outcome"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    if request["end"] == "soon":
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _do(what: Program | Call, outcome: int) -> None:
    if isinstance(what, Call):
        with open(outcome, "wb") as file:
            try:
                file.write(pickle.dumps(("value", what())))
            except Exception as error:
                file.write(_as_bytes(error))
                raise
        return
    os.close(outcome)
    sys.argv = [what.name, *what.args]
    if os.path.dirname(what.name):
        sys.path.insert(0, os.path.dirname(os.path.abspath(what.name)))
    main = types.ModuleType("__main__")
    main.__dict__["__file__"] = what.name
    sys.modules["__main__"] = main
    exec(compile(what.code, what.name, "exec"), main.__dict__)


def _as_bytes(error: Exception) -> bytes:
    """An exception in a form that can travel; some cannot be pickled, and some cannot be unpickled."""
    try:
        data = pickle.dumps(("error", error))
        pickle.loads(data)
    except Exception:  # whatever its own methods raise
        return pickle.dumps(("error", ProcessError(f"{type(error).__name__}: {error}")))
    return data


def _import_all(modules: Sequence[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    # What the library loads on first use would be compiled anew in every process, where no bytecode is kept.
    for package in ("xla_ckpt", "neuron_compat"):
        if package in modules:
            for name in _parts(package):
                importlib.import_module(name)
    assert ("torch_xla" in modules) == ("torch_xla" in sys.modules)
    assert threading.active_count() == 1, "a process with threads must not fork"


def _parts(package: str) -> list[str]:
    """The modules of a package, without those that cannot be imported, or load what its users can do without."""
    found = []
    for info in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        file = Path(str(info.module_finder.path), info.name.rpartition(".")[2] + ".py")  # type: ignore[union-attr]
        text = file.read_text() if file.exists() else ""  # a package's file has another name
        if "\nabsent(__name__" in text:
            continue  # to import it is an error
        needs = re.findall(rf"^(?:import|from) (torch_xla|orbax|{'|'.join(TRAINERS)})", text, re.MULTILINE)
        if not {"orbax", *TRAINERS} & {*needs} and ("torch_xla" not in needs or "torch_xla" in sys.modules):
            found.append(info.name)
    return found


def main(descriptor: int, modules: Sequence[str]) -> None:
    """Be a nursery."""
    _MODULES.extend(modules)
    _import_all(modules)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch's, which take its operators apart one by one when the process ends
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=descriptor) as door:
        request = _serve(door)
    if request is not None:
        _run(request)


if __name__ == "__main__":
    # The module of this name, and not this one, is what requests refer to.
    importlib.import_module("tests.nursery").main(int(sys.argv[1]), sys.argv[2:])
