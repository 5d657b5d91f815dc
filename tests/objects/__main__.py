"""Try the objects that people train with, against the real packages: ``make test-objects``.

``--write`` renews the rows of docs/measured/objects.md of what was tried; ``--only PACKAGE`` tries one package.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import torch

from tests.objects import of_jax, of_torch
from tests.objects.trial import Case, Outcome, tried

PAGE = Path(__file__).parents[2] / "docs/measured/objects.md"
BEGIN, END = "<!-- made by make test-objects -->", "<!-- end -->"
HEAD = ["", "| package | | tried | result |", "|---|---|---|---|"]


def cases() -> Iterator[Case]:
    """All cases."""
    for make in (*of_torch.ALL, *of_jax.ALL):
        yield from make()


def text(outcome: Outcome) -> str:
    """What became of a case, in a few words."""
    if outcome.error:
        return outcome.error.replace("|", "\\|")
    return "equal" + (f" ({outcome.pickled} objects pickled)" if outcome.pickled else "")


def rows(outcomes: Sequence[Outcome]) -> dict[str, list[str]]:
    """The rows of the table by package: what is alike in one row."""
    found: dict[str, dict[str, list[str]]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.case.package, {}).setdefault(text(outcome), []).append(outcome.case.name)
    torchs = torch.__version__.partition("+")[0]
    made = {}
    for package, by_text in found.items():
        about = f"{package} {importlib.metadata.version(package)} (torch {torchs}, jax {jax.__version__})"
        made[package] = [
            f"| {about} | {len(names)} | {'; '.join(names)} | {result} |" for result, names in by_text.items()
        ]
    return made


def write(made: dict[str, list[str]]) -> None:
    """Put rows into the page, in the place of those of the same packages."""
    head, _, rest = PAGE.read_text().partition(BEGIN)
    old, _, tail = rest.partition(END)
    kept: dict[str, list[str]] = {}
    for row in (line for line in old.splitlines()[3:] if line.startswith("| ")):
        kept.setdefault(row.split()[1], []).append(row)
    kept.update(made)
    lines = [row for package in sorted(kept) for row in kept[package]]
    PAGE.write_text("\n".join([head + BEGIN, *HEAD, *lines, END + tail]))


def main() -> int:
    """Try them; 1 if one of them fails that should not."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--write", action="store_true")
    options.add_argument("--only", default="")
    given = options.parse_args()
    logging.disable(logging.WARNING)
    outcomes = []
    for case in cases():
        if given.only in ("", case.package):
            outcomes.append(tried(case))
            print(f"{case.package:18} {case.name:44} {text(outcomes[-1])}", flush=True)
    print(f"{sum(not o.error for o in outcomes)} of {len(outcomes)} equal")
    if given.write:
        write(rows(outcomes))
    return int(any(o.error and not o.expected for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
