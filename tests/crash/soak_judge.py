"""What is decided in the soak, without a process or a checkpoint: which outcomes are right, and what is a leak."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import linear_regression
from typing import Any, Literal, TypeVar

Found = list[tuple[str, int]]
"""What is there: names and numbers of tags, oldest first."""

Kept = TypeVar("Kept")

RISE = 4096
"""How much the memory of a process may rise with each save or load (bytes of the resident set)."""

NOISE = 16 << 20
"""How much it may rise in any case: allocators keep what they had, and a short run sees no more than that."""

SAMPLES = 12
"""With fewer samples nothing is said of leaks."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A save that is asked for."""

    number: int
    tag: str
    layout: str
    rows: int
    kept: int
    """How many tags retention leaves that are not pinned."""

    pinned: bool
    parity: Literal["block", "file"] | None
    mode: str


@dataclass(frozen=True, kw_only=True)
class Event:
    """What one rank says of a save."""

    number: int
    word: str
    """begun, done or failed."""

    error: str = ""
    """Class of the error."""

    committed: bool = False
    typed: bool = True
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a process holds of the machine."""

    seconds: float
    calls: int
    rss: int
    threads: int
    named: list[str] = field(default_factory=list)
    descriptors: list[str] = field(default_factory=list)


def write_line(file: Path, what: Any) -> None:
    """Add a line of JSON to a file, in one call: a process that is killed leaves whole lines."""
    with file.open("ab", buffering=0) as out:
        out.write(json.dumps(asdict(what)).encode() + b"\n")


def read_lines(file: Path, kind: type[Kept]) -> list[Kept]:
    """The lines that processes have added."""
    return [kind(**json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


# --- outcomes ------------------------------------------------------------------------------------------------------


def outcomes(asked: Sequence[Ask], events: Sequence[Event]) -> dict[int, str]:
    """What became of each save that some rank has begun: "done", "failed", or "unknown".

    It is done if one rank says so. A rank that was killed says nothing, and one that waited for it does not know.
    """
    said = defaultdict(list)
    for event in events:
        said[event.number].append(event)
    result = {}
    for wanted in asked:
        if of := said[wanted.number]:
            done = any(event.word == "done" or event.committed for event in of)
            failed = any(event.word == "failed" and event.error != "RankFailedError" for event in of)
            result[wanted.number] = "done" if done else "failed" if failed else "unknown"
    return result


def said_wrongly(events: Sequence[Event], allowed: Sequence[str]) -> list[str]:
    """Errors that nothing explains, and ranks that contradict each other. `allowed` are classes of errors."""
    problems = [
        f"save {e.number}: {e.error}{'' if e.typed else ' (untyped)'}: {e.text}"
        for e in events
        if e.word == "failed" and (not e.typed or e.error not in allowed)
    ]
    done = {e.number for e in events if e.word == "done"}
    unsure = ("RankFailedError", "NotDurableError")
    failed = {e.number for e in events if e.word == "failed" and e.error not in unsure}
    return problems + [f"save {n}: one rank says that it is done, another one that it failed" for n in done & failed]


def lost(before: Found, asked: Sequence[Ask], became: Mapping[int, str], found: Found) -> list[str]:
    """What is wrong with what is found after the saves `asked` on top of `before`."""
    names = {wanted.number: wanted.tag for wanted in asked} | {number: tag for tag, number in before}
    problems = []
    for tag, number in found:
        if names.get(number) != tag:
            problems.append(f"tag {tag} has the number {number}, which was never saved under that name")
        elif became.get(number) == "failed":
            problems.append(f"tag {tag} has the number {number}, whose save failed")
    numbers = [number for _, number in found]
    if numbers != sorted(numbers):
        problems.append(f"not in the order of the saves: {found}")
    sure = [number for _, number in before] + [number for number, word in became.items() if word == "done"]
    if sure and max(numbers, default=0) < max(sure):
        problems.append(f"the newest is {found[-1:]}, and {max(sure)} was committed")
    return problems + _gone(before, asked, became, found)


def _gone(before: Found, asked: Sequence[Ask], became: Mapping[int, str], found: Found) -> list[str]:
    """Tags that are older than they were, or absent although no retention may have removed them."""
    may = [wanted for wanted in asked if became.get(wanted.number) in ("done", "unknown")]
    last = dict(before) | {wanted.tag: wanted.number for wanted in may if became[wanted.number] == "done"}
    there = dict(found)
    problems = []
    for tag, number in last.items():
        if tag in there:
            if there[tag] < number:
                problems.append(f"tag {tag} has the number {there[tag]}, and {number} was committed")
            continue
        # Upper bounds: every tag that may have been there at the time of a retention counts.
        later = [wanted for wanted in may if wanted.number > number]
        newer = [(n, t) for t, n in before if n > number] + [(wanted.number, wanted.tag) for wanted in later]
        removable = any(
            len({t for n, t in newer if n <= one.number and not is_pinned(t)}) >= one.kept for one in later
        )  # fmt: skip
        if is_pinned(tag) or not removable:
            problems.append(f"tag {tag}, number {number}, is gone; found: {found}")
    return problems


def is_pinned(tag: str) -> bool:
    """Whether the soak pins tags of this name."""
    return tag.startswith("best")


# --- leaks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trend:
    """What one process held over time, without its first third, in which caches fill."""

    samples: int
    calls: int
    rss: int
    """In the middle of the line that is fitted (bytes)."""

    rise: float
    """Of that line, per call (bytes)."""

    threads: int
    descriptors: int
    problems: tuple[str, ...]


def trend(samples: Sequence[Sample]) -> Trend | None:
    """What the samples of one process show; None if they are too few."""
    if len(samples) < SAMPLES:
        return None
    third = len(samples) // 3
    first, rest, last = samples[:third], samples[third:], samples[-third:]
    line = linear_regression([s.calls for s in rest], [s.rss for s in rest])
    calls = rest[-1].calls - rest[0].calls
    problems = []
    if line.slope * calls > NOISE and line.slope > RISE:
        problems.append(f"the resident set rises by {line.slope:,.0f} bytes with each of {calls} calls")
    if min(s.threads for s in last) > max(s.threads for s in first):
        problems.append(f"threads: {first[-1].threads} {first[-1].named}, later {last[-1].threads} {last[-1].named}")
    if min(len(s.descriptors) for s in last) > max(len(s.descriptors) for s in first):
        problems.append(f"descriptors: {first[-1].descriptors}, later {last[-1].descriptors}")
    middle = line.intercept + line.slope * (rest[0].calls + rest[-1].calls) / 2
    return Trend(
        samples=len(samples), calls=samples[-1].calls, rss=round(middle), rise=line.slope, threads=last[-1].threads,
        descriptors=len(last[-1].descriptors), problems=tuple(problems),
    )  # fmt: skip
