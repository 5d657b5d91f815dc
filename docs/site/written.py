"""Files of the documents that a program makes: it writes them, or with `--check` says which are out of date."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path


def write_or_check(texts: Mapping[Path, str], script: str) -> str | None:
    """Write the files; with `--check` among the arguments write none, and return what is not up to date.

    Args:
        texts: Path of each file -> its text.
        script: The program that makes them, for the message.
    """
    if "--check" in sys.argv[1:]:
        old = [path.name for path, text in texts.items() if not path.exists() or path.read_text() != text]
        return f"not up to date: {', '.join(old)}; run python docs/site/{script}" if old else None
    for path, text in texts.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return None
