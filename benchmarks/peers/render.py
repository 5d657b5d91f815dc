"""docs/measured/performance.md and its pictures, from results. Nothing here measures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers import plots
from benchmarks.peers.figures import Ratio, Reading, number
from benchmarks.peers.notes import NOTES
from benchmarks.peers.results import Outcome, Results
from benchmarks.peers.rows import Group, Row
from benchmarks.peers.targets import TARGETS, Target

_SCALE = {"s": 1.0, "ms": 1e3, "%": 100.0}
_AROUND = (
    "Why a target is not met is said in [performance-notes.md](performance-notes.md). The raw numbers are in "
    "[performance.json](performance.json); `make bench-check` compares the ratios of a short run with them."
)
_ELSEWHERE = (
    "What rank 0 of 16,384 ranks takes (8 s, 100 MB of records, 1.5 GB), and how long 100,000 shards take to be opened "
    "and planned (0.5 s), is in [scaling.md](scaling.md#targets), which `python benchmarks/scale.py --write` makes."
)
NOISY = 1.25
"""Rounds that differ by more than this factor, in the middle, come from a machine that was not quiet."""


def document(results: Results, groups: Sequence[Group]) -> str:
    """The whole of docs/measured/performance.md; of groups without targets, their tables and what they need."""
    parts, notes = ["# Performance", _made(results)], NOTES
    if any(target.source.read(results) for target in TARGETS):
        parts += [_AROUND, targets_table(results)]
    else:
        words = " ".join(text for group in groups for text in (group.title, *(row.name for row in group.rows))).lower()
        notes = {name: text for name, text in NOTES.items() if name in ("all", "memory") or name in words}
    for group in groups:
        if group.key in results.rows:
            parts += [f"## {group.title}", *_picture(group, results), table(group, results)]
    parts += ["## How to read the rows", "\n".join(f"* *{name}*: {text}" for name, text in notes.items())]
    return "\n\n".join(parts) + "\n"


def _made(results: Results) -> str:
    about = results.about
    spread = results.spread()
    noise = "there was one round, so nothing says how noisy it was" if spread is None else (
        f"the slowest round of a row took {spread:.2f} times as long as its fastest, in the middle of all rows"
    )  # fmt: skip
    noisy = about["unquiet"] > about["measured"] / 10 or (spread is not None and spread > NOISY)
    quiet = "was not quiet" if noisy else "may not have been quiet" if spread is None else "was quiet"
    return (
        f"Made by `{about['command']}` ({about['rounds']} interleaved rounds, fewer of rows that take long; every "
        f"measurement a fresh process) on {about['machine']}.\n"
        f"The machine {quiet}: its load was {about['load_before']:.2f} before the run, {noise}, and before "
        f"{about['unquiet']} of {about['measured']} measurements it did not become idle.\n"
        f"Just before the run, {about['speed']}.\n"
        "Compare within this run only, and trust ratios rather than seconds. "
        "Nothing was measured on a TPU or a Trainium chip."
    )


def targets_table(results: Results) -> str:
    """What was promised, with what was measured, by topic."""
    lines = ["## Targets", "", _summary(results)]
    for topic in dict.fromkeys(target.topic for target in TARGETS):
        lines += ["", f"### {topic}", "", "| | target | measured | in single rounds | ours | beside | |"]
        lines += ["|---|---|---:|---|---:|---|---|"]
        lines += [_target_line(target, target.source.read(results)) for target in TARGETS if target.topic == topic]
    return "\n".join([*lines, "", _ELSEWHERE])


def _summary(results: Results) -> str:
    readings = [(target, target.source.read(results)) for target in TARGETS]
    verdicts = [target.is_met(reading.value) for target, reading in readings if reading]
    return (
        f"Of {len(TARGETS)} targets {sum(verdicts)} are met, {len(verdicts) - sum(verdicts)} are not, and "
        f"{len(TARGETS) - len(verdicts)} were not measured. A ratio is our time over that of the row beside it, or our "
        "bytes per second over its, where the target is a lower bound."
    )


def _target_line(target: Target, reading: Reading | None) -> str:
    source = target.source
    of = f" of {source.beside or 'the best peer'}" if isinstance(source, Ratio) else f" {source.unit}"
    bound = f"{'>=' if source.rate else '<='} {number(target.bound)}{of}"
    if reading is None:
        return f"| {target.what} | {bound} | not measured | | | | |"
    low, high = number(min(reading.rounds)), number(max(reading.rounds))
    spread = f"{low} to {high}" if len(reading.rounds) > 1 else "one round"
    verdict = "met" if target.is_met(reading.value) else "**not met**"
    measured = number(reading.value)
    return f"| {target.what} | {bound} | {measured} | {spread} | {reading.ours} | {reading.beside} | {verdict} |"


def table(group: Group, results: Results) -> str:
    """One group, the fastest row first, and the failed ones last."""
    found = results.rows[group.key]
    rows = [row for row in group.rows if row.name in found]
    ours = found[rows[0].name].median() if rows else None
    columns = _columns(group, [found[row.name] for row in rows])
    lines = [
        "| | median | range | n | " + "".join(f"{column} | " for column in columns).rstrip(),
        "|---|---:|---:|---:|" + "---:|" * len(columns),
    ]
    ranked = sorted(rows, key=lambda row: _order(found[row.name]))
    lines += [_line(group, row, found[row.name], columns, ours) for row in ranked]
    return "\n".join(lines)


def _columns(group: Group, outcomes: Sequence[Outcome]) -> list[str]:
    """The other figures that rows of this group have."""
    had = {figure for outcome in outcomes for run in outcome.runs for figure in run}
    offered = {
        "GB/s": group.rate, "returned": "returned" in had, "the first": "first" in had, "until durable": "total" in had,
        "later": "later" in had, "after its bytes": "after" in had, "the statement alone": "alone" in had,
        "torch": "torch" in had, "extra memory": "rss" in had, "requests": "requests" in had,
        "processor time": "worked" in had, "a save takes": "save" in had, "the loop loses": "lost" in had,
        "processor time of a save alone": "cpu" in had,
        "times ours": len(group.rows) > 1 and group.unit != "%",
    }  # fmt: skip
    return [name for name, there in offered.items() if there]


def _order(outcome: Outcome) -> float:
    value = outcome.median()
    return float("inf") if value is None else value


def _line(group: Group, row: Row, outcome: Outcome, columns: Sequence[str], ours: float | None) -> str:
    mid = outcome.median()
    if mid is None:
        return f"| {row.name} | failed: {outcome.error} |" + " |" * (len(columns) + 2)
    seconds = [run["seconds"] for run in outcome.runs]
    others = "".join(f" {_cell(name, outcome, group.unit, ours)} |" for name in columns)
    low, high = shown(min(seconds), group.unit), shown(max(seconds), group.unit)
    name = f"{row.name} (then failed: {outcome.error})" if outcome.error else row.name
    return f"| {name} | {shown(mid, group.unit)} | {low} to {high} | {len(seconds)} |{others}"


def _cell(column: str, outcome: Outcome, unit: str, ours: float | None) -> str:
    if column == "times ours":
        mid = outcome.median()
        return f"{mid / ours:.2f}" if mid is not None and ours else ""
    if column == "GB/s":
        nbytes, seconds = outcome.median("nbytes"), outcome.median()
        return f"{nbytes / seconds / 1e9:.2f}" if nbytes and seconds else ""
    if column == "extra memory":
        rise = outcome.median("rss")
        return "" if rise is None else f"{rise / 1e6:.0f} MB"
    if column == "requests":
        requests = outcome.median("requests")
        return "" if requests is None else f"{requests:.0f}"
    figure, unit = {
        "returned": ("returned", "s"), "the first": ("first", unit), "until durable": ("total", "s"),
        "later": ("later", "s"), "after its bytes": ("after", "s"), "the statement alone": ("alone", unit),
        "torch": ("torch", unit), "a save takes": ("save", "s"),
        "the loop loses": ("lost", "s"), "processor time": ("worked", "s"),
        "processor time of a save alone": ("cpu", "s"),
    }[column]  # fmt: skip
    value = outcome.median(figure)
    return "" if value is None else shown(value, unit)


def shown(value: float, unit: str) -> str:
    """A figure in the unit of its group."""
    return f"{value * _SCALE[unit]:.{2 if unit == 's' else 1}f} {unit}"


def _picture(group: Group, results: Results) -> list[str]:
    return [f"![{group.title}](performance/{group.key}.svg)"] if picture(group, results) else []


def picture(group: Group, results: Results) -> str | None:
    """The SVG of a group; None if it has none, or nothing to show."""
    found = results.rows.get(group.key, {})
    measured = [(row, mid) for row in group.rows if row.name in found and (mid := found[row.name].median()) is not None]
    if not group.plot or not measured:
        return None
    bars = [_bar(group, row, found[row.name], mid) for row, mid in measured]
    what = "GB/s, longer is better" if group.rate else f"{group.unit}, shorter is better"
    return plots.bars(f"{group.title} ({what})", sorted(bars, key=lambda bar: bar.value, reverse=group.rate))


def _bar(group: Group, row: Row, outcome: Outcome, mid: float) -> plots.Bar:
    ours = row.name.startswith("xla_ckpt")
    label = row.name.replace("`", "")
    if group.rate:
        rate = (outcome.median("nbytes") or 0.0) / mid / 1e9
        return plots.Bar(label, rate, f"{rate:.2f}", ours)
    return plots.Bar(label, mid, shown(mid, group.unit), ours)


def write(results: Results, groups: Sequence[Group], docs: Path) -> None:
    """Write performance.md and the pictures into a directory, such as docs/measured."""
    (docs / "performance").mkdir(exist_ok=True)
    for group in groups:
        if svg := picture(group, results):
            (docs / "performance" / f"{group.key}.svg").write_text(svg)
    (docs / "performance.md").write_text(document(results, groups))
