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


class Progress:
    """Counts bytes, and shows a bar when that takes longer than a second on a terminal or in a notebook.

    Args:
        what: Label of the bar.
        total: Bytes to come.
        wanted: True shows a bar from the start, False never; None decides by itself.
    """

    def __init__(self, what: str, total: int, wanted: bool | None) -> None:
        self._what, self._total = make_printable(what), total
        self._wanted = is_terminal(sys.stderr) or _NOTEBOOK in sys.modules if wanted is None else wanted
        self._from = time.monotonic() + (DELAY if wanted is None else 0.0)
        self._lock = threading.Lock()
        self._bar: Any = None
        self.done = 0

    def __call__(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes
            if not self._wanted:
                return
            try:
                self._show(nbytes)
            except Exception as error:
                self._wanted, self._bar = False, None
                logger.warning("%s: its progress bar cannot be shown: %s: %s", self._what, type(error).__name__, error)

    def _show(self, nbytes: int) -> None:
        if self._bar is None and time.monotonic() >= self._from:
            # tqdm.auto would warn in a notebook without ipywidgets, and take a bar of text then.
            widgets = _NOTEBOOK in sys.modules and importlib.util.find_spec("ipywidgets") is not None
            kind = importlib.import_module("tqdm.notebook" if widgets else "tqdm").tqdm
            self._bar = kind(desc=self._what, total=self._total, unit="B", unit_scale=True, initial=self.done - nbytes)
        if self._bar is not None:
            self._bar.update(nbytes)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._lock:
            self._wanted = False
            if self._bar is not None:
                self._bar.close()
