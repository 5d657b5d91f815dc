"""Progress bars, and the context of an I/O operation: its worker threads, progress callback and phase recorder."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from xla_ckpt.display import is_terminal, make_printable
from xla_ckpt.logs import get_logger
from xla_ckpt.reports import PhaseRecorder
from xla_ckpt.storage.threads import READ_THREADS

logger = get_logger(__name__)

DELAY_SECONDS = 1.0
"""Seconds before a bar appears."""

_NOTEBOOK = "ipykernel"
"""The module that is loaded where a notebook runs the program. Its standard error is no terminal, and shows bars."""


class _BarStream:
    """The standard error, as a bar is written to it: a failure ends the bar, and not the call.

    tqdm keeps its locks for ever if its stream fails.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self._failed = stream, False
        self.encoding = getattr(stream, "encoding", None) or "ascii"

    def fileno(self) -> int:
        """Its descriptor, which says how wide a terminal is."""
        return int(self._stream.fileno())

    def write(self, text: str) -> None:
        """Write to it, unless it has failed before."""
        if self._failed:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError, AttributeError) as error:
            self._failed = True
            logger.warning("a progress bar cannot be shown: %s: %s", type(error).__name__, error)

    def flush(self) -> None:
        """Do nothing: `write` does it."""


class ProgressBar:
    """Counts bytes, and shows a bar when that takes longer than a second on a terminal or in a notebook.

    Args:
        what: Label of the bar.
        total: Bytes to come.
        wanted: True shows a bar from the start, False never; None decides by itself.
    """

    def __init__(self, label: str, total: int, enabled: bool | None) -> None:
        self._label, self._total = make_printable(label), total
        shown = is_terminal(sys.stderr) or _NOTEBOOK in sys.modules if enabled is None else enabled
        self._enabled = shown and sys.stderr is not None  # Python has None for a closed one
        self._show_after = time.monotonic() + (DELAY_SECONDS if enabled is None else 0.0)
        self._lock = threading.Lock()
        self._bar: Any = None
        self.done = 0

    def __call__(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes
            if not self._enabled:
                return
            if self._bar is None and time.monotonic() >= self._show_after:
                self._bar = self._create_bar(self.done - nbytes)
            if self._bar is not None:
                self._bar.update(nbytes)

    def _create_bar(self, done: int) -> Any:
        about = {"desc": self._label, "total": self._total, "unit": "B", "unit_scale": True, "initial": done}
        # tqdm.auto would warn in a notebook without ipywidgets, and take a bar of text then.
        if _NOTEBOOK in sys.modules and importlib.util.find_spec("ipywidgets") is not None:
            return importlib.import_module("tqdm.notebook").tqdm(**about)
        return importlib.import_module("tqdm").tqdm(**about, file=_BarStream(sys.stderr))

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._lock:
            self._enabled = False
            if self._bar is not None:
                self._bar.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class IoContext:
    """How many threads there are, at most, and what hears of their work."""

    workers: int = READ_THREADS
    """Threads that read or write, at most."""

    progress: Callable[[int], None] = lambda _: None
    """Called with the number of bytes that have just been dealt with, from any thread."""

    phases: PhaseRecorder = field(default_factory=PhaseRecorder)
    """Receives what is measured."""
