"""HTML pages, SVG drawings and documents of ``xla-ckpt view``, rendered from plain JSON. Pure.

Every drawing has a title that describes it. Documents contain no script; their Content-Security-Policy allows only
the embedded style sheet, by its digest, and nothing from other servers. Nothing that a checkpoint contains can run.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import RenderableType

from xla_ckpt.rendering import html, reports
from xla_ckpt.rendering.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_shape,
    format_spec,
    format_time,
)
from xla_ckpt.rendering.html import escape_html
from xla_ckpt.rendering.table import Bar, Cell, PlainTable

WIDTH = 640
"""Width of a drawing, in its own units; narrow screens scale it down."""

COLORS = ("#4062bb", "#c2571a", "#2d7d46", "#8a4fae", "#a33b3b", "#3b7f8c", "#7d6a1f", "#5d6470")
"""Colors of adjacent parts. White text is readable on each."""


def _build_svg(height: float, title: str, shapes: Sequence[str]) -> str:
    return (
        f'<svg class="drawing" role="img" viewBox="0 0 {WIDTH} {height:.0f}"><title>{escape_html(title)}</title>'
        f"{''.join(shapes)}</svg>"
    )


def _draw_rectangle(x: float, y: float, width: float, height: float, color: str, title: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{max(height, 1):.1f}" fill="{color}">'
        f"<title>{escape_html(title)}</title></rect>"
    )


def _draw_text(x: float, y: float, text: str, anchor: str = "start", css_class: str = "") -> str:
    shown = f' class="{css_class}"' if css_class else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{shown}>{escape_html(text)}</text>'


def draw_timeline(tags: Sequence[Mapping[str, Any]]) -> str:
    """Draw the tags over time, with heights by size. Return nothing if fewer than two have a save time."""
    times = [(_parse_timestamp(tag["created"]), tag) for tag in tags]
    known = [(at, tag) for at, tag in times if at is not None]
    if len(known) < 2:
        return ""
    first, last = min(at for at, _ in known), max(at for at, _ in known)
    largest = max(tag["nbytes"] or 0 for _, tag in known) or 1
    parts = [f'<line x1="0" y1="90.5" x2="{WIDTH}" y2="90.5" stroke="currentColor" stroke-opacity="0.4"/>']
    for at, tag in known:
        x = (WIDTH - 12) * ((at - first) / (last - first) if last > first else 0.5)
        height = 80 * (tag["nbytes"] or 0) / largest
        says = f"{tag['tag']}: {format_bytes(tag['nbytes'])}, saved {format_time(tag['created'])}"
        parts.append(_draw_rectangle(x, 90 - height, 8, height, COLORS[1] if tag["pinned"] else COLORS[0], says))
    parts += [
        _draw_text(0, 110, format_time(_find_created(known, first))),
        _draw_text(WIDTH, 110, format_time(_find_created(known, last)), "end"),
    ]
    if any(tag["pinned"] for _, tag in known):
        parts.append(_draw_text(WIDTH / 2, 110, "orange: pinned", "middle"))
    return _build_svg(
        116, f"{len(known)} tags over time; the height is the size, the largest has {format_bytes(largest)}", parts
    )


def _parse_timestamp(created: str | None) -> float | None:
    try:
        return datetime.datetime.fromisoformat(created or "").timestamp()
    except (ValueError, OverflowError):
        return None


def _find_created(known: Sequence[tuple[float, Mapping[str, Any]]], seconds: float) -> str:
    return next(str(tag["created"]) for at, tag in known if at == seconds)


def draw_histogram(statistics: Mapping[str, Any]) -> str:
    """Draw the histogram of values, in equal bins between the smallest and the largest one."""
    counts = statistics["counts"]
    if not counts:
        return ""
    most, width, step = max(counts), WIDTH / len(counts), (statistics["high"] - statistics["low"]) / len(counts)
    parts = []
    for i, number in enumerate(counts):
        says = f"{number} from {statistics['low'] + i * step:.4g} to {statistics['low'] + (i + 1) * step:.4g}"
        height = max(120 * number / most, 1 if number else 0)
        if number:
            parts.append(_draw_rectangle(i * width, 120 - height, width - 2, height, COLORS[0], says))
    parts += [
        f'<line x1="0" y1="120.5" x2="{WIDTH}" y2="120.5" stroke="currentColor" stroke-opacity="0.4"/>',
        _draw_text(0, 140, f"{statistics['low']:.4g}"),
        _draw_text(WIDTH, 140, f"{statistics['high']:.4g}", "end"),
    ]
    span = f"from {statistics['low']:.4g} to {statistics['high']:.4g}"
    says = f"histogram {span}; the highest of {len(counts)} bars has {most}"
    return _build_svg(146, says, parts)


def draw_shards(shape: Sequence[int], shards: Sequence[Mapping[str, Any]]) -> str:
    """Draw the shards of an array over the two dims with the most splits, with the ranks that stored them."""
    if not shards or not shape:
        return ""
    cuts = [len({part["start"][dim] for part in shards}) for dim in range(len(shape))]
    chosen = sorted(sorted(range(len(shape)), key=lambda dim: (-cuts[dim], dim))[:2])
    down, right = (chosen[0], chosen[-1]) if len(chosen) > 1 else (None, chosen[0])
    height = 40.0 if down is None else 160.0
    drawn: dict[tuple[float, ...], list[Mapping[str, Any]]] = {}
    for part in shards:
        x, width = _scale_to_drawing(part, right, shape[right], WIDTH)
        y, tall = (0.0, height) if down is None else _scale_to_drawing(part, down, shape[down], height)
        drawn.setdefault((x, y, width, tall), []).append(part)
    shapes = []
    for i, ((x, y, width, tall), inside) in enumerate(drawn.items()):
        ranks = sorted({rank for part in inside for rank in part["ranks"]})
        had = f"rank{'s' if len(ranks) > 1 else ''} {_format_ranges(ranks)}" if ranks else ""
        where = ", ".join(f"{low}:{high}" for low, high in zip(inside[0]["start"], inside[0]["stop"], strict=True))
        says = f"[{where}] {had} in {inside[0]['file']}"
        shapes.append(_draw_rectangle(x + 1, y + 1, width - 2, tall - 2, COLORS[i % len(COLORS)], says))
        if had and width > 7 * len(had) and tall > 14:
            shapes.append(_draw_text(x + width / 2, y + tall / 2 + 4, had, "middle", "onfill"))
    dims = f"dim {right} to the right" + ("" if down is None else f", dim {down} downwards")
    return _build_svg(height, f"{len(shards)} parts of the array; {dims}", shapes)


def _scale_to_drawing(shard: Mapping[str, Any], dim: int, extent: int, length: float) -> tuple[float, float]:
    """Return the start and the length of a shard along a dim, in a drawing of this length."""
    low, high = shard["start"][dim], shard["stop"][dim]
    return (length * low / extent, length * (high - low) / extent) if extent else (0.0, length)


def _format_ranges(numbers: Sequence[int]) -> str:
    """Format sorted numbers as ranges.

    >>> _format_ranges([0, 1, 2, 5]), _format_ranges([3])
    ('0-2, 5', '3')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


