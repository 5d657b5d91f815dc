"""What tags hold, whether they are sound, and what a restore reads: facts as text and tables."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from xla_ckpt.errors import StorageError, UnsupportedStateError
from xla_ckpt.sharding.sections import has_sections
from xla_ckpt.tables.rows import Rows
from xla_ckpt.tables.texts import MAX_SIBLINGS, collapsed, count, shape, short, size, speed, when
from xla_ckpt.tree import schema

MAX_RANKS = 16
"""Ranks that `explain` lists; the rest is a range."""


def tag_table(facts: dict[str, Any]) -> RenderableType:
    """The answer of ``ls``."""
    parts = [_tags(facts)] if facts["tags"] or not facts["roots"] else []
    if facts["roots"]:
        below = [(r["path"], str(r["tags"]), r["newest"]) for r in facts["roots"]]
        title = "\nBelow it:" if facts["tags"] else f"No tags in {facts['path']}; below it:"
        parts.append(Rows(title, ("root", ">tags", "newest"), below))
    if facts["beside"]:
        what = [(b["name"], b["layout"], "" if b["complete"] else "not complete") for b in facts["beside"]]
        parts.append(Rows("\nIn it, and no tags (give the path of one):", ("name", "layout", "notes"), what))
    return parts[0] if len(parts) == 1 else Group(*parts)


def _tags(facts: dict[str, Any]) -> RenderableType:
    if not facts["tags"]:
        return Text(f"No tags in {facts['path']}")
    rows = []
    knows_policy = any(t.get("kept") for t in facts["tags"])
    for t in facts["tags"]:
        arrays, files, ranks = ("?" if t[k] is None else str(t[k]) for k in ("arrays", "files", "ranks"))
        numbers = (str(t["sequence"] or "?"), when(t["created"]), arrays, size(t["nbytes"]), files, ranks)
        kept = [kept_because(t)] if knows_policy else []
        rows.append((t["tag"], *numbers, *kept, notes(t, newest=t["tag"] == facts["newest"])))
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


def kept_because(t: Mapping[str, Any]) -> str:
    """Why a tag is kept, in a list of tags of which one says the policy of its save."""
    return ", ".join(t["kept"]) or "nothing keeps it"


def notes(t: Mapping[str, Any], *, newest: bool) -> str:
    """What else is to be said of a tag in a list; of a damaged one, the problem."""
    marks = ([t["where"]] if t.get("where") else []) + (["newest"] if newest else [])
    marks += ["pinned"] if t["pinned"] else []
    marks += [t["layout"]] if t["layout"] not in (None, "native") else []
    marks += [t["note"]] if t["note"] else []
    return t["problem"] or ", ".join(marks)


def tag(facts: dict[str, Any]) -> RenderableType:
    """The answer of ``show``."""
    about = (
        f"[bold]{escape(facts['tag'])}[/bold] in {escape(facts['path'])}: {_origin(facts)}, {_size(facts)} in "
        f"{count(len(facts['files']), 'file')} by {count(facts['ranks'], 'rank')}"
        + (f", mesh {facts['mesh']}" if facts["mesh"] else "")
        + (", pinned" if facts["pinned"] else "")
        + (f", parity: {facts['parity']}" if facts["parity"] else "")
        + (f", {facts['note']}" if facts["note"] else "")
    )
    parts: list[RenderableType] = [Text.from_markup(about)]
    if facts["parts"]:
        sums = [f"{p['part']}: {count(p['arrays'], 'array')}, {size(p['nbytes'])}" for p in facts["parts"]]
        parts.append(Text("; ".join(sums)))
    if facts["arrays"]:
        arrays = [
            (a["leaf"], a["dtype"], shape(a["shape"]), size(a["nbytes"]), str(a["shards"])) for a in facts["arrays"]
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
    values = {leaf: value for leaf, value in facts["values"].items() if not schema.is_said_of_base(leaf)}
    if not values and not facts["arrays"]:
        values = facts["values"]  # nothing else was asked for
    if values:
        parts.append(plain(values))
    if number := len(facts["values"]) - len(values):
        parts.append(Text(f"\n{number} values say which base model it is for: --leaf {schema.BASE} lists them"))
    return Group(*parts)


def plain(values: Mapping[str, Any]) -> Rows:
    """The plain values of a tag."""
    rows = collapsed({leaf or "(root)": [value] for leaf, value in values.items()})
    return Rows(f"\n{len(values)} plain values", ("leaf", "value"), rows)


def _unknown(group: dict[str, Any]) -> list[RenderableType]:
    """Arrays that cannot be read, and once the reason and the way out."""
    why = Text.from_markup(f"[yellow]why:[/yellow] {escape(group['problem'])}. {escape(group['hint'] or '')}")
    if not any(a["tensors"] for a in group["arrays"]):
        names = ", ".join(a["leaf"] for a in group["arrays"])
        return [Text(f"\n{names}: not known what is in it", style="bold"), why]
    number = count(len(group["arrays"]), "array")
    title = Text(f"\n{number} that cannot be read", style="bold")
    differ = any(a["found"] or a["expected"] for a in group["arrays"])
    rows = []
    for a in group["arrays"]:
        row = [a["leaf"], a["dtype"] or "-", shape(a["rank_shape"]), str(a["tensors"]), size(a["nbytes"])]
        wanted = f"wanted {a['expected']}" if a["expected"] and not a["found"] else a["found"] or ""
        rows.append([*row, *([wanted] if differ else [])])
    columns = ("leaf", "dtype", ">each rank has", "?>tensors", ">stored", *(["found"] if differ else []))
    return [title, Rows("", columns, rows), why]


def _origin(facts: dict[str, Any]) -> str:
    if not facts["sequence"]:
        return f"written by {facts['layout']}"
    layout = "" if facts["layout"] == "native" else f", {facts['layout']} layout"
    return f"commit {facts['sequence']}, saved {when(facts['created'])}{layout}"


def _size(facts: dict[str, Any]) -> str:
    """The size of a tag, as a list of tags has it."""
    return size(facts["nbytes"]) + (" of arrays" if facts["sequence"] else "")  # another library's has no index


def outline(title: str, value: Any) -> RenderableType:
    """The first level of a program's value: numbers and texts, and the types of what else there is."""
    items = value.items() if isinstance(value, Mapping) else [("", value)]
    simple = str | int | float | None
    rows = [(str(k), short(v) if isinstance(v, simple) else type(v).__name__) for k, v in islice(items, MAX_SIBLINGS)]
    more = [(f"and {len(value) - MAX_SIBLINGS} more", "")] if len(rows) == MAX_SIBLINGS < len(value) else []
    return Rows(title, ("name", "value"), [*rows, *more])


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
            f"[green]sound[/green]  {where}: {count(facts['arrays'], stored)} in "
            f"{count(facts['files'], 'file')}, {size(facts['nbytes'])} read, {checked}{f' ({rate})' if rate else ''}"
        )
    else:
        # A file of a kind that is not read here may be whole, as one may that the storage does not give away.
        kinds = {StorageError.__name__, UnsupportedStateError.__name__}
        unread = all(problem["kind"] in kinds for problem in facts["problems"])
        word = "COULD NOT BE READ" if unread else "DAMAGED"
        lines.append(f"[red]{word}[/red]  {where}: {count(len(facts['problems']), 'problem')}")
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
