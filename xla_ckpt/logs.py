"""Loggers that escape characters that control a terminal."""

from __future__ import annotations

import logging
from typing import Any

from xla_ckpt.display import PrintableLines, make_lines_printable, make_printable


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module. Names in its records, such as leaf paths, tags and files, are escaped."""
    logger = logging.getLogger(name)
    logger.addFilter(_escape)  # adding the same filter again has no effect
    return logger


def _escape(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple):
        record.args = tuple(map(_make_value_printable, record.args))
    return True


def _make_value_printable(value: Any) -> Any:
    if isinstance(value, str):
        return value if isinstance(value, PrintableLines) else make_printable(value)
    return make_lines_printable(str(value)) if isinstance(value, BaseException) else value
