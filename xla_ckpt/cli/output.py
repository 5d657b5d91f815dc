"""How an answer reaches the person or the script that asked."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from xla_ckpt.cli.words import answer_in_options, printable_answer
from xla_ckpt.display import is_terminal
from xla_ckpt.errors import StorageError

if TYPE_CHECKING:
    from rich.console import RenderableType


def print_answer(args: argparse.Namespace, answer: Any, how: Callable[[Any], RenderableType]) -> None:
    """Print an answer: as JSON, or as `how` makes it.

    A terminal gets tables as wide as itself. A pipe or a file gets every line whole, with tabs between columns.
    """
    answer = answer_in_options(answer)
    with answering():
        if args.json:
            # Of the characters that control a terminal, JSON has DEL alone as it is.
            print(json.dumps(answer, indent=1).replace("\x7f", "\\u007f"), flush=True)
            return
        from rich.console import Console

        terminal = is_terminal(sys.stdout)
        shown = how(printable_answer(answer))
        Console(width=None if terminal else 200, highlight=False).print(shown, soft_wrap=not terminal)


@contextlib.contextmanager
def answering() -> Iterator[None]:
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


def print_each(args: argparse.Namespace, tags: Sequence[str], act: Callable[[str], str]) -> None:
    """Do something with each tag, and print what. What was done before an error or Ctrl-C is printed, too."""
    from xla_ckpt.cli import answers

    done: list[dict[str, str]] = []
    try:
        for tag in tags:
            what = act(tag)
            done.append({"tag": tag, "done": what})
    finally:
        if done:
            print_answer(args, {"path": args.path, "tags": done}, answers.done)
