"""The answer of ``diff``: which leaves differ between two tags, and how far they moved."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from xla_ckpt.tables.rows import Rows
from xla_ckpt.tables.texts import collapsed, count, folded


def difference(facts: dict[str, Any]) -> RenderableType:
    """The answer of ``diff``."""
    a, b = (_named(**facts[side]) for side in "ab")
    equal = count(facts["equal"], "array")
    verdict = f"equal: {equal}" if facts["same"] else f"different; {equal} equal"
    base = "" if facts["base"] is None else f"\n{_BASES[facts['base']]}"
    parts: list[RenderableType] = [Text(f"a: {a}\nb: {b}\n{verdict}{base}")]
    for name, title in (("parts", "moved, by part"), ("moved", f"{count(len(facts['moved']), 'array')} moved")):
        if facts[name]:
            rows = [
                (m.get("leaf", m.get("part")), str(m["elements"]), *(f"{float(m[k]):.3g}" for k in _MEASURES))
                for m in facts[name]
            ]
            of = "leaf" if name == "moved" else "part"
            parts.append(Rows(f"\n{title}", (of, "?>elements", ">max abs", ">relative L2"), rows))
    if facts["retyped"]:
        types = [(d["leaf"], d["a"], d["b"]) for d in facts["retyped"]]
        parts.append(Rows(f"\n{len(types)} of another type or shape", ("leaf", "a", "b"), types))
    if facts["values"]:
        values = collapsed({d["leaf"]: (d["a"], d["b"]) for d in facts["values"]})
        parts.append(Rows(f"\n{len(facts['values'])} plain values differ", ("leaf", "a", "b"), values))
    parts += [
        Rows(f"\n{len(leaves)} only in {side}", (f"leaf only in {side}",), [(leaf,) for leaf in folded(leaves)])
        for side in "ab"
        if (leaves := facts[f"only_in_{side}"])
    ]
    return Group(*parts)


def _named(path: str, tag: str, note: str) -> str:
    return f"{tag} in {path}{f' ({note})' if note else ''}"


_BASES = {
    True: "both are for the same base model, by the digests that they have of it",
    False: "they are for different base models, by what they have of them",
}

_MEASURES = ("max_abs", "relative")
