"""Print results, errors and warnings of commands, as text for people or as JSON for scripts.

Messages of the library name Python arguments, followed by the command-line option in parentheses. This module
replaces them with the option before a message is printed, and escapes control characters for terminals.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from xla_ckpt.display import is_terminal, make_lines_printable, make_printable
from xla_ckpt.errors import StorageError

if TYPE_CHECKING:
    from rich.console import RenderableType


def print_result(args: argparse.Namespace, result: Any, render: Callable[[Any], RenderableType]) -> None:
    """Print an answer: as JSON, or as `render` makes it.

    A terminal gets tables as wide as itself. A pipe or a file gets every line whole, with tabs between columns.
    """
    result = translate_result_to_options(result)
    with translate_stdout_errors():
        if args.json:
            # Of the characters that control a terminal, JSON has DEL alone as it is.
            print(json.dumps(result, indent=1).replace("\x7f", "\\u007f"), flush=True)
            return
        from rich.console import Console

        terminal = is_terminal(sys.stdout)
        shown = render(make_result_printable(result))
        Console(width=None if terminal else 200, highlight=False).print(shown, soft_wrap=not terminal)


@contextlib.contextmanager
def translate_stdout_errors() -> Iterator[None]:
    """Around what writes to the standard output.

    Raises:
        BrokenPipeError: Who reads it has seen enough.
        StorageError: It cannot be written: the disk is full, for instance.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        # Else the interpreter writes what is left when it ends, and complains once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise StorageError.of(error, "writing the answer to the standard output") from error


def run_for_each_tag(args: argparse.Namespace, tags: Sequence[str], action: Callable[[str], str]) -> None:
    """Do something with each tag, and print what. What was done before an error or Ctrl-C is printed, too."""
    from xla_ckpt.cli import results

    done: list[dict[str, str]] = []
    try:
        for tag in tags:
            what = action(tag)
            done.append({"tag": tag, "done": what})
    finally:
        if done:
            print_result(args, {"path": args.path, "tags": done}, results.format_tag_actions)


_ARGUMENT_MENTION = re.compile(
    # The library says both: an argument or a call, and in parentheses what it is at the command line. Names in a tag
    # may be long: each is looked at once, from its beginning.
    r"(?<![^\s(])(?:\w+= and )?"
    r"[\w.]+(?:=(?:\[[^\[\]]*\]|[^\s()\[\]]*))?"  # as_tag=, mesh="tp=2", shardings=[('up_proj', ('tp', None))]
    r"(?:\([^()]*\)[\w.]*)*"  # LlamaJob(config, ...), convert(..., to='peft')
    r" \(((?:xla-ckpt |--)(?:[^()\\]|\\.)*)\)"  # --sharding '~\(0\)\.weight' _
)

_MESSAGE_FIELDS = frozenset({"problem", "problems", "hint", "notes", "message"})
"""Members of answers in which the library speaks. All others are names and numbers."""

_DATA_FIELDS = frozenset({"arrays", "files", "values"})
"""Members without sentences, however they are called inside: thousands of arrays and files, and what a program has
saved, which may lie in each other as deep as can be."""


def translate_to_options(text: str) -> str:
    """The text of an error or a warning with the options of the command line in the place of Python's arguments.

    >>> translate_to_options("Pass as_tag= (--as)."), translate_to_options("Give them: model= and optimizer= (--like).")
    ('Pass --as.', 'Give them: --like.')
    >>> translate_to_options("Say shardings=[('up', ('tp', None))] (--sharding up tp,_), or name another part of it: "
    ...            "export_hf(part=...) (xla-ckpt export --part).")
    'Say --sharding up tp,_, or name another part of it: xla-ckpt export --part.'
    """
    return _ARGUMENT_MENTION.sub(r"\1", text)


def translate_result_to_options(result: Any, is_message: bool = False) -> Any:
    """The answer of a command, as JSON has it, with the same done to what it says of problems."""
    if isinstance(result, str):
        return translate_to_options(result) if is_message else result
    if isinstance(result, dict):
        return {
            name: value if name in _DATA_FIELDS else translate_result_to_options(value, name in _MESSAGE_FIELDS)
            for name, value in result.items()
        }
    return (
        [translate_result_to_options(value, is_message) for value in result]
        if isinstance(result, list | tuple)
        else result
    )


def make_result_printable(result: Any, is_message: bool = False) -> Any:
    """The answer of a command with escaped names; its `values` stay as they are, for they become cells of tables.

    Sentences keep their line breaks: the names in them are escaped already, as those of errors are.
    """
    if isinstance(result, str):
        return make_lines_printable(result) if is_message else make_printable(result)
    if isinstance(result, dict):
        return {
            make_printable(name): value if name == "values" else make_result_printable(value, name in _MESSAGE_FIELDS)
            for name, value in result.items()
        }
    return (
        [make_result_printable(value, is_message) for value in result] if isinstance(result, list | tuple) else result
    )


class _OptionNameFormatter(logging.Formatter):
    """The text of a record, in options."""

    def format(self, record: logging.LogRecord) -> str:
        return translate_to_options(super().format(record))


@contextlib.contextmanager
def translate_log_messages() -> Iterator[None]:
    """For a block, have warnings printed with options. Where a program handles them itself, they stay as they are."""
    if (handler := logging.lastResort) is None:  # a program took it away: they are not printed
        yield
        return
    before = handler.formatter
    handler.setFormatter(_OptionNameFormatter())
    try:
        yield
    finally:
        handler.setFormatter(before)
