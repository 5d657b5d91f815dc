"""Render the output of commands as text and tables: ls, show, verify, explain, diff, and reports of saves and loads.

Each function takes the plain facts that ``--json`` prints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from xla_ckpt.core.sharding.sharding import has_sections
from xla_ckpt.core.tree import schema
from xla_ckpt.display import make_printable
from xla_ckpt.errors import StorageError, UnsupportedStateError
from xla_ckpt.rendering.formatting import (
    MAX_SIBLINGS,
    collapse_leaves,
    collapse_values,
    format_bytes,
    format_count,
    format_duration,
    format_rate,
    format_shape,
    format_time,
    format_value,
)
from xla_ckpt.rendering.table import Bar, PlainTable

MAX_RANKS = 16
"""Maximum number of ranks that `explain` lists."""


def render_tag_list(facts: dict[str, Any]) -> RenderableType:
    """Render the output of ``ls``."""
    parts = [_render_tags(facts)] if facts["tags"] or not facts["roots"] else []
    if facts["roots"]:
        below = [(r["path"], str(r["tags"]), r["newest"]) for r in facts["roots"]]
        title = "\nBelow it:" if facts["tags"] else f"No tags in {facts['path']}; below it:"
        parts.append(PlainTable(title, ("root", ">tags", "newest"), below))
    if facts["beside"]:
        what = [(b["name"], b["layout"], "" if b["complete"] else "not complete") for b in facts["beside"]]
        parts.append(PlainTable("\nIn it, and no tags (give the path of one):", ("name", "layout", "notes"), what))
    return parts[0] if len(parts) == 1 else Group(*parts)


def _render_tags(facts: dict[str, Any]) -> RenderableType:
    if not facts["tags"]:
        return Text(f"No tags in {facts['path']}")
    rows = []
    knows_policy = any(t.get("kept") for t in facts["tags"])
    for t in facts["tags"]:
        arrays, files, ranks = ("?" if t[k] is None else str(t[k]) for k in ("arrays", "files", "ranks"))
        numbers = (
            str(t["sequence"] or "?"),
            format_time(t["created"]),
            arrays,
            format_bytes(t["nbytes"]),
            files,
            ranks,
        )
        kept = [format_kept_reason(t)] if knows_policy else []
        rows.append((t["tag"], *numbers, *kept, format_notes(t, newest=t["tag"] == facts["newest"])))
    red = frozenset(i for i, t in enumerate(facts["tags"]) if t["problem"])
    return PlainTable(
        facts["path"],
        (
            "tag",
            "?>commit",
            "?saved",
            "?>arrays",
            ">size",
            "?>files",
            "?>ranks",
            *(["?kept because"] if knows_policy else []),
            "notes",
        ),
        rows,
        red,
    )


def format_kept_reason(t: Mapping[str, Any]) -> str:
    """Format the reasons why retention keeps a tag, for a list of tags."""
    return ", ".join(t["kept"]) or "nothing keeps it"


def format_notes(t: Mapping[str, Any], *, newest: bool) -> str:
    """Format the notes about a tag in a list, or the problem if it is damaged."""
    marks = ([t["where"]] if t.get("where") else []) + (["newest"] if newest else [])
    marks += ["pinned"] if t["pinned"] else []
    marks += [t["layout"]] if t["layout"] not in (None, "native") else []
    marks += [t["note"]] if t["note"] else []
    return t["problem"] or ", ".join(marks)


def render_tag(facts: dict[str, Any]) -> RenderableType:
    """Render the output of ``show``."""
    about = (
        f"[bold]{escape(facts['tag'])}[/bold] in {escape(facts['path'])}: {_format_origin(facts)}, "
        f"{_format_size(facts)} in {format_count(len(facts['files']), 'file')} "
        f"by {format_count(facts['ranks'], 'rank')}"
        + (f", mesh {facts['mesh']}" if facts["mesh"] else "")
        + (", pinned" if facts["pinned"] else "")
        + (f", parity: {facts['parity']}" if facts["parity"] else "")
        + (f", {facts['note']}" if facts["note"] else "")
    )
    parts: list[RenderableType] = [Text.from_markup(about)]
    if facts["parts"]:
        sums = [
            f"{p['part']}: {format_count(p['arrays'], 'array')}, {format_bytes(p['nbytes'])}" for p in facts["parts"]
        ]
        parts.append(Text("; ".join(sums)))
    if facts["arrays"]:
        arrays = [
            (a["leaf"], a["dtype"], format_shape(a["shape"]), format_bytes(a["nbytes"]), str(a["shards"]))
            for a in facts["arrays"]
        ]
        parts.append(PlainTable(f"\n{len(arrays)} arrays", ("leaf", "dtype", ">shape", ">size", "?>shards"), arrays))
    if facts["divergent"]:
        names = escape(", ".join(facts["divergent"]))
        parts.append(
            Text.from_markup(f"\n[yellow]replicas differed, and the bytes of the first are stored:[/yellow] {names}")
        )
    for group in facts["unknown"]:
        parts += _render_unreadable(group)
    if facts["aliases"]:
        shared = [*facts["aliases"].items()]
        parts.append(PlainTable(f"\n{len(shared)} shared arrays", ("leaf", "is stored as"), shared))
    values = {leaf: value for leaf, value in facts["values"].items() if not schema.is_base_info(leaf)}
    if not values and not facts["arrays"]:
        values = facts["values"]  # no other content was requested
    if values:
        parts.append(render_plain_values(values))
    if number := len(facts["values"]) - len(values):
        parts.append(Text(f"\n{number} values say which base model it is for: --leaf {schema.BASE} lists them"))
    return Group(*parts)


def render_plain_values(values: Mapping[str, Any]) -> PlainTable:
    """Render the plain values of a tag."""
    rows = collapse_values({leaf or "(root)": [value] for leaf, value in values.items()})
    return PlainTable(f"\n{len(values)} plain values", ("leaf", "value"), rows)


def _render_unreadable(group: dict[str, Any]) -> list[RenderableType]:
    """Render arrays that cannot be read, with the reason and the hint."""
    why = Text.from_markup(f"[yellow]why:[/yellow] {escape(group['problem'])}. {escape(group['hint'] or '')}")
    if not any(a["tensors"] for a in group["arrays"]):
        names = ", ".join(a["leaf"] for a in group["arrays"])
        return [Text(f"\n{names}: not known what is in it", style="bold"), why]
    number = format_count(len(group["arrays"]), "array")
    title = Text(f"\n{number} that cannot be read", style="bold")
    differ = any(a["found"] or a["expected"] for a in group["arrays"])
    rows = []
    for a in group["arrays"]:
        row = [
            a["leaf"],
            a["dtype"] or "-",
            format_shape(a["rank_shape"]),
            str(a["tensors"]),
            format_bytes(a["nbytes"]),
        ]
        wanted = f"wanted {a['expected']}" if a["expected"] and not a["found"] else a["found"] or ""
        rows.append([*row, *([wanted] if differ else [])])
    columns = ("leaf", "dtype", ">each rank has", "?>tensors", ">stored", *(["found"] if differ else []))
    return [title, PlainTable("", columns, rows), why]


def _format_origin(facts: dict[str, Any]) -> str:
    if not facts["sequence"]:
        return f"written by {facts['layout']}"
    layout = "" if facts["layout"] == "native" else f", {facts['layout']} layout"
    return f"commit {facts['sequence']}, saved {format_time(facts['created'])}{layout}"


def _format_size(facts: dict[str, Any]) -> str:
    """Format the size of a tag, as in a list of tags."""
    return format_bytes(facts["nbytes"]) + (" of arrays" if facts["sequence"] else "")  # other libraries have no index


def render_outline(title: str, value: Any) -> RenderableType:
    """Render the first level of a program's value: numbers, strings, and the types of other values."""
    items = value.items() if isinstance(value, Mapping) else [("", value)]
    simple = str | int | float | None
    rows = [
        (str(k), format_value(v) if isinstance(v, simple) else type(v).__name__) for k, v in islice(items, MAX_SIBLINGS)
    ]
    more = [(f"and {len(value) - MAX_SIBLINGS} more", "")] if len(rows) == MAX_SIBLINGS < len(value) else []
    return PlainTable(title, ("name", "value"), [*rows, *more])