MAX_ARRAYS = 5000
"""Maximum number of arrays listed on a page. A pattern selects from more."""

MAX_TREE_DEPTH = 8
"""Maximum depth of the array tree of a tag. Names may contain any number of dots."""

MAX_LISTED_SHARDS = 64
"""Maximum number of shards listed below the drawing of an array."""

Query = Mapping[str, str]
"""Query parameters of a page: ``{"page": "tag", "tag": "step_10"}``; empty for the first page."""


@dataclass(frozen=True, slots=True)
class Page:
    """Page: its title, and its HTML, which begins with a heading."""

    title: str
    body: str


@dataclass(slots=True)
class _TreeNode:
    """Level of the array tree of a tag."""

    children: dict[str, _TreeNode] = field(default_factory=dict)
    arrays: list[Mapping[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRenderer:
    """Renderer of pages, for the server or a single document."""

    href: Callable[[Query], str | None]
    """Function that returns the link for a query; None if no such page exists here."""

    heading_level: int = 1
    """Level of the page heading."""

    interactive: bool = True
    """True if a server answers forms."""

    def render_root(
        self,
        path: str,
        tags: Sequence[Mapping[str, Any]],
        timings: Mapping[str, Mapping[str, Any]],
        roots: Sequence[Mapping[str, Any]],
    ) -> Page:
        """Render all tags of a root directory: save times, sizes, durations, and the reasons why they are kept.

        Args:
            path: The root directory.
            tags: The fields of each `TagSummary`, oldest first.
            timings: Timings of the tags that contain a save report.
            roots: The root directories below it: path, number of tags, newest tag.
        """
        largest = max((tag["nbytes"] or 0 for tag in tags), default=0) or 1
        knows_policy = any(tag["kept"] for tag in tags)
        rows: list[Sequence[Cell]] = []
        for tag in reversed(tags):
            report = timings.get(tag["tag"])
            took, stall = (
                ("", "")
                if report is None
                else (format_duration(report["seconds"]), format_duration(_get_longest_stall(report)))
            )
            row: list[Cell] = [
                tag["tag"],
                format_time(tag["created"] or ""),
                _format_count(tag["arrays"]),
                format_bytes(tag["nbytes"]),
            ]
            row += [Bar(0.0, (tag["nbytes"] or 0) / largest), took, stall]
            row += [reports.format_kept_reason(tag)] if knows_policy else []
            rows.append([*row, reports.format_notes(tag, newest=tag is tags[-1])])
        columns = ["tag", "saved", ">arrays", ">size", "of the largest", ">took", ">stall"]
        columns += ["kept because", "notes"] if knows_policy else ["notes"]
        red = frozenset(number for number, tag in enumerate(reversed(tags)) if tag["problem"])
        table = PlainTable(f"{format_count(len(tags), 'tag')}, newest first", columns, rows, red)

        def link(column: str, row: Mapping[str, str]) -> str | None:
            if column == "tag":
                return self.href({"page": "tag", "tag": row["tag"]})
            return self.href({"page": "save", "tag": row["tag"]}) if column == "took" and row["took"] else None

        parts = (
            [draw_timeline(tags), html.render_html(table, link, self.heading_level + 1)] if tags or not roots else []
        )
        if roots:
            below = [(f"xla-ckpt view {shlex.quote(r['path'])}", str(r["tags"]), r["newest"]) for r in roots]
            parts.append(
                html.render_html(
                    PlainTable("Below it", ("command", ">tags", "newest"), below), level=self.heading_level + 1
                )
            )
        if self.interactive and len(tags) > 1:
            parts += [
                self._build_heading(1, "Compare two tags"),
                self._build_compare_form([tag["tag"] for tag in tags]),
            ]
        return self._build_page(f"Checkpoints in {path}", parts)

    def render_tag(self, contents: Mapping[str, Any], *, has_report: bool) -> Page:
        """Render the contents of a tag, given as `TagContents.to_json`."""
        tag, arrays = contents["tag"], contents["arrays"]
        links = (
            [self._build_link("where the time of its save went", {"page": "save", "tag": tag})] if has_report else []
        )
        parts = [
            html.render_html(reports.render_tag({**contents, "arrays": [], "values": {}}), level=self.heading_level + 1)
        ]
        parts += [f"<p>{text}</p>" for text in links]
        parts.append(self._build_heading(1, format_count(len(arrays), "array")))
        asks = self.interactive and tag.isprintable()  # other characters are not displayed or sent back unchanged
        if asks:
            parts.append(
                _build_form("tag", {"tag": tag}, [_build_input("leaf", "Only leaves like", "*layers.0*")], "Show")
            )
        if len(arrays) > MAX_ARRAYS:
            parts.append(f"<p>The first {MAX_ARRAYS} are shown.</p>")
        parts.append(self._build_array_tree(tag, arrays[:MAX_ARRAYS], contents["splits"]))
        if asks:
            parts.append(self._build_heading(1, "Restore over another mesh"))
            parts.append(
                _build_form("plan", {"tag": tag}, [_build_input("mesh", "Mesh", "dp=2,tp=4")], "What would be read?")
            )
        files = PlainTable(
            "", ("file", ">size"), [(file["path"], format_bytes(file["size"])) for file in contents["files"]]
        )
        parts += [self._build_heading(1, format_count(len(contents["files"]), "file")), html.render_html(files)]
        parts.append(self._build_heading(1, format_count(len(contents["values"]), "plain value")))
        shown = html.render_html(reports.render_plain_values(contents["values"]))
        parts.append(f"<details><summary>Numbers and texts of the state</summary>{shown}</details>")
        return self._build_page(f"Tag {tag}", parts)

    def render_array(self, sample: Mapping[str, Any]) -> Page:
        """Render one array: its shards and its values, given as `ArraySample.to_json`."""
        about = (
            f"{sample['dtype']}, {format_shape(sample['shape'])}, {format_bytes(sample['nbytes'])}, "
            f"in {format_count(sample['shards'], 'part')}; split over the mesh: {format_spec(sample['split'])}"
            + (f" ({sample['mesh']})" if sample["mesh"] else "")
        )
        tag = self._build_link(f"tag {sample['tag']}", {"page": "tag", "tag": sample["tag"]})
        parts = [f"<p>In {tag}: {escape_html(about)}.</p>", self._build_heading(1, "Parts")]
        parts.append(draw_shards(sample["shape"], sample["parts"]))
        rows = [
            (_format_region(part), ", ".join(map(str, part["ranks"])) or "?", part["file"])
            for part in sample["parts"][:MAX_LISTED_SHARDS]
        ]
        parts.append(html.render_html(PlainTable("", ("part", "ranks that had it", "file"), rows)))
        if sample["shards"] > len(rows):
            parts.append(f"<p>The first {len(rows)} of {sample['shards']} are listed.</p>")
        return self._build_page(sample["leaf"], [*parts, self._build_heading(1, "Values"), *_render_values(sample)])

    def render_save(self, report: Mapping[str, Any]) -> Page:
        """Render the timings of a save for each rank, given as in `Checkpoints.timings`."""
        return self._build_table_page(f"The save of {report['tag']}", reports.render_save_report(dict(report)))

    def render_plan(self, explanation: Mapping[str, Any]) -> Page:
        """Render the reads of a restore on another mesh, given as `Explanation.to_json`."""
        page = self._build_table_page(
            f"{explanation['tag']} over {explanation['mesh']}", reports.render_explanation(dict(explanation))
        )
        most = max((rank["read_bytes"] for rank in explanation["ranks"]), default=0) or 1
        rows: list[Sequence[Cell]] = [
            (str(rank["rank"]), Bar(0.0, rank["read_bytes"] / most), format_bytes(rank["read_bytes"]))
            for rank in explanation["ranks"]
        ]
        drawn = html.render_html(PlainTable("bytes that each rank reads", (">rank", "of the most", ">reads"), rows))
        return Page(page.title, f"{page.body}\n{drawn}")

    def render_comparison(self, difference: Mapping[str, Any], layers: Mapping[str, Mapping[str, Any]]) -> Page:
        """Render the differences between two tags: `Difference.to_json`, and `layers`, the sums over each layer."""
        tags = {side: difference[side]["tag"] for side in "ab"}
        most = max((float(how["relative"]) for how in layers.values() if how["relative"] != "inf"), default=0.0) or 1.0
        rows: list[Sequence[Cell]] = [
            (layer, f"{float(how['relative']):.3g}", Bar(0.0, min(float(how["relative"]) / most, 1.0)))
            for layer, how in layers.items()
        ]
        heat = PlainTable("how far each layer moved", ("layer", ">relative L2", "of the most"), rows)

        def link(column: str, row: Mapping[str, str]) -> str | None:
            of_array = column == "leaf" and "max abs" in row
            return self.href({"page": "array", "tag": tags["b"], "leaf": row["leaf"]}) if of_array else None

        parts = [html.render_html(heat)] if rows else []
        parts.append(html.render_html(reports.render_diff(dict(difference)), link, self.heading_level + 1))
        return self._build_page(f"From {tags['a']} to {tags['b']}", parts)

    def render_problem(self, text: str) -> Page:
        """Render an error message in place of a page."""
        return self._build_page("This cannot be shown", [f'<p class="red" role="alert">{escape_html(text)}</p>'])

    def _build_table_page(self, title: str, table: RenderableType) -> Page:
        return self._build_page(title, [html.render_html(table, level=self.heading_level + 1)])

    def _build_page(self, title: str, parts: Sequence[str]) -> Page:
        return Page(title, "\n".join([self._build_heading(0, title), *filter(None, parts)]))

    def _build_heading(self, levels_below: int, text: str) -> str:
        return f"<h{self.heading_level + levels_below}>{escape_html(text)}</h{self.heading_level + levels_below}>"

    def _build_link(self, text: str, query: Query) -> str:
        target = self.href(query)
        return escape_html(text) if target is None else f'<a href="{escape_html(target)}">{escape_html(text)}</a>'

    def _build_compare_form(self, tags: Sequence[str]) -> str:
        fields = []
        for name, label, chosen in (("a", "From", tags[-2]), ("b", "To", tags[-1])):
            options = "".join(
                f'<option value="{escape_html(tag)}"{" selected" if tag == chosen else ""}>{escape_html(tag)}</option>'
                for tag in reversed(tags)
                if tag.isprintable()  # other characters are not displayed or sent back unchanged
            )
            fields.append(f'<label>{label} <select name="{name}">{options}</select></label>')
        fields.append(_build_input("leaf", "Only leaves like", "*layers.0*"))
        return _build_form("compare", {}, fields, "Compare")

    def _build_array_tree(self, tag: str, arrays: Sequence[Mapping[str, Any]], splits: Mapping[str, Any]) -> str:
        top = _TreeNode()
        for array in arrays:
            node = top
            for name in _split_levels(array["leaf"]):
                node = node.children.setdefault(name, _TreeNode())
            node.arrays.append(array)

        def link(column: str, row: Mapping[str, str]) -> str | None:
            return self.href({"page": "array", "tag": tag, "leaf": row["leaf"]}) if column == "leaf" else None

        def shown(node: _TreeNode, *, is_open: bool) -> tuple[str, int, int]:
            """Return the HTML of a node, the number of arrays in it, and their bytes."""
            number, nbytes, parts = len(node.arrays), sum(array["nbytes"] for array in node.arrays), []
            if node.arrays:
                parts.append(html.render_html(_build_array_table(node.arrays, splits), link))
            for name, child in node.children.items():
                inner, its_number, its_bytes = shown(child, is_open=is_open and len(node.children) == 1)
                said = (
                    f"{escape_html(name)} <small>{format_count(its_number, 'array')}, {format_bytes(its_bytes)}</small>"
                )
                opened = " open" if is_open else ""
                parts.append(f"<details{opened}><summary>{said}</summary>{inner}</details>")
                number, nbytes = number + its_number, nbytes + its_bytes
            return "".join(parts), number, nbytes

        return shown(top, is_open=True)[0]


def _split_levels(leaf: str) -> list[str]:
    """Return the levels above an array in the tree.

    >>> _split_levels("model/layers.0.weight"), _split_levels("w")
    (['model', 'layers', '0'], [])
    >>> _split_levels("optimizer/state/layers.0.weight/exp_avg")
    ['optimizer', 'state', 'layers', '0', 'weight']
    """
    names = [name for component in leaf.split("/") for name in component.split(".")]
    return names[:-1][:MAX_TREE_DEPTH]


def _build_array_table(arrays: Sequence[Mapping[str, Any]], splits: Mapping[str, Any]) -> PlainTable:
    rows = [
        (
            leaf,
            a["dtype"],
            format_shape(a["shape"]),
            format_bytes(a["nbytes"]),
            str(a["shards"]),
            format_spec(splits.get(leaf, ())),
        )
        for a in arrays
        for leaf in [a["leaf"]]
    ]
    return PlainTable("", ("leaf", "dtype", ">shape", ">size", ">shards", "split"), rows)


def _format_region(shard: Mapping[str, Any]) -> str:
    return ", ".join(f"{low}:{high}" for low, high in zip(shard["start"], shard["stop"], strict=True)) or "scalar"


def _render_values(sample: Mapping[str, Any]) -> list[str]:
    values = sample["values"]
    if values is None:
        return ["<p>Two values are packed in each byte, and are not looked at.</p>"]
    number = values["elements"]
    read = f"All {number} values were read." if sample["whole"] else f"These are {number} values, from 16 places of it."
    rows = [(name, f"{values[key]:.6g}") for key, name in _STATISTICS.items()] if values["counts"] else []
    rows += [(name, str(values[key])) for key, name in _COUNTS.items()]
    return [
        f"<p>{read}</p>",
        draw_histogram(values),
        html.render_html(PlainTable("", ("of the values", ">number"), rows)),
    ]


_STATISTICS = {
    "low": "smallest",
    "high": "largest",
    "mean": "mean",
    "deviation": "standard deviation",
    "norm": "L2 norm",
}
_COUNTS = {"zeros": "zeros", "nans": "NaNs", "infinities": "infinities"}


def _get_longest_stall(report: Mapping[str, Any]) -> float:
    return max((float(rank["stall"]) for rank in report["measured"]), default=0.0)


def _format_count(count_or_none: int | None) -> str:
    return "?" if count_or_none is None else str(count_or_none)


def _build_input(name: str, label: str, example: str) -> str:
    return (
        f'<label>{escape_html(label)} <input name="{escape_html(name)}" placeholder="{escape_html(example)}" '
        'autocomplete="off" spellcheck="false"></label>'
    )


def _build_form(page: str, hidden: Query, fields: Sequence[str], button: str) -> str:
    known = "".join(
        f'<input type="hidden" name="{escape_html(name)}" value="{escape_html(value)}">'
        for name, value in {"page": page, **hidden}.items()
    )
    return f'<form action="" method="get">{known}{"".join(fields)}<button>{escape_html(button)}</button></form>'


STYLE = """
:root { color-scheme: light dark; --line: #8886; --soft: #59606b; --link: #2a4fb0; --red: #b00020; }
@media (prefers-color-scheme: dark) { :root { --soft: #a9b0bb; --link: #9db8ff; --red: #ff8a94; } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 76rem; padding: 0 1rem 3rem; }
header { color: var(--soft); padding: .8rem 0; display: flex; gap: 1rem; }
h1, h2, h3, h4 { line-height: 1.25; margin: 1.6rem 0 .5rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; } h3, h4 { font-size: 1rem; }
header, p, summary, dd { overflow-wrap: anywhere; }
a { color: var(--link); }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
.skip { position: absolute; left: -99rem; } .skip:focus { left: 1rem; }
.scrolled { overflow-x: auto; margin: .5rem 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); padding: .2rem 0; }
th, td { padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th[align=right], td[align=right] { text-align: right; white-space: nowrap; }
thead th { color: var(--soft); font-weight: 600; white-space: nowrap; }
tbody th { font-weight: 400; max-width: 32rem; overflow-wrap: anywhere; }
.short { white-space: nowrap; } td.long { min-width: 14rem; }
td { max-width: 40rem; overflow-wrap: anywhere; }
.red { color: var(--red); } b.green { color: inherit; }
.bar { width: 8rem; height: .75rem; background: #8883; }
.drawing { display: block; width: 100%; max-width: 44rem; margin: .8rem 0; }
.drawing text { font: 12px system-ui, sans-serif; fill: currentColor; } .drawing .onfill { fill: #fff; }
@media (max-width: 45rem) { .drawing text { font-size: 20px; } }
details { margin-left: .9rem; } main > details, section > details { margin-left: 0; }
summary { cursor: pointer; padding: .15rem 0; } small { color: var(--soft); }
form { display: flex; flex-wrap: wrap; gap: .6rem 1rem; align-items: end; margin: .6rem 0; }
label { display: grid; color: var(--soft); }
input, select, button { font: inherit; padding: .3rem .5rem; max-width: 100%; box-sizing: border-box; }
"""

DOCUMENT_START = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="generator" content="xla-ckpt view">'
)
"""First bytes of each document. Only files that start with them may be overwritten."""

CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; style-src 'sha256-{base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}'; "
    "form-action 'self'; base-uri 'none'"
)
"""Content-Security-Policy of pages: display with the embedded style, and send forms only to the same server."""


