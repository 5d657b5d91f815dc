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
    """Print a result as JSON, or as rendered by `render`.

    Tables fit the width of a terminal. Pipes and files get complete lines, with tabs between columns.
    """
    result = translate_result_to_options(result)
    with translate_stdout_errors():
        if args.json:
            # DEL is the only terminal control character that JSON does not escape.
            print(json.dumps(result, indent=1).replace("\x7f", "\\u007f"), flush=True)
            return
        from rich.console import Console

        terminal = is_terminal(sys.stdout)
        shown = render(make_result_printable(result))
        Console(width=None if terminal else 200, highlight=False).print(shown, soft_wrap=not terminal)


@contextlib.contextmanager
def translate_stdout_errors() -> Iterator[None]:
    """Translate errors of writes to the standard output.

    Raises:
        BrokenPipeError: The reader has closed the pipe.
        StorageError: The output cannot be written, for example because the disk is full.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        # Otherwise the interpreter writes the rest at exit, and prints another error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise StorageError.of(error, "writing the answer to the standard output") from error


def run_for_each_tag(args: argparse.Namespace, tags: Sequence[str], action: Callable[[str], str]) -> None:
    """Run an action for each tag, and print the results, including those before an error or Ctrl-C."""
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
    # Messages contain an argument or a call, followed by its command-line form in parentheses. Names in a tag may be
    # long: each is scanned once, from its beginning.
    r"(?<![^\s(])(?:\w+= and )?"
    r"[\w.]+(?:=(?:\[[^\[\]]*\]|[^\s()\[\]]*))?"  # as_tag=, mesh="tp=2", shardings=[('up_proj', ('tp', None))]
    r"(?:\([^()]*\)[\w.]*)*"  # LlamaJob(config, ...), convert(..., to='peft')
    r" \(((?:xla-ckpt |--)(?:[^()\\]|\\.)*)\)"  # --sharding '~\(0\)\.weight' _
)

_MESSAGE_FIELDS = frozenset({"problem", "problems", "hint", "notes", "message"})
"""Fields of results that contain messages of the library. All others contain names and numbers."""

_DATA_FIELDS = frozenset({"arrays", "files", "values"})
"""Fields without messages at any depth: thousands of arrays and files, and saved user values of any nesting depth."""


def translate_to_options(text: str) -> str:
    """Replace Python arguments in the text of an error or a warning by options of the command line.

    >>> translate_to_options("Pass as_tag= (--as)."), translate_to_options("Give them: model= and optimizer= (--like).")
    ('Pass --as.', 'Give them: --like.')
    >>> translate_to_options("Say shardings=[('up', ('tp', None))] (--sharding up tp,_), or name another part of it: "
    ...            "export_hf(part=...) (xla-ckpt export --part).")
    'Say --sharding up tp,_, or name another part of it: xla-ckpt export --part.'
    """
    return _ARGUMENT_MENTION.sub(r"\1", text)


def translate_result_to_options(result: Any, is_message: bool = False) -> Any:
    """Apply `translate_to_options` to the messages in a result, given as JSON."""
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
    """Escape names in a result. Its `values` are unchanged, because they become cells of tables.

    Messages keep their line breaks: names in them are escaped already, as in errors.
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
    """Log formatter that replaces Python arguments by options."""

    def format(self, record: logging.LogRecord) -> str:
        return translate_to_options(super().format(record))


@contextlib.contextmanager
def translate_log_messages() -> Iterator[None]:
    """Print warnings with options within the block. Log handlers of the program are unaffected."""
    if (handler := logging.lastResort) is None:  # removed by the program: warnings are not printed
        yield
        return
    before = handler.formatter
    handler.setFormatter(_OptionNameFormatter())
    try:
        yield
    finally:
        handler.setFormatter(before)
