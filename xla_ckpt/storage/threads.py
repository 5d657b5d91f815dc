"""Threads, where there may be no further one to be had."""

from __future__ import annotations

import threading
from collections.abc import Callable


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