def render_document(title: str, body: str, *, home: str | None) -> bytes:
    """Render a complete HTML document.

    Args:
        title: Its title.
        body: HTML of its main part.
        home: Link to the first page; None if there is only one page.
    """
    back = "" if home is None else f'<nav aria-label="Pages"><a href="{escape_html(home)}">All tags</a></nav>'
    return (
        f'{DOCUMENT_START}<meta http-equiv="Content-Security-Policy" content="{escape_html(CONTENT_SECURITY_POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>{escape_html(title)}</title><style>{STYLE}</style></head><body>"
        f'<a class="skip" href="#main">To the content</a><header>xla-ckpt view{back}</header>'
        f'<main id="main" tabindex="-1">{body}</main></body></html>\n'
    ).encode()


def render_single_document(title: str, pages: Sequence[tuple[str, Page]]) -> bytes:
    """Render all pages in one document that needs no server. Each page comes with the name used in links."""
    contents = "".join(f'<li><a href="#{escape_html(name)}">{escape_html(page.title)}</a></li>' for name, page in pages)
    sections = "\n".join(f'<section id="{escape_html(name)}">{page.body}</section>' for name, page in pages)
    listed = f'<nav aria-label="Contents"><ul>{contents}</ul></nav>'
    return render_document(title, f"<h1>{escape_html(title)}</h1>{listed}{sections}", home=None)