def render_verification(facts: dict[str, Any]) -> RenderableType:
    """Render the output of ``verify``."""
    lines = []
    where = f"{escape(facts['tag'])} in {escape(facts['path'])}"
    if facts["ok"]:
        rate = format_rate(facts["nbytes"], facts["seconds"])
        # In checkpoints of other libraries each rank's part counts, because the arrays that they form are unknown here.
        stored = "array" if facts["digests"] else "stored tensor"
        checked = "every byte as it was saved" if facts["digests"] else "all files as they say themselves"
        lines.append(
            f"[green]sound[/green]  {where}: {format_count(facts['arrays'], stored)} in "
            f"{format_count(facts['files'], 'file')}, {format_bytes(facts['nbytes'])} read, {checked}"
            f"{f' ({rate})' if rate else ''}"
        )
    else:
        # A file of an unsupported kind, or one that the storage cannot return, may be intact.
        kinds = {StorageError.__name__, UnsupportedStateError.__name__}
        unread = all(problem["kind"] in kinds for problem in facts["problems"])
        word = "COULD NOT BE READ" if unread else "DAMAGED"
        lines.append(f"[red]{word}[/red]  {where}: {format_count(len(facts['problems']), 'problem')}")
        lines += [f"  {escape(p['message'])}" for p in facts["problems"]]
    lines += [f"  [green]repaired:[/green] {escape(name)}" for name in facts["repaired"]]
    lines += [f"  [yellow]not part of the tag:[/yellow] {escape(name)}" for name in facts["strangers"]]
    if others := facts["unverified"]:
        lines.append(
            f"  It is the newest tag. {format_count(others, 'other one')} of this directory "
            f"{'is' if others == 1 else 'are'} not verified: --all verifies all tags, --tag NAME another one."
        )
    return Text.from_markup("\n".join(lines))


