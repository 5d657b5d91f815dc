"""The page of all modules: `python docs/site/modules.py` writes it, `--check` compares.

A module says in the first sentence of its docstring what it is for. The page has these sentences, folder by folder, so
that a reader who looks for something finds its file with one search, and no list is kept by hand.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from written import write_or_check

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "modules.md"
HEAD = """# All modules

What each module says of itself, in its first sentence: to search in. [The architecture](architecture.md) says how they
go together. `python docs/site/modules.py` writes this page.
"""


def modules() -> Iterator[Path]:
    """The modules of both packages, those of a folder together and before those of the folders in it."""
    for package in ("neuron_compat", "xla_ckpt"):
        paths = [path.relative_to(ROOT) for path in (ROOT / package).rglob("*.py")]
        yield from sorted(paths, key=lambda path: (path.parent.parts, path.name))


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring."""
    paragraph = (ast.get_docstring(ast.parse((ROOT / path).read_text())) or "").partition("\n\n")[0]
    sentence, end, _ = " ".join(paragraph.split()).partition(". ")
    return sentence + end.strip()


def page() -> str:
    """The text of the page."""
    lines = [HEAD]
    for folder, paths in groupby(modules(), lambda path: path.parent):
        says = {path.name: first_sentence(path).replace("|", "\\|") for path in paths}
        about = says.pop("__init__.py", "")
        if says:
            lines += [f"## {folder.as_posix()}", "", about, "", "| module | what it is for |", "|---|---|"]
            lines += [*(f"| `{name}` | {sentence} |" for name, sentence in says.items()), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(write_or_check({PAGE: page()}, "modules.py"))
