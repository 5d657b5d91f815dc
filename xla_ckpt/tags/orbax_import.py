"""orbax's import, on a thread of its own: it takes about a second, and the first commit of a process needs it.

Importing any module of orbax's imports all of ``orbax.checkpoint`` and of jax, so there is nothing smaller to import.
It begins when a save is to be expected: on rank 0, after a load, after a look for the newest tag, or with the first
save. The import holds the interpreter's lock most of the time. So it rests while a caller waits for a save to freeze
its state, and is given up between two modules when the program ends.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import functools
import importlib.abc
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from xla_ckpt.storage.undisturbed import undisturbed

logger = logging.getLogger(__name__)

REST = 1.0
"""Seconds for which the import rests at a time, at most. Whoever it rests for may need one of its modules, and without
an end both would wait for ever."""

PATIENCE = 10.0
"""Seconds for which a fork, or another thread that imports the same, waits for the import, at most."""

PACKAGES = ("jax", "jaxlib", "orbax", "tensorstore")
"""What it imports, and other threads may want to import at the same time."""


class _GivenUp(BaseException):
    """The program ends. No module on the way may take it for an error of its own import, so it is no Exception."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """When the import happened, and on which thread."""

    thread: int
    """The identifier that the operating system has for it."""

    thread_name: str
    began: float
    """Begin (s of `time.perf_counter`)."""

    ended: float
    """End (s of `time.perf_counter`)."""


class OrbaxImport:
    """The import of `xla_ckpt.tags.orbax_dir`, in one process. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._module: ModuleType | None = None
        self._error: BaseException | None = None
        self._gate = _Gate()
        self.span: Span | None = None
        """When it happened; None before its end."""

    def begin(self) -> None:
        """Begin with it in the background, unless that has been done."""
        with self._lock:
            if self._thread is not None or self._module is not None:
                return
            # A program that forks meanwhile, as a DataLoader does, would leave the locks of half-imported modules held
            # in its child, for ever.
            os.register_at_fork(before=self._before_fork)
            # Not a daemon: the interpreter must not end under a thread that loads libraries.
            thread = threading.Thread(target=self._run, name="xla_ckpt-import", daemon=False)
            thread.start()
            self._thread = thread

    def begun(self) -> bool:
        """Whether jax is in this process, or will soon be, because of this."""
        return self._thread is not None or self._module is not None

    def module(self) -> ModuleType:
        """`xla_ckpt.tags.orbax_dir`, once it is imported; waits for the background, or imports it here.

        Raises:
            ImportError: orbax cannot be imported, or whatever else its import raises. The next call tries it again.
        """
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()
        with self._lock:
            error, self._error = self._error, None
            if error is not None:
                raise error
            if self._module is None:  # nobody has begun, or a fork has lost the thread that did
                self._module = self._imported()
            return self._module

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """A block during which the import rests, as far as it can."""
        self._gate.close()
        try:
            yield
        finally:
            self._gate.open()

    def give_up(self) -> None:
        """End it, at the end of the program; returns when it has ended."""
        self._gate.given_up = True
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            with self._gate.guarding():
                self._module = self._imported()
        except _GivenUp:
            logger.debug("the program ended before orbax was imported")
        except BaseException as error:
            # Raised by who needs the module.
            self._error = error

    def _imported(self) -> ModuleType:
        began = time.perf_counter()
        _import_jax()
        from xla_ckpt.tags import orbax_dir

        self.span = Span(
            thread=threading.get_native_id(),
            thread_name=threading.current_thread().name,
            began=began,
            ended=time.perf_counter(),
        )
        return orbax_dir

    def _before_fork(self) -> None:
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(PATIENCE)


class _Gate(importlib.abc.MetaPathFinder):
    """What imports pass while the import is going on.

    The importing thread passes `find_spec` before each module, and waits there, or is stopped: the import system asks
    each finder in `sys.meta_path` for each module that is not there yet. This one finds none.
    https://docs.python.org/3/reference/import.html#the-meta-path

    Import statements of other threads wait for the end if they name one of the packages. Python has a lock for each
    module. A thread that imports ``jax.numpy`` holds that one's and wants jax', and this thread has them the other way
    round: Python then has one of the two go on with half a module, and that is an ImportError. So others have to wait
    before they take a lock, which is in ``__import__``: https://docs.python.org/3/library/functions.html#import__
    """

    def __init__(self) -> None:
        self.given_up = False
        self._open = threading.Event()
        self._open.set()
        self._closed_by = 0
        self._lock = threading.Lock()
        self._guarded: int | None = None

    @contextlib.contextmanager
    def guarding(self) -> Iterator[None]:
        """A block in which all imports of this thread pass the gate."""
        own = self._guarded = threading.get_ident()
        # What is there already, or is on the way in another thread, nobody has to wait for.
        absent = frozenset(name for name in PACKAGES if name not in sys.modules)
        import_, ended = builtins.__import__, threading.Event()

        def waiting(name: str, *args: Any, **options: Any) -> ModuleType:
            if name.partition(".")[0] in absent and threading.get_ident() != own and not ended.wait(PATIENCE):
                ended.set()
            return import_(name, *args, **options)

        sys.meta_path.insert(0, self)
        builtins.__import__ = waiting
        try:
            yield
        finally:
            ended.set()
            if builtins.__import__ is waiting:  # else somebody has put another one around it
                builtins.__import__ = import_
            sys.meta_path.remove(self)

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        """Nothing: this thread waits here, or is stopped."""
        if threading.get_ident() == self._guarded:
            if not self._open.wait(REST):
                self._open.set()
            if self.given_up:
                raise _GivenUp

    def close(self) -> None:
        with undisturbed(), self._lock:  # an exception within an event's own methods may keep its lock for ever
            self._closed_by += 1
            self._open.clear()

    def open(self) -> None:
        with undisturbed(), self._lock:
            self._closed_by -= 1
            if not self._closed_by:
                self._open.set()


ORBAX = OrbaxImport()
"""That of this process."""


@functools.cache
def spare_forked_children() -> None:
    """Have processes that the program forks from now on leave jax's client alone when they end. Does it once.

    It is for when jax has opened its platform. The client's destructor waits for its threads, which a forked process
    does not have: a child of `os.fork` that ends by `sys.exit` would wait for ever. So children never destroy it.
    """

    def keep() -> None:
        for client in {device.client for device in sys.modules["jax"].local_devices()}:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))

    os.register_at_fork(after_in_child=keep)


def _import_jax() -> None:
    """Import jax, and have it run on the CPU, unless the program has imported it before.

    orbax asks jax which process this is, and to answer, jax opens all platforms that it may: an accelerator that
    torch_xla holds would be taken from it, or could not be opened. A program that has imported jax uses it itself, and
    keeps its platforms, also beside torch_xla: on the CPU its computations would still run, only slowly. One that has
    imported jax for nothing says so with ``jax.config.update("jax_platforms", "cpu")``.
    """
    found = "jax" in sys.modules
    import jax  # as a whole, and first: another thread may be about to import it

    if not found:
        jax.config.update("jax_platforms", "cpu")
