"""Threads, where there may be no further one to be had, and what is done before they are ended."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

# Saves need thread pools, and the interpreter closes those before it joins threads or runs atexit functions; only this
# hook, the one that concurrent.futures itself uses, runs before.
before_threads_end: Callable[[Callable[[], object]], object] = getattr(threading, "_register_atexit", atexit.register)
"""Have the interpreter do something at its end, while there are threads; what was said last, first."""


def started(work: Callable[[], object], name: str, *, daemon: bool = True) -> threading.Thread | None:
    """Start a thread; None if there is none to be had. Then its work has to be done without it.

    So it is where the system refuses further threads, and in Python 3.12 from the end of the main thread on. A save in
    flight would fail then, and the program would have ended well.
    """
    thread = threading.Thread(target=work, name=name, daemon=daemon)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread
