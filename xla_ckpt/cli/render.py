"""Facts as tables that a person likes to read."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from xla_ckpt.engine.phases import LEAST_RATED
from xla_ckpt.sharding.sections import has_sections

MAX_RANKS = 16
"""Ranks that `explain` lists; the rest is a range."""

MAX_SIBLINGS = 32
"""Numbers in one container that are shown one by one."""

MAX_LAID_OUT = 500
"""Rows of a table that rich lays out; longer ones are plain lines."""

MAX_VALUE = 60
"""Longest plain value that is shown whole."""

FOLDED = 40
"""Narrowest column of texts for whose sake other columns are left out; a wider one is folded (characters)."""


def size(nbytes: int | None) -> str:
    """Bytes for people.

    >>> size(999), size(123_456_789), size(None)
    ('999 B', '123.5 MB', '?')
    """
    if nbytes is None:
        return "?"
    amount = float(nbytes)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if amount < 1000 or unit == "TB":
            return f"{nbytes} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    raise AssertionError("unreachable")


def speed(nbytes: int, seconds: float) -> str:
    """A rate for people; none of too few bytes.

    >>> speed(123_000_000, 0.5), speed(248, 0.002)
    ('246.0 MB/s', '')
    """
    return f"{size(int(nbytes / seconds))}/s" if nbytes >= LEAST_RATED and seconds > 0 else ""


def when(created: str) -> str:
    """A time of the manifest in the local time zone.

    >>> when("")
    '?'
    """
    try:
        return datetime.datetime.fromisoformat(created).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return "?"


class Rows:
    """A table: as wide as the terminal, or in a pipe one line for each row, with tabs between the cells.

    Args:
        title: The line above it, on a terminal: a pipe has the names of the columns in its first line.
        columns: Names of the columns. ``>`` before one moves its cells to the right; ``?`` says that the column is left
            out, the last such one first, where the terminal is too narrow for all.
        rows: Plain cells.
        red: Numbers of rows whose last cell tells a problem.
    """

    def __init__(
        self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], red: frozenset[int] = frozenset()
    ) -> None:
        self.title, self.rows, self.red = title, rows, red
        self.names = [column.lstrip("?>") for column in columns]
        self.to_right = [">" in column for column in columns]
        self.gives_way = [column.startswith("?") for column in columns]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.title and options.is_terminal:
            yield Text(self.title, style="bold")
        if not options.is_terminal:
            lines = "".join("\t".join(row).rstrip("\t") + "\n" for row in (self.names, *self.rows))
            yield Segment(lines)
            return
        table = [self.names, *self.rows]
        widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
        chosen = self._chosen(widths, options.max_width)
        if len(self.rows) > MAX_LAID_OUT:
            yield from self._plain(table, widths, chosen)
        else:
            yield self._laid_out(widths, chosen, options.max_width)

    def _chosen(self, widths: list[int], room: int) -> list[int]:
        """Numbers of the columns for which there is room, and of those that do not give way."""
        chosen = list(range(len(widths)))
        for i in reversed(range(len(widths))):
            if sum(min(widths[j], FOLDED) + 2 for j in chosen) - 2 > room and self.gives_way[i]:
                chosen.remove(i)
        return chosen

    def _plain(self, table: list[Sequence[str]], widths: list[int], chosen: list[int]) -> Iterator[Segment]:
        """Padded lines: rich takes a third of a millisecond to lay out each row of a table of its own."""
        for row in table:
            cells = [row[i].rjust(widths[i]) if self.to_right[i] else row[i].ljust(widths[i]) for i in chosen]
            yield Segment(" ".join(cells).rstrip() + "\n")

    def _laid_out(self, widths: list[int], chosen: list[int], room: int) -> Table:
        table = Table(header_style="bold", box=None, pad_edge=False)
        whole = sum(widths[i] + 2 for i in chosen) - 2 <= room
        for i in chosen:
            right = self.to_right[i]
            # Numbers are never folded: half of one looks like another one.
            table.add_column(
                self.names[i], justify="right" if right else "left", no_wrap=whole or right, overflow="fold"
            )
        for number, row in enumerate(self.rows):
            cells = [Text(row[i]) for i in chosen]
            if number in self.red:
                cells[-1].stylize("red")
            table.add_row(*cells)
        return table


def tag_table(facts: dict[str, Any]) -> RenderableType:
    """The answer of ``ls``."""
    if facts["roots"]:
        roots = [(r["path"], str(r["tags"]), r["newest"]) for r in facts["roots"]]
        return Rows(f"No tags in {facts['path']}; below it:", ("root", ">tags", "newest"), roots)
    if not facts["tags"]:
        return Text(f"No tags in {facts['path']}")
    rows = []
    knows_policy = any(t.get("kept") for t in facts["tags"])
    for i, t in enumerate(facts["tags"]):
        marks = ([t["where"]] if t.get("where") else []) + (["newest"] if i == len(facts["tags"]) - 1 else [])
        marks += ["pinned"] if t["pinned"] else []
        marks += [t["layout"]] if t["layout"] not in (None, "native") else []
        marks += [t["note"]] if t["note"] else []
        arrays, files, ranks = ("?" if t[k] is None else str(t[k]) for k in ("arrays", "files", "ranks"))
        numbers = (str(t["sequence"] or "?"), when(t["created"]), arrays, size(t["nbytes"]), files, ranks)
        kept = [", ".join(t["kept"]) or "nothing keeps it"] if knows_policy else []
        rows.append((t["tag"], *numbers, *kept, t["problem"] or ", ".join(marks)))
    red = frozenset(i for i, t in enumerate(facts["tags"]) if t["problem"])
    return Rows(
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


def tag(facts: dict[str, Any]) -> RenderableType:
    """The answer of ``show``."""
    about = (
        f"[bold]{escape(facts['tag'])}[/bold] in {escape(facts['path'])}: {_origin(facts)}, {size(facts['nbytes'])} in "
        f"{count(len(facts['files']), 'file')} by {count(facts['ranks'], 'rank')}"
        + (f", mesh {facts['mesh']}" if facts["mesh"] else "")
        + (", pinned" if facts["pinned"] else "")
        + (f", parity: {facts['parity']}" if facts["parity"] else "")
    )
    parts: list[RenderableType] = [Text.from_markup(about)]
    if facts["parts"]:
        sums = [f"{p['part']}: {count(p['arrays'], 'array')}, {size(p['nbytes'])}" for p in facts["parts"]]
        parts.append(Text("; ".join(sums)))
    if facts["arrays"]:
        arrays = [
            (a["leaf"], a["dtype"], _shape(a["shape"]), size(a["nbytes"]), str(a["shards"])) for a in facts["arrays"]
        ]
        parts.append(Rows(f"\n{len(arrays)} arrays", ("leaf", "dtype", ">shape", ">size", "?>shards"), arrays))
    if facts["divergent"]:
        names = escape(", ".join(facts["divergent"]))
        parts.append(
            Text.from_markup(f"\n[yellow]replicas differed, and the bytes of the first are stored:[/yellow] {names}")
        )
    for group in facts["unknown"]:
        parts += _unknown(group)
    if facts["aliases"]:
        shared = [*facts["aliases"].items()]
        parts.append(Rows(f"\n{len(shared)} shared arrays", ("leaf", "is stored as"), shared))
    if facts["values"]:
        title = f"\n{len(facts['values'])} plain values"
        parts.append(Rows(title, ("leaf", "value"), collapsed({n: [v] for n, v in facts["values"].items()})))
    return Group(*parts)


def _unknown(group: dict[str, Any]) -> list[RenderableType]:
    """Arrays of which it is not known how they were split, and once the reason and the way out."""
    why = Text.from_markup(f"[yellow]why:[/yellow] {escape(group['problem'])}. {escape(group['hint'] or '')}")
    if not any(a["tensors"] for a in group["arrays"]):
        names = ", ".join(a["leaf"] for a in group["arrays"])
        return [Text(f"\n{names}: not known what is in it", style="bold"), why]
    number = count(len(group["arrays"]), "array")
    title = Text(f"\n{number} of which it is not known how the ranks had them split", style="bold")
    differ = any(a["found"] or a["expected"] for a in group["arrays"])
    rows = []
    for a in group["arrays"]:
        row = [a["leaf"], a["dtype"] or "-", _shape(a["rank_shape"]), str(a["tensors"]), size(a["nbytes"])]
        wanted = f"wanted {a['expected']}" if a["expected"] and not a["found"] else a["found"] or ""
        rows.append([*row, *([wanted] if differ else [])])
    columns = ("leaf", "dtype", ">each rank has", "?>tensors", ">stored", *(["found"] if differ else []))
    return [title, Rows("", columns, rows), why]


def _shape(shape: list[int] | None) -> str:
    """A shape for people.

    >>> _shape([2, 3]), _shape([]), _shape(None)
    ('2 x 3', 'scalar', '-')
    """
    return "-" if shape is None else " x ".join(map(str, shape)) or "scalar"


def _origin(facts: dict[str, Any]) -> str:
    if not facts["sequence"]:
        return f"written by {facts['layout']}"
    layout = "" if facts["layout"] == "native" else f", {facts['layout']} layout"
    return f"commit {facts['sequence']}, saved {when(facts['created'])}{layout}"


def collapsed(values: Mapping[str, Sequence[Any]]) -> list[tuple[str, ...]]:
    """A row for each leaf, with the text of its plain values; of a long list of numbers (a generator's) one for all.

    >>> collapsed({"a/0": [1], "b": ["x"]})
    [('a/0', '1'), ('b', '"x"')]
    """
    numbers = {leaf: leaf.rpartition("/")[0] for leaf, row in values.items() if all(map(_is_number, row))}
    siblings = Counter(numbers.values())
    rows: dict[str, tuple[str, ...]] = {}
    for leaf, row in values.items():
        parent = numbers.get(leaf)
        if parent is not None and siblings[parent] > MAX_SIBLINGS:
            rows[f"{parent}/..."] = (f"{siblings[parent]} numbers",) * len(row)
        else:
            rows[leaf] = tuple(map(short, row))
    return [(leaf, *texts) for leaf, texts in rows.items()]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def short(value: Any) -> str:
    """A plain value as JSON, cut off where it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_VALUE else text[:MAX_VALUE] + "..."


def count(n: int, word: str) -> str:
    """A number with its noun.

    >>> count(1, "file"), count(2, "file")
    ('1 file', '2 files')
    """
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


def verdict(facts: dict[str, Any]) -> RenderableType:
    """The answer of ``verify``."""
    lines = []
    where = f"{escape(facts['tag'])} in {escape(facts['path'])}"
    if facts["ok"]:
        rate = speed(facts["nbytes"], facts["seconds"])
        # Of other libraries' tags every rank's part counts: nothing says here which of them are one array.
        stored = "array" if facts["digests"] else "stored tensor"
        checked = "every byte as it was saved" if facts["digests"] else "all files as they say themselves"
        lines.append(
            f"[green]sound[/green]  {where}: {count(facts['arrays'], stored)}, {size(facts['nbytes'])} in "
            f"{count(facts['files'], 'file')}, {checked}{f' ({rate})' if rate else ''}"
        )
    else:
        lines.append(f"[red]DAMAGED[/red]  {where}: {count(len(facts['problems']), 'problem')}")
        lines += [f"  {escape(p['message'])}" for p in facts["problems"]]
    lines += [f"  [green]repaired:[/green] {escape(name)}" for name in facts["repaired"]]
    lines += [f"  [yellow]not part of the tag:[/yellow] {escape(name)}" for name in facts["strangers"]]
    if others := facts["unverified"]:
        lines.append(
            f"  It is the newest tag. {count(others, 'other one')} of this directory {'is' if others == 1 else 'are'} "
            "not verified: --all verifies all tags, --tag NAME another one."
        )
    return Text.from_markup("\n".join(lines))


def explanation(facts: dict[str, Any]) -> RenderableType:
    """The answer of ``explain``."""
    saved = f"saved by {count(facts['saved_ranks'], 'rank')}" + (
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
        rows.append((str(r["rank"]), size(r["needed_bytes"]), size(r["read_bytes"]), ratio, str(len(r["files"])), most))
    parts.append(Rows("", (">rank", ">needs", ">reads", "?>reads/needs", "?>files", "most from"), rows))
    if (more := len(facts["ranks"]) - MAX_RANKS) > 0:
        parts.append(Text(f"and {more} ranks more (--json lists them all)"))
    reads = [r["read_bytes"] for r in facts["ranks"]]
    split = f"{count(len(facts['split']), 'array')} {'is' if len(facts['split']) == 1 else 'are'} split"
    parts.append(Text(f"all ranks together read {size(sum(reads))}; {split}"))
    parts += map(Text, _in_sections(facts["split"]))
    return Group(*parts)


def _in_sections(split: dict[str, list[Any]]) -> list[str]:
    """A line for each way in which arrays are split into sections.

    >>> _in_sections({"model/a": [("tp", (8, "4x2/2")), None], "model/b": [("tp", (8, "4x2/2"))], "model/c": ["tp"]})
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