def render_explanation(facts: dict[str, Any]) -> RenderableType:
    """Render the output of ``explain``."""
    saved = f"saved by {format_count(facts['saved_ranks'], 'rank')}" + (
        f" ({facts['saved_mesh']})" if facts["saved_mesh"] else ""
    )
    verdict_ = "[green]can be restored[/green]" if facts["ok"] else "[red]CANNOT be restored[/red]"
    where = f"[bold]{escape(facts['tag'])}[/bold] in {escape(facts['path'])}"
    parts: list[RenderableType] = [Text.from_markup(f"{where}, {saved}, {verdict_} on {facts['mesh']}")]
    parts += [Text.from_markup(f"  [red]problem:[/red] {escape(p)}") for p in facts["problems"]]
    parts += [Text.from_markup(f"  [yellow]note:[/yellow] {escape(n)}") for n in facts["notes"]]
    rows = []
    for r in facts["ranks"][:MAX_RANKS]:
        ratio = f"{r['read_bytes'] / r['needed_bytes']:.3f}" if r["needed_bytes"] else "-"
        most = max(r["files"], key=r["files"].get, default="-")
        rows.append(
            (
                str(r["rank"]),
                format_bytes(r["needed_bytes"]),
                format_bytes(r["read_bytes"]),
                ratio,
                str(len(r["files"])),
                most,
            )
        )
    parts.append(PlainTable("", (">rank", ">needs", ">reads", "?>reads/needs", "?>files", "most from"), rows))
    if (more := len(facts["ranks"]) - MAX_RANKS) > 0:
        parts.append(Text(f"and {more} ranks more (--json lists them all)"))
    reads = [r["read_bytes"] for r in facts["ranks"]]
    split = f"{format_count(len(facts['split']), 'array')} {'is' if len(facts['split']) == 1 else 'are'} split"
    parts.append(Text(f"all ranks together read {format_bytes(sum(reads))}; {split}"))
    parts += map(Text, _format_sections(facts["split"]))
    return Group(*parts)


