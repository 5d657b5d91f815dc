"""Errors of the library speak of arguments in Python; a person at the command line has options in their place."""

from __future__ import annotations

import re

_SPOKEN = (
    # An argument and, in parentheses, its option: "as_tag= (--as)", "LlamaJob(config, ...) (--config)".
    (re.compile(r"[\w.]+(?:=[^\s()]*)?(?:\([^()]*\))? \((--[\w -]+)\)"), r"\1"),
    # Both in parentheses: "(model=, optimizer=; --like on the command line)".
    (re.compile(r"\((?:\w+=[,;] )+(--[\w-]+)(?: on the command line)?\)"), r"(\1)"),
    (re.compile(r"\btrust_pickle=True\b"), "--trust-pickle"),
    (re.compile(r"\bmodel= and optimizer="), "--like"),
    (re.compile(r"xla_ckpt\.Checkpoints\(path\)\.show\(\)"), "xla-ckpt show"),
)


def in_options(text: str) -> str:
    """The text of an error with the options of the command line in the place of Python's arguments.

    >>> in_options("Pass as_tag= (--as)."), in_options("Give it (model=, optimizer=; --like on the command line).")
    ('Pass --as.', 'Give it (--like).')
    """
    for argument, option in _SPOKEN:
        text = argument.sub(option, text)
    return text
