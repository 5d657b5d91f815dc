"""The answer of ``diff``: which leaves differ between two tags, and how far they moved."""

from __future__ import annotations

import math
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from xla_ckpt.api.diff import diff
from xla_ckpt.cli.render import Rows, collapsed, count
from xla_ckpt.engine.difference import Distance


def diff_facts(a: tuple[str, str | None], b: tuple[str, str | None], **options: Any) -> dict[str, Any]:
    """What differs between two tags; `options` are those of `xla_ckpt.diff`."""
    difference = diff(a[0], b[0], a[1], b[1], **options)
    return {
        "a": {"path": difference.a[0], "tag": difference.a[1]},
        "b": {"path": difference.b[0], "tag": difference.b[1]},
        "same": difference.same,
        "equal": difference.equal,
        "parts": [{"part": part, **_distance(how)} for part, how in difference.parts.items()],
        "moved": [{"leaf": leaf, **_distance(how)} for leaf, how in difference.moved.items()],
        "retyped": [{"leaf": leaf, "a": one, "b": other} for leaf, (one, other) in difference.retyped.items()],
        "values": [{"leaf": leaf, "a": one, "b": other} for leaf, (one, other) in difference.values.items()],
        "only_in_a": list(difference.only_in_a),
        "only_in_b": list(difference.only_in_b),
    }


def _distance(how: Distance) -> dict[str, Any]:
    """A distance as plain JSON, which has no infinity: there it is a text."""
    numbers = {"max_abs": how.max_abs, "relative": how.relative}
    return {"elements": how.elements, **{k: v if math.isfinite(v) else str(v) for k, v in numbers.items()}}


def difference(facts: dict[str, Any]) -> RenderableType:
    """The answer of ``diff``."""
    a, b = (f"{facts[side]['tag']} in {facts[side]['path']}" for side in "ab")
    equal = count(facts["equal"], "array")
    verdict = f"equal: {equal}" if facts["same"] else f"different; {equal} equal"
    parts: list[RenderableType] = [Text(f"a: {a}\nb: {b}\n{verdict}")]
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
        Rows(f"\n{len(leaves)} only in {side}", (f"leaf only in {side}",), [(leaf,) for leaf in leaves])
        for side in "ab"
        if (leaves := facts[f"only_in_{side}"])
    ]
    return Group(*parts)


_MEASURES = ("max_abs", "relative")
