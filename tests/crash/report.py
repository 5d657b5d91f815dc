"""What the faults have shown, as a table in docs/measured/reliability.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tests.runs import ROOT

if TYPE_CHECKING:
    from tests.crash.matrix import Case, PowerLost, Result

DOCUMENT = ROOT / "docs/measured/reliability.md"

COLUMNS = ("SIGKILL", "ENOSPC", "EIO", "short write")


def parted(results: Sequence[Result]) -> tuple[list[Case], list[PowerLost]]:
    """Faults at calls, and losses of power."""
    from tests.crash.matrix import Case, PowerLost

    return [r for r in results if isinstance(r, Case)], [r for r in results if isinstance(r, PowerLost)]


def problems(results: Sequence[Result]) -> list[str]:
    """Everything that should not be, a line each. A fault that did not happen is none: `table` counts it."""
    cases, losses = parted(results)
    found = [
        f"{case.operation} | {case.kind} | {case.position} {case.call} | {name}: {text}"
        for case in cases
        for name, texts in (("lost", case.lost), ("said wrongly", case.wrong), ("other", case.other))
        for text in texts
    ]
    found += [f"{loss.operation} | {text}" for loss in losses for text in loss.problems]
    return found + [f"{loss.operation} | told of before {path} was durable" for loss in losses for path in late(loss)]


def late(loss: PowerLost) -> list[str]:
    """What of the new checkpoint was not durable when the caller was told of it: not drafts, nor trash."""
    return [path for path in loss.late if not path.startswith(".") and "/." not in path]


def table(results: Sequence[Result]) -> list[str]:
    """The lines of a table: operation by kind of fault."""
    cases, losses = parted(results)
    names = list(dict.fromkeys(r.operation for r in results))
    heads = ("operation", *COLUMNS, "lost", "said wrongly", "left or untyped", "states after a loss of power", "lost")
    lines = [f"| {' | '.join(heads)} |", "|---|" + "--:|" * (len(heads) - 1)]
    for name in [*sorted(names), None]:
        of = [c for c in cases if c.reached and name in (c.operation, None)]
        power = [p for p in losses if name in (p.operation, None)]
        numbers = [sum(c.kind.startswith(column) for c in of) for column in COLUMNS]
        numbers += [sum(bool(texts) for texts in column) for column in ([c.lost for c in of], [c.wrong for c in of])]
        numbers += [sum(bool(c.other) for c in of), sum(p.states for p in power)]
        numbers += [sum(len(p.problems) + len(late(p)) for p in power)]
        cells = [f"{number:,}" for number in numbers]
        if not power:
            cells[-2:] = ["", ""]
        lines.append(f"| {name or '**all**'} | {' | '.join(cells)} |")
    missed = [case for case in cases if not case.reached]
    return [
        *lines,
        "",
        f"{len(missed)} faults did not happen: {missed_text(missed)}" if missed else "All faults happened.",
    ]


def missed_text(missed: Sequence[Case]) -> str:
    """Which faults did not happen."""
    return "; ".join(f"{case.operation}, {case.kind} at {case.call}" for case in missed)


def write(results: Sequence[Result], seconds: float, share: float, *, peers: bool) -> None:
    """Put the table into the document: at its place for this library, or at that for the others."""
    cases, losses = parted(results)
    text = (
        f"{len(cases):,} faults, and {sum(p.states for p in losses):,} states after losses of power, in "
        f"{seconds / 60:.0f} minutes on two cores."
    )
    put("make crash OTHERS=1" if peers else "make crash", [text + share_text(share), "", *table(results)])


def share_text(share: float) -> str:
    """What is said of a run that tried a part of all faults."""
    return f" (A share of {share:.0%} of all, chosen at random: `--share {share:g}`.)" if share < 1 else ""


def put(command: str, lines: Sequence[str]) -> None:
    """Put lines into the document, at the place of the command that made them."""
    begin, end = f"<!-- made by {command}: begin -->", f"<!-- made by {command}: end -->"
    before, rest = DOCUMENT.read_text().split(begin)
    after = rest.split(end)[1]
    DOCUMENT.write_text("\n".join([before + begin, *lines, end]) + after)
