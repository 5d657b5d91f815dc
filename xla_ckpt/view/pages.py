"""Pages, of facts as plain JSON. Pure: nothing is read here, and nothing that a tag holds can run in them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import RenderableType

from xla_ckpt.tables import bars, html, moves, render
from xla_ckpt.tables.html import escaped
from xla_ckpt.tables.rows import Bar, Cell, Rows
from xla_ckpt.tables.texts import count, duration, shape, size, split_text, when
from xla_ckpt.view import drawings

MAX_ARRAYS = 5000
"""Arrays of a tag that one page lists. Of more, a pattern says which."""

MAX_DEPTH_SHOWN = 8
"""Levels of the tree of a tag: names may have any number of dots."""

MAX_LISTED_PARTS = 64
"""Parts of an array that are listed under their drawing."""

Address = Mapping[str, str]
"""What is asked for: ``{"page": "tag", "tag": "step_10"}``; of the first page, nothing."""


@dataclass(frozen=True, slots=True)
class Page:
    """One page: what it is called, and its HTML, which begins with a heading."""

    title: str
    body: str


@dataclass(slots=True)
class _Node:
    """A level of the tree of a tag."""

    below: dict[str, _Node] = field(default_factory=dict)
    arrays: list[Mapping[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """How pages are made."""

    href: Callable[[Address], str | None]
    """The link to what is asked for; None where this place has no such page."""

    level: int = 1
    """Of a page's heading."""

    live: bool = True
    """Whether there is a server that answers forms."""

    def root(
        self,
        path: str,
        tags: Sequence[Mapping[str, Any]],
        timings: Mapping[str, Mapping[str, Any]],
        roots: Sequence[Mapping[str, Any]],
    ) -> Page:
        """All tags of a root directory: when they were saved, their sizes, how long it took, and what keeps them.

        Args:
            path: The root directory.
            tags: The fields of each `TagSummary`, oldest first.
            timings: Of tags that keep a report of their save.
            roots: The root directories below it: path, number of tags, newest tag.
        """
        largest = max((tag["nbytes"] or 0 for tag in tags), default=0) or 1
        knows_policy = any(tag["kept"] for tag in tags)
        rows: list[Sequence[Cell]] = []
        for tag in reversed(tags):
            report = timings.get(tag["tag"])
            took, stall = ("", "") if report is None else (duration(report["seconds"]), duration(_stall(report)))
            row: list[Cell] = [tag["tag"], when(tag["created"] or ""), _known(tag["arrays"]), size(tag["nbytes"])]
            row += [Bar(0.0, (tag["nbytes"] or 0) / largest), took, stall]
            row += [render.kept_because(tag)] if knows_policy else []
            rows.append([*row, render.notes(tag, newest=tag is tags[-1])])
        columns = ["tag", "saved", ">arrays", ">size", "of the largest", ">took", ">stall"]
        columns += ["kept because", "notes"] if knows_policy else ["notes"]
        red = frozenset(number for number, tag in enumerate(reversed(tags)) if tag["problem"])
        table = Rows(f"{count(len(tags), 'tag')}, newest first", columns, rows, red)

        def link(column: str, row: Mapping[str, str]) -> str | None:
            if column == "tag":
                return self.href({"page": "tag", "tag": row["tag"]})
            return self.href({"page": "save", "tag": row["tag"]}) if column == "took" and row["took"] else None

        parts = [drawings.timeline(tags), html.fragment(table, link, self.level + 1)] if tags or not roots else []
        if roots:
            below = [(f"xla-ckpt view {shlex.quote(r['path'])}", str(r["tags"]), r["newest"]) for r in roots]
            parts.append(html.fragment(Rows("Below it", ("command", ">tags", "newest"), below), level=self.level + 1))
        if self.live and len(tags) > 1:
            parts += [self._head(1, "Compare two tags"), self._compare_form([tag["tag"] for tag in tags])]
        return self._page(f"Checkpoints in {path}", parts)

    def tag(self, facts: Mapping[str, Any], *, has_report: bool) -> Page:
        """What a tag holds: `facts` are those of `TagContents.to_json`."""
        tag, arrays = facts["tag"], facts["arrays"]
        links = [self._link("where the time of its save went", {"page": "save", "tag": tag})] if has_report else []
        parts = [html.fragment(render.tag({**facts, "arrays": [], "values": {}}), level=self.level + 1)]
        parts += [f"<p>{text}</p>" for text in links]
        parts.append(self._head(1, count(len(arrays), "array")))
        asks = self.live and tag.isprintable()  # other characters are not shown as they are, nor come back so
        if asks:
            parts.append(_form("tag", {"tag": tag}, [_field("leaf", "Only leaves like", "*layers.0*")], "Show"))
        if len(arrays) > MAX_ARRAYS:
            parts.append(f"<p>The first {MAX_ARRAYS} are shown.</p>")
        parts.append(self._tree(tag, arrays[:MAX_ARRAYS], facts["splits"]))
        if asks:
            parts.append(self._head(1, "Restore over another mesh"))
            parts.append(_form("plan", {"tag": tag}, [_field("mesh", "Mesh", "dp=2,tp=4")], "What would be read?"))
        files = Rows("", ("file", ">size"), [(file["path"], size(file["size"])) for file in facts["files"]])
        parts += [self._head(1, count(len(facts["files"]), "file")), html.fragment(files)]
        parts.append(self._head(1, count(len(facts["values"]), "plain value")))
        shown = html.fragment(render.plain(facts["values"]))
        parts.append(f"<details><summary>Numbers and texts of the state</summary>{shown}</details>")
        return self._page(f"Tag {tag}", parts)

    def array(self, facts: Mapping[str, Any]) -> Page:
        """One array: how it lies over the ranks, and its values. `facts` are those of `ArraySample.to_json`."""
        about = (
            f"{facts['dtype']}, {shape(facts['shape'])}, {size(facts['nbytes'])}, in {count(facts['shards'], 'part')}; "
            f"split over the mesh: {split_text(facts['split'])}" + (f" ({facts['mesh']})" if facts["mesh"] else "")
        )
        tag = self._link(f"tag {facts['tag']}", {"page": "tag", "tag": facts["tag"]})
        parts = [f"<p>In {tag}: {escaped(about)}.</p>", self._head(1, "Parts")]
        parts.append(drawings.parts_in(facts["shape"], facts["parts"]))
        rows = [
            (_where(part), ", ".join(map(str, part["ranks"])) or "?", part["file"])
            for part in facts["parts"][:MAX_LISTED_PARTS]
        ]
        parts.append(html.fragment(Rows("", ("part", "ranks that had it", "file"), rows)))
        if facts["shards"] > len(rows):
            parts.append(f"<p>The first {len(rows)} of {facts['shards']} are listed.</p>")
        return self._page(facts["leaf"], [*parts, self._head(1, "Values"), *_values(facts)])

    def save(self, facts: Mapping[str, Any]) -> Page:
        """Where the time of a save went, rank by rank: `facts` are those of `Checkpoints.timings`."""
        return self._shown(f"The save of {facts['tag']}", bars.report(dict(facts)))

    def plan(self, facts: Mapping[str, Any]) -> Page:
        """What a restore over another mesh would read: `facts` are those of `Explanation.to_json`."""
        page = self._shown(f"{facts['tag']} over {facts['mesh']}", render.explanation(dict(facts)))
        most = max((rank["read_bytes"] for rank in facts["ranks"]), default=0) or 1
        rows: list[Sequence[Cell]] = [
            (str(rank["rank"]), Bar(0.0, rank["read_bytes"] / most), size(rank["read_bytes"]))
            for rank in facts["ranks"]
        ]
        drawn = html.fragment(Rows("bytes that each rank reads", (">rank", "of the most", ">reads"), rows))
        return Page(page.title, f"{page.body}\n{drawn}")

    def compare(self, facts: Mapping[str, Any], layers: Mapping[str, Mapping[str, Any]]) -> Page:
        """What differs between two tags. `facts`: `Difference.to_json`; `layers`: the sums over each layer."""
        tags = {side: facts[side]["tag"] for side in "ab"}
        most = max((float(how["relative"]) for how in layers.values() if how["relative"] != "inf"), default=0.0) or 1.0
        rows: list[Sequence[Cell]] = [
            (layer, f"{float(how['relative']):.3g}", Bar(0.0, min(float(how["relative"]) / most, 1.0)))
            for layer, how in layers.items()
        ]
        heat = Rows("how far each layer moved", ("layer", ">relative L2", "of the most"), rows)

        def link(column: str, row: Mapping[str, str]) -> str | None:
            of_array = column == "leaf" and "max abs" in row
            return self.href({"page": "array", "tag": tags["b"], "leaf": row["leaf"]}) if of_array else None

        parts = [html.fragment(heat)] if rows else []
        parts.append(html.fragment(moves.difference(dict(facts)), link, self.level + 1))
        return self._page(f"From {tags['a']} to {tags['b']}", parts)

    def problem(self, text: str) -> Page:
        """Why there is no page."""
        return self._page("This cannot be shown", [f'<p class="red" role="alert">{escaped(text)}</p>'])

    def _shown(self, title: str, shown: RenderableType) -> Page:
        return self._page(title, [html.fragment(shown, level=self.level + 1)])

    def _page(self, title: str, parts: Sequence[str]) -> Page:
        return Page(title, "\n".join([self._head(0, title), *filter(None, parts)]))

    def _head(self, below: int, text: str) -> str:
        return f"<h{self.level + below}>{escaped(text)}</h{self.level + below}>"

    def _link(self, text: str, address: Address) -> str:
        target = self.href(address)
        return escaped(text) if target is None else f'<a href="{escaped(target)}">{escaped(text)}</a>'

    def _compare_form(self, tags: Sequence[str]) -> str:
        fields = []
        for name, label, chosen in (("a", "From", tags[-2]), ("b", "To", tags[-1])):
            options = "".join(
                f'<option value="{escaped(tag)}"{" selected" if tag == chosen else ""}>{escaped(tag)}</option>'
                for tag in reversed(tags)
                if tag.isprintable()  # other characters are not shown as they are, and another name would come back
            )
            fields.append(f'<label>{label} <select name="{name}">{options}</select></label>')
        fields.append(_field("leaf", "Only leaves like", "*layers.0*"))
        return _form("compare", {}, fields, "Compare")

    def _tree(self, tag: str, arrays: Sequence[Mapping[str, Any]], splits: Mapping[str, Any]) -> str:
        top = _Node()
        for array in arrays:
            node = top
            for name in _levels(array["leaf"]):
                node = node.below.setdefault(name, _Node())
            node.arrays.append(array)

        def link(column: str, row: Mapping[str, str]) -> str | None:
            return self.href({"page": "array", "tag": tag, "leaf": row["leaf"]}) if column == "leaf" else None

        def shown(node: _Node, *, is_open: bool) -> tuple[str, int, int]:
            """Its HTML, how many arrays are in it, and their bytes."""
            number, nbytes, parts = len(node.arrays), sum(array["nbytes"] for array in node.arrays), []
            if node.arrays:
                parts.append(html.fragment(_array_table(node.arrays, splits), link))
            for name, child in node.below.items():
                inner, its_number, its_bytes = shown(child, is_open=is_open and len(node.below) == 1)
                said = f"{escaped(name)} <small>{count(its_number, 'array')}, {size(its_bytes)}</small>"
                opened = " open" if is_open else ""
                parts.append(f"<details{opened}><summary>{said}</summary>{inner}</details>")
                number, nbytes = number + its_number, nbytes + its_bytes
            return "".join(parts), number, nbytes

        return shown(top, is_open=True)[0]


