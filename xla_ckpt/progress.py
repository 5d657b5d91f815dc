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
"""Delay before a bar appears, in seconds."""

_NOTEBOOK = "ipykernel"
"""Module that is loaded when a notebook runs the program. Its standard error is not a terminal, but can show bars."""


class _BarStream:
    """Standard error as the stream of a bar: a failed write ends the bar, and not the call.

    tqdm never releases its locks if its stream fails.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self._failed = stream, False
        self.encoding = getattr(stream, "encoding", None) or "ascii"

    def fileno(self) -> int:
        """Return the file descriptor, from which the width of the terminal is determined."""
        return int(self._stream.fileno())

    def write(self, text: str) -> None:
        """Write to the stream, unless a write has failed before."""
        if self._failed:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError, AttributeError) as error:
            self._failed = True
            logger.warning("a progress bar cannot be shown: %s: %s", type(error).__name__, error)

    def flush(self) -> None:
        """Do nothing, because `write` flushes."""


class ProgressBar:
    """Progress bar for bytes, shown if the work takes longer than a second on a terminal or in a notebook.

    Args:
        label: Label of the bar.
        total: Total number of bytes.
        enabled: True shows a bar from the start, False never; None decides automatically.
    """

    def __init__(self, label: str, total: int, enabled: bool | None) -> None:
        self._label, self._total = make_printable(label), total
        shown = is_terminal(sys.stderr) or _NOTEBOOK in sys.modules if enabled is None else enabled
        self._enabled = shown and sys.stderr is not None  # closed streams are None in Python
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
        # tqdm.auto would warn in a notebook without ipywidgets, and use a text bar then.
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
    """Context of an I/O operation: its worker threads, progress callback and phase recorder."""

    workers: int = READ_THREADS
    """Maximum number of threads that read or write."""

    progress: Callable[[int], None] = lambda _: None
    """Callback for the number of bytes that were just processed, called from any thread."""

    phases: PhaseRecorder = field(default_factory=PhaseRecorder)
    """Recorder of the time spent."""
