"""Threads, where there may be no further one to be had, and the end of the interpreter, which waits for them."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

from xla_ckpt.storage.undisturbed import undisturbed

# Saves need thread pools, and the interpreter closes those before it joins threads or runs atexit functions; only this
# hook, the one that concurrent.futures itself uses, runs before.
before_threads_end: Callable[[Callable[[], object]], object] = getattr(threading, "_register_atexit", atexit.register)
"""Register a function that the interpreter calls at its end, while there are threads; the last one first.

RuntimeError if `interpreter_is_ending`.
"""


def interpreter_is_ending() -> bool:
    """Return whether the main thread has ended: nothing may wait for a thread that starts now.

    So it is in functions of `atexit`, and in threads that outlive the main one.
    """
    return bool(getattr(threading, "_SHUTTING_DOWN", False))


def is_thread_running(thread: threading.Thread) -> bool:
    """Return whether a thread runs in this process.

    A signal handler that raises within `threading.Thread.is_alive` makes Python 3.11 and 3.12 take a running thread for
    an ended one, for good.
    """
    return thread in threading.enumerate()


def started(work: Callable[[], object], name: str, *, daemon: bool = True) -> threading.Thread | None:
    """Start a thread; None if there is none to be had. Then its work has to be done without it.

    So it is where the system refuses further threads, and in Python 3.12 from the end of the main thread on. A save in
    flight would fail then, and the program would have ended well.
    """
    thread = threading.Thread(target=work, name=name, daemon=daemon)
    try:
        with undisturbed():  # a start that is interrupted does not say whether the thread runs
            thread.start()
    except RuntimeError:
        return None
    return thread
