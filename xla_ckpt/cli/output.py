"""How an answer reaches the person or the script that asked."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType


def print_answer(args: argparse.Namespace, answer: Any, how: Callable[[Any], RenderableType]) -> None:
    """Print an answer: as JSON, or as `how` makes it.

    A terminal gets tables as wide as itself. A pipe or a file gets every line whole, with tabs between columns.
    """
    if args.json:
        print(json.dumps(answer, indent=1))
        return
    from rich.console import Console

    terminal = sys.stdout.isatty()
    Console(width=None if terminal else 200, highlight=False).print(how(answer), soft_wrap=not terminal)
