"""Try the objects that people train with, against the real packages: ``make test-objects``.

``--write`` renews the table in docs/objects.md; ``--only TEXT`` tries the cases whose package or name contains it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from tests.objects import of_jax, of_torch
from tests.objects.trial import Case, Outcome, tried

PAGE = Path(__file__).parents[2] / "docs" / "objects.md"
BEGIN, END = "<!-- made by make test-objects -->", "<!-- end -->"


def cases() -> Iterator[Case]:
    """All cases."""
    for make in (*of_torch.ALL, *of_jax.ALL):
        yield from make()


def text(outcome: Outcome) -> str:
    """What became of a case, in a few words."""
    if outcome.error:
        return outcome.error.replace("|", "\\|")
    return "equal" + (f" ({outcome.pickled} objects pickled)" if outcome.pickled else "")


def table(outcomes: Sequence[Outcome]) -> str:
    """The table: what is alike of a package in one row, all others one by one."""
    rows = ["| package | tried | result |", "|---|---|---|"]
    packages = dict.fromkeys(o.case.package for o in outcomes)
    for package in packages:
        mine = [o for o in outcomes if o.case.package == package]
        by_text: dict[str, list[str]] = {}
        for o in mine:
            by_text.setdefault(text(o), []).append(o.case.name)
        for result, names in by_text.items():
            count = f"{len(names)}: " if len(names) > 1 else ""
            rows.append(f"| {package} {importlib.metadata.version(package)} | {count}{', '.join(names)} | {result} |")
    passed = sum(not o.error for o in outcomes)
    versions = f"Python {sys.version.split()[0]}, torch {torch.__version__.split('+')[0]}"
    return "\n".join([f"{passed} of {len(outcomes)} equal ({versions}).", "", *rows])


def main() -> int:
    """Try them; 1 if one of them fails that should not."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--write", action="store_true")
    options.add_argument("--only", default="")
    given = options.parse_args()
    logging.disable(logging.WARNING)
    outcomes = []
    for case in cases():
        if given.only.lower() in f"{case.package} {case.name}".lower():
            outcomes.append(tried(case))
            print(f"{case.package:18} {case.name:44} {text(outcomes[-1])}", flush=True)
    made = table(outcomes)
    print(made)
    if given.write:
        head, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{head}{BEGIN}\n\n{made}\n\n{END}{rest.partition(END)[2]}")
    return int(any(o.error and (not o.case.xfail or o.case.xfail not in o.error) for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
