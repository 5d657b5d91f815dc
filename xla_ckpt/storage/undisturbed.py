"""What must be done whole or not at all, beside the program's signal handlers, which may raise between any two steps.

Python runs them, Ctrl-C's among them, in the main thread alone. What other threads do is never cut in two.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from xla_ckpt.storage.process_state import process_wide

_SIGNALS = tuple(int(number) for number in signal.valid_signals())
"""Asked for once: each time would be 0.2 ms of the 2 ms that the caller of an asynchronous save waits."""


class Undisturbed:
    """A context in which, from `begin` on, signal handlers of the program wait for its end.

    They run then, and what they raise is raised from the context. Whatever is done in it is short and bounded: a person
    who presses Ctrl-C waits for it.
    """

    def __init__(self) -> None:
        self._former: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._came: list[tuple[int, FrameType | None]] = []
        self._early: BaseException | None = None
        """What a handler raised while it was about to be replaced."""
        self._begun = False
        self._thread = threading.get_ident()

    def __enter__(self) -> Undisturbed:
        return self

    def begin(self) -> None:
        """Let handlers wait from now on."""
        ready = False
        while not ready:
            try:
                if threading.current_thread() is threading.main_thread() and _outermost in ([], [self]):
                    _outermost[:] = [self]
                    self._begun = True
                    self._replace()
                ready = True
            except ValueError:  # this interpreter may not set handlers, and so none of its own disturbs it
                ready = True
            except BaseException as raised:
                # Nobody has begun yet what is to be done whole, and who ends something has to come to its end.
                self._early = raised

    def _replace(self) -> None:
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            # Neither the system's own action, nor a handler that is not python's, nor this one.
            if callable(handler) and handler != self._receive:
                self._former[number] = handler
                signal.signal(number, self._receive)

    def __exit__(self, *_: object) -> None:
        if not self._begun:  # what came meanwhile waits for the end of the context around this one
            return
        _outermost.clear()  # handlers that run now may begin one of their own
        with contextlib.ExitStack() as ending:  # each of these is done, although another one raises
            for number, handler in self._former.items():
                if signal.getsignal(number) == self._receive:
                    ending.callback(signal.signal, number, handler)
            ending.callback(self._deliver)
            self._begun = False  # a handler that is not given back yet passes on from here what it receives

    def end_after_fork(self) -> None:
        """In a process that another thread has forked: no block is left whose end handlers could wait for."""
        if self._thread != threading.get_ident():
            self._came.clear()  # the parent handles them
            self.__exit__()

    def _deliver(self) -> None:
        if self._came:
            number, frame = self._came.pop(0)
            try:
                self._former[number](number, frame)
            finally:
                self._deliver()
        early, self._early = self._early, None
        if early is not None:
            raise early

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._begun:
            self._came.append((number, frame))
        else:
            self._former[number](number, frame)


def _reset_after_fork(contexts: list[Undisturbed]) -> None:
    for context in list(contexts):
        context.end_after_fork()


_outermost: list[Undisturbed] = process_wide([], _reset_after_fork)
"""The context in which handlers wait now. It is costly to begin one (0.1 ms), and those within it need no more."""


def comes_from_outside(error: BaseException) -> bool:
    """Return whether an exception, met on this thread, may be one of a signal handler, which its program must get.

    Handlers run in the main thread. What else is no `Exception` is raised by the code that runs: a panic of an
    extension module, or an exit.
    """
    return not isinstance(error, Exception) and threading.current_thread() is threading.main_thread()


def undisturbed() -> Undisturbed:
    """A context in which signal handlers of the program wait."""
    context = Undisturbed()
    context.begin()
    return context
