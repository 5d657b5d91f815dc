"""Errors and warnings of the library speak of arguments in Python; a person at the command line has options instead."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator

_SPOKEN = (
    # An argument and, in parentheses, its option: "as_tag= (--as)", "LlamaJob(config, ...) (--config)".
    # Names in a tag may be long: each is looked at once, from its beginning.
    (re.compile(r"(?<![^\s(])[\w.]+(?:=[^\s()]*)?(?:\([^()]*\))? \((--[\w -]+)\)"), r"\1"),
    # Both in parentheses: "(model=, optimizer=; --like on the command line)".
    (re.compile(r"\((?:\w+=[,;] )+(--[\w-]+)(?: on the command line)?\)"), r"(\1)"),
    (re.compile(r"\btrust_pickle=True\b"), "--trust-pickle"),
    (re.compile(r"\bmodel= and optimizer="), "--like"),
    (re.compile(r"xla_ckpt\.Checkpoints\(path\)\.show\(\)"), "xla-ckpt show"),
)


def in_options(text: str) -> str:
    """The text of an error or a warning with the options of the command line in the place of Python's arguments.

    >>> in_options("Pass as_tag= (--as)."), in_options("Give it (model=, optimizer=; --like on the command line).")
    ('Pass --as.', 'Give it (--like).')
    """
    for argument, option in _SPOKEN:
        text = argument.sub(option, text)
    return text


class _InOptions(logging.Formatter):
    """The text of a record, in options."""

    def format(self, record: logging.LogRecord) -> str:
        return in_options(super().format(record))


@contextlib.contextmanager
def log_in_options() -> Iterator[None]:
    """For a block, have warnings printed with options. Where a program handles them itself, they stay as they are."""
    if (handler := logging.lastResort) is None:  # a program took it away: they are not printed
        yield
        return
    before = handler.formatter
    handler.setFormatter(_InOptions())
    try:
        yield
    finally:
        handler.setFormatter(before)
