"""Where the ranks of the tests' jobs are born: forked from a process that has imported what they all import.

A rank is a process of its own, as under torchrun; only its imports, which take longer than most tests do, lie before.
Programs that name torch_xla are forked from a second process, that has it: one that has not must not seem to use it.
Nothing else is done before the fork: no thread runs, no device is open.

    python -m tests.nursery FD MODULE ...    is such a process; it ends when the test process does.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from typing import IO, Any

from tests.runs import ROOT, environment

_LIGHT = ("torch", "torch._dynamo", "torch.distributed.tensor", "numpy", "orbax.checkpoint", "xla_ckpt")
_WITH_XLA = (*_LIGHT, "torch_xla", "torch_xla.core.xla_model", "torch_xla.runtime", "torch_xla.utils.serialization")
_MESSAGE = 1 << 17


class Born:
    """A running program, with what `subprocess.Popen` has for it."""

    def __init__(self, line: socket.socket, pid: int, out: IO[str], err: IO[str]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = out
        """What it prints: with `live` to be read while it runs."""
        self._line, self._files = line, (out, err)
        self._told = "", ""

    def fileno(self) -> int:
        """Readable when it has ended."""
        return self._line.fileno()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; what it printed."""
        if self.returncode is None:
            self._line.settimeout(timeout)
            try:
                self.returncode = int(json.loads(self._line.recv(_MESSAGE)))
            except TimeoutError:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0) from None
            self._line.close()
            for file in self._files:
                if file.seekable():
                    file.seek(0)
            self._told = self._files[0].read(), self._files[1].read()
            for file in self._files:
                file.close()
        return self._told

    def send_signal(self, number: int) -> None:
        """Signal it, if it has not ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def bear(
    code: str, args: Sequence[object], env: Mapping[str, str], name: str = "<program>", *, live: bool = False
) -> Born:
    """Start a python program of its own; `env` is its whole environment."""
    door = _door(_WITH_XLA if "torch_xla" in code else _LIGHT)
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    out, err = (tempfile.TemporaryFile("w+", errors="replace") for _ in range(2))  # noqa: SIM115
    printed = out.fileno()
    if live:
        out.close()
        end, printed = os.pipe()
        out = open(end, errors="replace")  # noqa: SIM115
    request = {"code": code, "argv": [name, *map(str, args)], "env": dict(env), "cwd": os.getcwd()}
    with its:
        socket.send_fds(door, [json.dumps(request).encode()], [its.fileno(), printed, err.fileno()])
    if live:
        os.close(printed)
    return Born(mine, int(json.loads(mine.recv(_MESSAGE))), out, err)


_NURSERIES: list[subprocess.Popen[bytes]] = []


@functools.cache
def _door(modules: tuple[str, ...]) -> socket.socket:
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        command = [sys.executable, "-m", "tests.nursery", str(its.fileno()), *modules]
        env = environment({"OMP_NUM_THREADS": "1"})
        _NURSERIES.append(subprocess.Popen(command, pass_fds=[its.fileno()], env=env, cwd=ROOT))
    return mine


def _serve(door: socket.socket) -> dict[str, Any] | None:
    """Fork for every request; returns the request in the process that has to run it, None when all is over."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, descriptors, _, _ = socket.recv_fds(door, _MESSAGE, 3)
        if not message:
            return None
        if os.fork() == 0:
            door.close()
            return _nursed(json.loads(message), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _nursed(request: dict[str, Any], line: int, out: int, err: int) -> dict[str, Any]:
    """Fork once more: one process runs the program, and its parent tells its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid:
        os.close(out)
        os.close(err)
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
    return request


def _run(request: dict[str, Any]) -> None:
    """Run a program as `python program` does."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv = request["argv"]
    random.seed()
    importlib.import_module("numpy").random.seed()
    faulthandler.enable()  # SIGABRT shows where a program hangs
    main = types.ModuleType("__main__")
    main.__dict__["__file__"] = sys.argv[0]
    sys.modules["__main__"] = main
    exec(compile(request["code"], sys.argv[0], "exec"), main.__dict__)


if __name__ == "__main__":
    for _module in sys.argv[2:]:
        importlib.import_module(_module)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as _socket:
        _request = _serve(_socket)
    if _request is not None:
        _run(_request)
