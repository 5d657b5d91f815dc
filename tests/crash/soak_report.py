"""What a soak has shown, as tables in docs/measured/reliability.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.crash import report
from tests.crash.soak_judge import Ask, Event, Trend, outcomes


@dataclass(frozen=True)
class Life:
    """One life of the job that is killed."""

    ending: str
    asked: tuple[Ask, ...]
    became: Mapping[int, str]


@dataclass(frozen=True)
class Result:
    """All of a soak."""

    lives: tuple[Life, ...]
    lasting: Sequence[Event]
    """What the ranks of the job that lasts said of the saves `asked`."""

    asked: tuple[Ask, ...]
    loads: int
    fills: int
    small: bool
    """Whether there was a disk that could fill up."""

    trends: Mapping[str, Trend]
    problems: tuple[str, ...]

    def saves(self) -> list[tuple[Ask, str]]:
        """Every save of both jobs that was begun, with what became of it."""
        groups = [(life.asked, life.became) for life in self.lives]
        groups.append((self.asked, outcomes(self.asked, self.lasting)))
        return [(ask, became[ask.number]) for asked, became in groups for ask in asked if ask.number in became]


def lines(result: Result, seconds: float, seed: int) -> list[str]:
    """A sentence, a table of the saves, one of the processes that lasted, and the problems."""
    ends = Counter(life.ending for life in result.lives)
    text = (
        f"{seconds / 60:.1f} minutes with seed {seed}: {len(result.lives)} lives of the job that is killed (all ranks: "
        f"{ends['kill all']}, one rank: {ends['kill one']}, orderly ends: {ends['orderly']}), {result.loads:,} loads "
        f"beside the saves, {result.fills} times "
        f"{'a full disk' if result.small else 'a full disk would have been, which could not be mounted'}."
    )
    saves = result.saves()
    kinds = ("done", "failed", "unknown")
    table = ["| layout | saves done | refused, disk full | interrupted by a kill |", "|---|--:|--:|--:|"]
    for layout in [*sorted({ask.layout for ask, _ in saves}), None]:
        count = Counter(word for ask, word in saves if layout in (ask.layout, None))
        table.append(f"| {layout or '**all**'} | {' | '.join(f'{count[kind]:,}' for kind in kinds)} |")
    held = ["| process | calls | resident set, MiB | its rise with each call, bytes | threads | descriptors |"]
    held.append("|---|--:|--:|--:|--:|--:|")
    for name, of in result.trends.items():
        cells = f"{of.calls:,} | {of.rss / 2**20:.0f} | {of.rise:,.0f} | {of.threads} | {of.descriptors}"
        held.append(f"| {name} | {cells} |")
    problems = f"{len(result.problems)} problems." if result.problems else "Nothing was lost, said wrongly, or left."
    return [text, "", *table, "", *held, "", problems]


def write(result: Result, seconds: float, seed: int) -> None:
    """Put the tables into the document."""
    report.put("make soak", lines(result, seconds, seed))
