"""A progress bar for saves and loads that take long, on a terminal or in a notebook."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import time
from types import TracebackType
from typing import Any

from xla_ckpt.display import is_terminal, make_printable
from xla_ckpt.logs import get_logger

logger = get_logger(__name__)

DELAY = 1.0
"""Seconds before a bar appears."""

_NOTEBOOK = "ipykernel"
"""The module that is loaded where a notebook runs the program. Its standard error is no terminal, and shows bars."""


class _Stream:
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


class Progress:
    """Counts bytes, and shows a bar when that takes longer than a second on a terminal or in a notebook.

    Args:
        what: Label of the bar.
        total: Bytes to come.
        wanted: True shows a bar from the start, False never; None decides by itself.
    """

    def __init__(self, what: str, total: int, wanted: bool | None) -> None:
        self._what, self._total = make_printable(what), total
        shown = is_terminal(sys.stderr) or _NOTEBOOK in sys.modules if wanted is None else wanted
        self._wanted = shown and sys.stderr is not None  # Python has None for a closed one
        self._from = time.monotonic() + (DELAY if wanted is None else 0.0)
        self._lock = threading.Lock()
        self._bar: Any = None
        self.done = 0

    def __call__(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes
            if not self._wanted:
                return
            if self._bar is None and time.monotonic() >= self._from:
                self._bar = self._new_bar(self.done - nbytes)
            if self._bar is not None:
                self._bar.update(nbytes)

    def _new_bar(self, done: int) -> Any:
        about = {"desc": self._what, "total": self._total, "unit": "B", "unit_scale": True, "initial": done}
        # tqdm.auto would warn in a notebook without ipywidgets, and take a bar of text then.
        if _NOTEBOOK in sys.modules and importlib.util.find_spec("ipywidgets") is not None:
            return importlib.import_module("tqdm.notebook").tqdm(**about)
        return importlib.import_module("tqdm").tqdm(**about, file=_Stream(sys.stderr))

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._lock:
            self._wanted = False
            if self._bar is not None:
                self._bar.close()