def _format_sections(split: dict[str, list[Any]]) -> list[str]:
    """Return a line for each way in which arrays are split into sections.

    >>> sections = ("tp", (8, "4x2/2"))
    >>> _format_sections({"model/a": [sections, None], "model/b": [sections], "model/c": ["tp"]})
    ['  dim 0 over tp in sections of 8 + 4x2/2: model/a and 1 more']
    """
    leaves_by_text: dict[str, list[str]] = {}
    for leaf, dims in split.items():
        for dim, how in enumerate(dims):
            if has_sections(how):
                *axes, sections = how
                text = f"  dim {dim} over {' and '.join(axes)} in sections of {' + '.join(map(str, sections))}"
                leaves_by_text.setdefault(text, []).append(leaf)
    return [
        f"{text}: {of[0]}{f' and {len(of) - 1} more' if len(of) > 1 else ''}" for text, of in leaves_by_text.items()
    ]


MAX_LISTED_RANKS = 4
"""Maximum number of ranks whose phases are shown, the slowest first."""

BAR_WIDTHS = 8, 50
"""Minimum and maximum width of a bar (characters)."""


def render_save_report(facts: dict[str, Any]) -> RenderableType:
    """Render the output of ``show --report``."""
    ranks, whole = facts["measured"], facts["seconds"]
    where = f"[bold]{escape(facts['tag'])}[/bold] in {escape(facts['path'])}"
    about = f"{where}: saved by {format_count(facts['ranks'], 'rank')}"
    parts: list[RenderableType] = [
        Text.from_markup(f"{about}, {format_duration(whole)} from the call to the start of its commit")
    ]
    for number, rank in enumerate(ranks[:MAX_LISTED_RANKS]):
        slowest = " (the slowest)" if number == 0 and facts["ranks"] > 1 else ""
        title = (
            f"\nrank {rank['rank']}{slowest}: {format_bytes(rank['nbytes'])} in {format_count(rank['files'], 'file')}, "
            f"its part done after {format_duration(rank['done'])}, the caller waited {format_duration(rank['stall'])}"
        )
        parts += [Text(title, style="bold"), build_phase_table(rank["phases"], whole)]
    if (more := facts["ranks"] - len(ranks[:MAX_LISTED_RANKS])) > 0:
        parts.append(
            Text(f"\nand {format_count(more, 'rank')} more that {'was' if more == 1 else 'were'} done earlier")
        )
    return Group(*parts)


def render_call_report(facts: dict[str, Any]) -> RenderableType:
    """Render the report of a save or load of this process, without empty fields."""
    phases = facts["phases"]
    times = ("seconds", "stall")
    sizes = ("nbytes", "shared", "needed_bytes", "read_bytes", "proven_bytes")
    rows = []
    for name, value in facts.items():
        if name != "phases" and value not in (None, (), "", 0):
            text = format_duration(value) if name in times else format_bytes(value) if name in sizes else str(value)
            rows.append((name, ", ".join(value) if isinstance(value, tuple) else text))
    last = max((phase["ended"] for phase in phases.values()), default=0.0)
    return Group(PlainTable("", ("report", "value"), rows), build_phase_table(phases, last))


