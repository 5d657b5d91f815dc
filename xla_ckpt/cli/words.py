"""Errors and warnings of the library speak of arguments in Python; a person at the command line has options instead."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from typing import Any

from xla_ckpt.display import make_lines_printable, make_printable

_SPOKEN = re.compile(
    # The library says both: an argument or a call, and in parentheses what it is at the command line. Names in a tag
    # may be long: each is looked at once, from its beginning.
    r"(?<![^\s(])(?:\w+= and )?"
    r"[\w.]+(?:=(?:\[[^\[\]]*\]|[^\s()\[\]]*))?"  # as_tag=, mesh="tp=2", shardings=[('up_proj', ('tp', None))]
    r"(?:\([^()]*\)[\w.]*)*"  # LlamaJob(config, ...), convert(..., to='peft')
    r" \(((?:xla-ckpt |--)(?:[^()\\]|\\.)*)\)"  # --sharding '~\(0\)\.weight' _
)

_SENTENCES = frozenset({"problem", "problems", "hint", "notes", "message"})
"""Members of answers in which the library speaks. All others are names and numbers."""

_DATA = frozenset({"arrays", "files", "values"})
"""Members without sentences, however they are called inside: thousands of arrays and files, and what a program has
saved, which may lie in each other as deep as can be."""


def in_options(text: str) -> str:
    """The text of an error or a warning with the options of the command line in the place of Python's arguments.

    >>> in_options("Pass as_tag= (--as)."), in_options("Give them: model= and optimizer= (--like).")
    ('Pass --as.', 'Give them: --like.')
    >>> in_options("Say shardings=[('up', ('tp', None))] (--sharding up tp,_), or name another part of it: "
    ...            "export_hf(part=...) (xla-ckpt export --part).")
    'Say --sharding up tp,_, or name another part of it: xla-ckpt export --part.'
    """
    return _SPOKEN.sub(r"\1", text)


def answer_in_options(answer: Any, sentence: bool = False) -> Any:
    """The answer of a command, as JSON has it, with the same done to what it says of problems."""
    if isinstance(answer, str):
        return in_options(answer) if sentence else answer
    if isinstance(answer, dict):
        return {
            name: value if name in _DATA else answer_in_options(value, name in _SENTENCES)
            for name, value in answer.items()
        }
    return [answer_in_options(value, sentence) for value in answer] if isinstance(answer, list | tuple) else answer


def printable_answer(answer: Any, sentence: bool = False) -> Any:
    """The answer of a command with escaped names; its `values` stay as they are, for they become cells of tables.

    Sentences keep their line breaks: the names in them are escaped already, as those of errors are.
    """
    if isinstance(answer, str):
        return make_lines_printable(answer) if sentence else make_printable(answer)
    if isinstance(answer, dict):
        return {
            make_printable(name): value if name == "values" else printable_answer(value, name in _SENTENCES)
            for name, value in answer.items()
        }
    return [printable_answer(value, sentence) for value in answer] if isinstance(answer, list | tuple) else answer


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
