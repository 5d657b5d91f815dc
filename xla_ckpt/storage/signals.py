"""Critical sections that defer Python signal handlers.

Handlers run only in the main thread and may raise between any two instructions. Within `defer_signals` they are
queued, and run when the block ends.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from xla_ckpt.storage.process_state import register_fork_reset

_SIGNALS = tuple(int(number) for number in signal.valid_signals())
"""Asked for once: each time would be 0.2 ms of the 2 ms that the caller of an asynchronous save waits."""


class DeferSignals:
    """A context in which, from `begin` on, signal handlers of the program wait for its end.

    They run then, and what they raise is raised from the context. Whatever is done in it is short and bounded: a person
    who presses Ctrl-C waits for it.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._pending: list[tuple[int, FrameType | None]] = []
        self._early_error: BaseException | None = None
        """What a handler raised while it was about to be replaced."""
        self._is_active = False
        self._thread = threading.get_ident()

    def __enter__(self) -> DeferSignals:
        return self

    def begin(self) -> None:
        """Let handlers wait from now on."""
        ready = False
        while not ready:
            try:
                if threading.current_thread() is threading.main_thread() and _outermost in ([], [self]):
                    _outermost[:] = [self]
                    self._is_active = True
                    self._install_handlers()
                ready = True
            except ValueError:  # this interpreter may not set handlers, and so none of its own disturbs it
                ready = True
            except BaseException as raised:
                # Nobody has begun yet what is to be done whole, and who ends something has to come to its end.
                self._early_error = raised

    def _install_handlers(self) -> None:
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            # Neither the system's own action, nor a handler that is not python's, nor this one.
            if callable(handler) and handler != self._receive:
                self._handlers[number] = handler
                signal.signal(number, self._receive)

    def __exit__(self, *_: object) -> None:
        if not self._is_active:  # what came meanwhile waits for the end of the context around this one
            return
        _outermost.clear()  # handlers that run now may begin one of their own
        with contextlib.ExitStack() as ending:  # each of these is done, although another one raises
            for number, handler in self._handlers.items():
                if signal.getsignal(number) == self._receive:
                    ending.callback(signal.signal, number, handler)
            ending.callback(self._deliver)
            self._is_active = False  # a handler that is not given back yet passes on from here what it receives

    def end_after_fork(self) -> None:
        """In a process that another thread has forked: no block is left whose end handlers could wait for."""
        if self._thread != threading.get_ident():
            self._pending.clear()  # the parent handles them
            self.__exit__()

    def _deliver(self) -> None:
        if self._pending:
            number, frame = self._pending.pop(0)
            try:
                self._handlers[number](number, frame)
            finally:
                self._deliver()
        early, self._early_error = self._early_error, None
        if early is not None:
            raise early

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._is_active:
            self._pending.append((number, frame))
        else:
            self._handlers[number](number, frame)


def _reset_after_fork(contexts: list[DeferSignals]) -> None:
    for context in list(contexts):
        context.end_after_fork()


_outermost: list[DeferSignals] = register_fork_reset([], _reset_after_fork)
"""The context in which handlers wait now. It is costly to begin one (0.1 ms), and those within it need no more."""


def is_from_signal_handler(error: BaseException) -> bool:
    """Return whether an exception, met on this thread, may be one of a signal handler, which its program must get.

    Handlers run in the main thread. What else is no `Exception` is raised by the code that runs: a panic of an
    extension module, or an exit.
    """
    return not isinstance(error, Exception) and threading.current_thread() is threading.main_thread()


def defer_signals() -> DeferSignals:
    """A context in which signal handlers of the program wait."""
    context = DeferSignals()
    context.begin()
    return context
