"""Drawings of a page, as SVG: each says in words what it shows. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from xla_ckpt.tables.html import escaped
from xla_ckpt.tables.texts import size, when

WIDTH = 640
"""Of a drawing, in its own units: on a narrow screen it is drawn smaller."""

COLORS = ("#4062bb", "#c2571a", "#2d7d46", "#8a4fae", "#a33b3b", "#3b7f8c", "#7d6a1f", "#5d6470")
"""Of neighbouring parts. White text can be read on each."""


def _drawing(height: float, says: str, parts: Sequence[str]) -> str:
    return (
        f'<svg class="drawing" role="img" viewBox="0 0 {WIDTH} {height:.0f}"><title>{escaped(says)}</title>'
        f"{''.join(parts)}</svg>"
    )


def _rect(x: float, y: float, width: float, height: float, color: str, says: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{max(height, 1):.1f}" fill="{color}">'
        f"<title>{escaped(says)}</title></rect>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    shown = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{shown}>{escaped(text)}</text>'


def timeline(tags: Sequence[Mapping[str, Any]]) -> str:
    """The tags over time, each as high as it is large; nothing if fewer than two say when they were saved."""
    times = [(_seconds(tag["created"]), tag) for tag in tags]
    known = [(at, tag) for at, tag in times if at is not None]
    if len(known) < 2:
        return ""
    first, last = min(at for at, _ in known), max(at for at, _ in known)
    largest = max(tag["nbytes"] or 0 for _, tag in known) or 1
    parts = [f'<line x1="0" y1="90.5" x2="{WIDTH}" y2="90.5" stroke="currentColor" stroke-opacity="0.4"/>']
    for at, tag in known:
        x = (WIDTH - 12) * ((at - first) / (last - first) if last > first else 0.5)
        height = 80 * (tag["nbytes"] or 0) / largest
        says = f"{tag['tag']}: {size(tag['nbytes'])}, saved {when(tag['created'])}"
        parts.append(_rect(x, 90 - height, 8, height, COLORS[1] if tag["pinned"] else COLORS[0], says))
    parts += [
        _text(0, 110, when(_text_of(known, first))),
        _text(WIDTH, 110, when(_text_of(known, last)), "end"),
    ]
    if any(tag["pinned"] for _, tag in known):
        parts.append(_text(WIDTH / 2, 110, "orange: pinned", "middle"))
    return _drawing(116, f"{len(known)} tags over time; the height is the size, the largest has {size(largest)}", parts)


def _seconds(created: str | None) -> float | None:
    try:
        return datetime.datetime.fromisoformat(created or "").timestamp()
    except (ValueError, OverflowError):
        return None


def _text_of(known: Sequence[tuple[float, Mapping[str, Any]]], seconds: float) -> str:
    return next(str(tag["created"]) for at, tag in known if at == seconds)


def histogram(values: Mapping[str, Any]) -> str:
    """How often values lie in each of as many equal parts between the smallest and the largest one."""
    counts = values["counts"]
    if not counts:
        return ""
    most, width, step = max(counts), WIDTH / len(counts), (values["high"] - values["low"]) / len(counts)
    parts = []
    for i, number in enumerate(counts):
        says = f"{number} from {values['low'] + i * step:.4g} to {values['low'] + (i + 1) * step:.4g}"
        height = max(120 * number / most, 1 if number else 0)
        if number:
            parts.append(_rect(i * width, 120 - height, width - 2, height, COLORS[0], says))
    parts += [
        f'<line x1="0" y1="120.5" x2="{WIDTH}" y2="120.5" stroke="currentColor" stroke-opacity="0.4"/>',
        _text(0, 140, f"{values['low']:.4g}"),
        _text(WIDTH, 140, f"{values['high']:.4g}", "end"),
    ]
    says = f"histogram from {values['low']:.4g} to {values['high']:.4g}; the highest of {len(counts)} bars has {most}"
    return _drawing(146, says, parts)


def parts_in(shape: Sequence[int], parts: Sequence[Mapping[str, Any]]) -> str:
    """Where the parts of an array lie in it, over the two dims that are cut most, and the ranks that had them."""
    if not parts or not shape:
        return ""
    cuts = [len({part["start"][dim] for part in parts}) for dim in range(len(shape))]
    chosen = sorted(sorted(range(len(shape)), key=lambda dim: (-cuts[dim], dim))[:2])
    down, right = (chosen[0], chosen[-1]) if len(chosen) > 1 else (None, chosen[0])
    height = 40.0 if down is None else 160.0
    drawn: dict[tuple[float, ...], list[Mapping[str, Any]]] = {}
    for part in parts:
        x, width = _along(part, right, shape[right], WIDTH)
        y, tall = (0.0, height) if down is None else _along(part, down, shape[down], height)
        drawn.setdefault((x, y, width, tall), []).append(part)
    shapes = []
    for i, ((x, y, width, tall), inside) in enumerate(drawn.items()):
        ranks = sorted({rank for part in inside for rank in part["ranks"]})
        had = f"rank{'s' if len(ranks) > 1 else ''} {_ranges(ranks)}" if ranks else ""
        where = ", ".join(f"{low}:{high}" for low, high in zip(inside[0]["start"], inside[0]["stop"], strict=True))
        says = f"[{where}] {had} in {inside[0]['file']}"
        shapes.append(_rect(x + 1, y + 1, width - 2, tall - 2, COLORS[i % len(COLORS)], says))
        if had and width > 7 * len(had) and tall > 14:
            shapes.append(_text(x + width / 2, y + tall / 2 + 4, had, "middle", "onfill"))
    dims = f"dim {right} to the right" + ("" if down is None else f", dim {down} downwards")
    return _drawing(height, f"{len(parts)} parts of the array; {dims}", shapes)


def _along(part: Mapping[str, Any], dim: int, extent: int, room: float) -> tuple[float, float]:
    """Where a part begins along a dim, and how long it is, in a drawing that has so much room."""
    low, high = part["start"][dim], part["stop"][dim]
    return (room * low / extent, room * (high - low) / extent) if extent else (0.0, room)


def _ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers as people write them.

    >>> _ranges([0, 1, 2, 5]), _ranges([3])
    ('0-2, 5', '3')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