def build_phase_table(phases: dict[str, Any], total_seconds: float) -> PhaseTable:
    """Build a table with a row per phase of a call that took `total_seconds` seconds."""
    rows: list[tuple[str, Bar, str, str, str]] = []
    for name, phase in phases.items():
        took, nbytes = phase["ended"] - phase["began"], phase["nbytes"]
        where = Bar(
            phase["began"] / total_seconds if total_seconds else 0.0,
            phase["ended"] / total_seconds if total_seconds else 0.0,
        )
        rows.append(
            (name, where, format_duration(took), format_bytes(nbytes) if nbytes else "", format_rate(nbytes, took))
        )
    return PhaseTable("", ("stage", "when", ">took", ">bytes", ">rate"), rows)


class PhaseTable(PlainTable):
    """Table whose bar column shrinks if there is little space. A pipe gets the same output as a terminal."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name, right in zip(self.names, self.right_aligned, strict=True):
            table.add_column(name, justify="right" if right else "left", no_wrap=name != "when")
        for row in self.rows:
            table.add_row(*(Text(make_printable(cell)) if isinstance(cell, str) else _DrawnBar(cell) for cell in row))
        yield table


class _DrawnBar:
    """A bar that fills the available width."""

    def __init__(self, bar: Bar) -> None:
        self.bar = bar

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, character = min(options.max_width, BAR_WIDTHS[1]), "#" if options.ascii_only else "█"
        yield Text(draw_bar(self.bar, width, character))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(*BAR_WIDTHS)


def draw_bar(bar: Bar, width: int, character: str) -> str:
    """Draw a bar in a line of text, at least one character long.

    >>> [draw_bar(Bar(*ends), 8, "#") for ends in ((0.0, 0.5), (0.49, 0.51), (1.0, 1.0))]
    ['####', '   ##', '       #']
    """
    first = min(max(math.floor(bar.begin * width), 0), width - 1)
    last = min(max(math.ceil(bar.end * width), first + 1), width)
    return " " * first + character * (last - first)


def render_diff(facts: dict[str, Any]) -> RenderableType:
    """Render the output of ``diff``."""
    a, b = (_format_side(**facts[side]) for side in "ab")
    equal = format_count(facts["equal"], "array")
    verdict = f"equal: {equal}" if facts["same"] else f"different; {equal} equal"
    base = "" if facts["base"] is None else f"\n{_BASE_TEXTS[facts['base']]}"
    parts: list[RenderableType] = [Text(f"a: {a}\nb: {b}\n{verdict}{base}")]
    for name, title in (("parts", "moved, by part"), ("moved", f"{format_count(len(facts['moved']), 'array')} moved")):
        if facts[name]:
            rows = [
                (m.get("leaf", m.get("part")), str(m["elements"]), *(f"{float(m[k]):.3g}" for k in _MEASURES))
                for m in facts[name]
            ]
            of = "leaf" if name == "moved" else "part"
            parts.append(PlainTable(f"\n{title}", (of, "?>elements", ">max abs", ">relative L2"), rows))
    if facts["retyped"]:
        types = [(d["leaf"], d["a"], d["b"]) for d in facts["retyped"]]
        parts.append(PlainTable(f"\n{len(types)} of another type or shape", ("leaf", "a", "b"), types))
    if facts["values"]:
        values = collapse_values({d["leaf"]: (d["a"], d["b"]) for d in facts["values"]})
        parts.append(PlainTable(f"\n{len(facts['values'])} plain values differ", ("leaf", "a", "b"), values))
    parts += [
        PlainTable(
            f"\n{len(leaves)} only in {side}", (f"leaf only in {side}",), [(leaf,) for leaf in collapse_leaves(leaves)]
        )
        for side in "ab"
        if (leaves := facts[f"only_in_{side}"])
    ]
    return Group(*parts)


def _format_side(path: str, tag: str, note: str) -> str:
    return f"{tag} in {path}{f' ({note})' if note else ''}"


_BASE_TEXTS = {
    True: "both are for the same base model, by the digests that they have of it",
    False: "they are for different base models, by what they have of them",
}

_MEASURES = ("max_abs", "relative")
