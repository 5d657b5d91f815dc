"""What runs in the nurseries of `tests/nursery.py`, and in the processes that are forked there.

A nursery has imported what they all import. Nothing else is done before the fork: no thread runs, no device is open.

    python -m tests.nursed FD MODULE ...    is such a process; it ends when the test process does.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import json
import os
import pickle
import pkgutil
import random
import re
import selectors
import socket
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import helper, nursery
from tests.nursery import MESSAGE, MODULES, TRAINERS, Bears, Call, Commits, ProcessError, Program
from xla_ckpt.tags import orbax_commit


class _Lines:
    """The processes that were forked here and run, each with the line on which its end is told."""

    def __init__(self) -> None:
        self._events = selectors.DefaultSelector()
        self._of: dict[int, tuple[int, socket.socket]] = {}
        """Descriptor of a process -> its number, and its line."""

    def listen(self, door: socket.socket) -> None:
        """Take requests that come through a door."""
        self._events.register(door, selectors.EVENT_READ, door)

    def knocked(self) -> list[socket.socket]:
        """Wait; the doors through which requests have come. The ends of processes are told meanwhile."""
        doors = []
        for key, _ in self._events.select():
            if key.data is not None:
                doors.append(key.data)
                continue
            self._events.unregister(key.fd)
            os.close(key.fd)
            pid, line = self._of.pop(key.fd)
            _tell(line, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            line.close()
        return doors

    def add(self, pid: int, line: socket.socket) -> None:
        """Tell that a process was born, and later how it ended."""
        end = os.pidfd_open(pid)
        self._of[end] = pid, line
        self._events.register(end, selectors.EVENT_READ)
        _tell(line, pid)

    def close(self) -> None:
        """In a forked process, let go of the others: who waits for them hears of it if the nursery is gone."""
        self._events.close()
        for end, (_, line) in self._of.items():
            os.close(end)
            line.close()


def _tell(line: socket.socket, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # who asked is gone, and the processes of others go on
        line.send(json.dumps(number).encode())


def _serve(door: socket.socket) -> dict[str, Any] | None:
    """Fork for every request; returns the request in the process that has to run it, None when all is over.

    Those that are forked here may ask, too, through a door of their own.
    """
    theirs, nursery.DOOR = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lines = _Lines()
    lines.listen(door)
    lines.listen(theirs)
    while True:
        for knocked in lines.knocked():
            message, descriptors, _, _ = socket.recv_fds(knocked, MESSAGE, 4)
            if not message:
                return None
            line, *files = descriptors
            pid = os.fork()
            if pid == 0:
                for other in (door, theirs):
                    other.close()
                lines.close()
                os.close(line)
                return _begun(message, *files)
            for file in files:
                os.close(file)
            lines.add(pid, socket.socket(fileno=line))


def _begun(message: bytes, out: int, err: int, outcome: int) -> dict[str, Any]:
    """In the process that was forked: what it has to do."""
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
    if os.environ.get("NEURON_COMPAT_EMULATE") and "neuron_compat" in sys.modules:
        importlib.reload(sys.modules["neuron_compat"])  # what its import does in this environment
    what = request["what"]
    orbax_commit.HelperProcess = helper.FromNursery  # type: ignore[attr-defined]
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


def _do(what: Program | Call | Commits, outcome: int) -> None:
    if isinstance(what, Commits):
        helper.commit(socket.socket(fileno=outcome))
        return
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


def import_all(modules: Sequence[str]) -> None:
    """Import modules, and all of a package of ours that is among them."""
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
    """Be a nursery, and in each process that is forked here what was asked for, which may be another nursery."""
    request: dict[str, Any] | None = {"what": Bears(tuple(modules)), "outcome": descriptor}
    while request is not None and isinstance(request["what"], Bears):
        request = _nurse(request["outcome"], request["what"].modules)
    if request is not None:
        _run(request)


def _nurse(descriptor: int, modules: Sequence[str]) -> dict[str, Any] | None:
    """Be a nursery, as `_serve` is, when all is imported."""
    MODULES[:] = modules
    gc.disable()  # hardly anything that an import makes is garbage, and looking for it takes a seventh of the time
    import_all(modules)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch's, which take its operators apart one by one when the process ends
    gc.collect()
    gc.freeze()
    gc.enable()
    with socket.socket(fileno=descriptor) as door:
        return _serve(door)


if __name__ == "__main__":
    # The module of this name, and not this one, is what requests refer to.
    importlib.import_module("tests.nursed").main(int(sys.argv[1]), sys.argv[2:])
