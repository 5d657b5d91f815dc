"""What the changed files have shown, as a table in docs/measured/reliability.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tests.runs import ROOT

if TYPE_CHECKING:
    from tests.fuzz.probes import Outcome

DOCUMENT = ROOT / "docs/measured/reliability.md"

COLUMNS = ("refused", "exact", "other", "missed", "untyped", "slow", "memory", "hangs")

BAD = frozenset(COLUMNS[3:])

SEALED = frozenset(("native", "native, a tree", "xser", "pt", "pt, four ranks", "dcp", "smp"))
"""Specimens whose bytes are covered by digests."""


def problems(results: Sequence[Outcome]) -> list[str]:
    """Everything that should not be, a line each."""
    bad = [r for r in results if r.verdict in BAD or (r.verdict == "other" and r.specimen in SEALED and not r.forged)]
    found: dict[str, list[Outcome]] = {}
    for outcome in bad:
        found.setdefault(f"{outcome.verdict}: {_place(outcome.text)}", []).append(outcome)
    return [
        f"{len(of)} x {what} | {of[0].specimen}:{of[0].seed} | {of[0].call} | {of[0].how[:100]}"
        for what, of in sorted(found.items(), key=lambda pair: -len(pair[1]))
    ]


def _place(text: str) -> str:
    """Where an error was raised, and what it says first: errors of one kind are told once."""
    frames = re.findall(r'File ".*?/((?:xla_ckpt|tests|neuron_compat)/[^"]*)", line (\d+)', text)
    last = text.strip().rpartition("\n")[2][:160]
    return f"{':'.join(frames[-1])} {last}" if frames else last


def table(results: Sequence[Outcome]) -> list[str]:
    """The lines of a table: kind of file, by what became of the inputs."""
    return _rows("file", results, lambda outcome: outcome.kind)


def rot_table(results: Sequence[Outcome]) -> list[str]:
    """The same of what was damaged and not forged, by layout."""
    rotten = [outcome for outcome in results if not outcome.forged]
    return _rows("layout", rotten, lambda outcome: outcome.specimen)


def _rows(head: str, results: Sequence[Outcome], key: Callable[[Outcome], str]) -> list[str]:
    lines = [f"| {head} | inputs | {' | '.join(COLUMNS)} |", "|---|" + "--:|" * (1 + len(COLUMNS))]
    for name in [*sorted({key(outcome) for outcome in results}), None]:
        of = [outcome for outcome in results if name is None or key(outcome) == name]
        numbers = [len(of), *(sum(outcome.verdict == column for outcome in of) for column in COLUMNS)]
        lines.append(f"| {name or '**all**'} | {' | '.join(f'{n:,}' for n in numbers)} |")
    return lines


def write(results: Sequence[Outcome], seconds: float) -> None:
    """Put the tables into the document."""
    begin, end = "<!-- made by make fuzz: begin -->", "<!-- made by make fuzz: end -->"
    before, rest = DOCUMENT.read_text().split(begin)
    rotten = sum(not outcome.forged for outcome in results)
    text = [
        f"{len(results):,} inputs in {seconds / 60:.0f} minutes on two cores.",
        "",
        *table(results),
        "",
        f"Of them {rotten:,} were damaged, with the digests left as they were:",
        "",
        *rot_table(results),
    ]
    DOCUMENT.write_text("\n".join([before + begin, *text, end]) + rest.split(end)[1])
