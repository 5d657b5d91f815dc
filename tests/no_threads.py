"""A process that gets no thread after that of a save: Python 3.12 refuses them once the main thread ends."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

TOO_LARGE = 1 << 47
"""Bytes of a stack that no process has room for: the system refuses each thread with it."""


@contextlib.contextmanager
def no_thread_after_that_of_a_save() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_as_the_last(threading.Thread.start))
        yield
    threading.stack_size(0)


def start_as_the_last(start: Any) -> Any:
    """What starts a thread; and no other one after that of a save."""

    def starting(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.startswith("xla_ckpt-save"):
            threading.stack_size(TOO_LARGE)

    return starting