def _levels(leaf: str) -> list[str]:
    """The levels above an array in the tree.

    >>> _levels("model/layers.0.weight"), _levels("w"), _levels("optimizer/state/layers.0.weight/exp_avg")
    (['model', 'layers', '0'], [], ['optimizer', 'state', 'layers', '0', 'weight'])
    """
    names = [name for component in leaf.split("/") for name in component.split(".")]
    return names[:-1][:MAX_DEPTH_SHOWN]


def _array_table(arrays: Sequence[Mapping[str, Any]], splits: Mapping[str, Any]) -> Rows:
    rows = [
        (leaf, a["dtype"], shape(a["shape"]), size(a["nbytes"]), str(a["shards"]), split_text(splits.get(leaf, ())))
        for a in arrays
        for leaf in [a["leaf"]]
    ]
    return Rows("", ("leaf", "dtype", ">shape", ">size", ">shards", "split"), rows)


def _where(part: Mapping[str, Any]) -> str:
    return ", ".join(f"{low}:{high}" for low, high in zip(part["start"], part["stop"], strict=True)) or "scalar"


def _values(facts: Mapping[str, Any]) -> list[str]:
    values = facts["values"]
    if values is None:
        return ["<p>Two values are packed in each byte, and are not looked at.</p>"]
    number = values["elements"]
    read = f"All {number} values were read." if facts["whole"] else f"These are {number} values, from 16 places of it."
    rows = [(name, f"{values[key]:.6g}") for key, name in _NUMBERS.items()] if values["counts"] else []
    rows += [(name, str(values[key])) for key, name in _COUNTS.items()]
    return [f"<p>{read}</p>", drawings.histogram(values), html.fragment(Rows("", ("of the values", ">number"), rows))]


_NUMBERS = {"low": "smallest", "high": "largest", "mean": "mean", "deviation": "standard deviation", "norm": "L2 norm"}
_COUNTS = {"zeros": "zeros", "nans": "NaNs", "infinities": "infinities"}


def _stall(report: Mapping[str, Any]) -> float:
    return max((float(rank["stall"]) for rank in report["measured"]), default=0.0)


def _known(number: int | None) -> str:
    return "?" if number is None else str(number)


def _field(name: str, label: str, example: str) -> str:
    return (
        f'<label>{escaped(label)} <input name="{escaped(name)}" placeholder="{escaped(example)}" '
        'autocomplete="off" spellcheck="false"></label>'
    )


def _form(page: str, hidden: Address, fields: Sequence[str], button: str) -> str:
    known = "".join(
        f'<input type="hidden" name="{escaped(name)}" value="{escaped(value)}">'
        for name, value in {"page": page, **hidden}.items()
    )
    return f'<form action="" method="get">{known}{"".join(fields)}<button>{escaped(button)}</button></form>'
