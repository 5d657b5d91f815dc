"""Bars as SVG text, readable on light and on dark pages; no library draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _LABEL, _ROW, _TOP = 760, 330, 26, 44
_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328 }
  .title { font-weight: 600 }
  .peer { fill: #8c959f } .ours { fill: #0969da }
  @media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .peer { fill: #6e7681 } .ours { fill: #4493f8 } }
"""


@dataclass(frozen=True)
class Bar:
    """One contender's bar."""

    label: str
    value: float
    text: str
    """The value as it is shown."""
    ours: bool


def bars(title: str, bars_: Sequence[Bar]) -> str:
    """A picture of horizontal bars, in the given order, from zero on a linear scale. Raises ValueError for none."""
    if not bars_:
        raise ValueError(f"there is nothing to draw for {title!r}")
    longest = max(bar.value for bar in bars_) or 1.0
    room = _WIDTH - _LABEL - 110
    height = _TOP + _ROW * len(bars_) + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        f'<text class="title" x="8" y="24">{escape(title)}</text>',
    ]
    for i, bar in enumerate(bars_):
        y = _TOP + _ROW * i
        width = max(1.0, room * bar.value / longest)
        kind = "ours" if bar.ours else "peer"
        lines += [
            f'<text x="{_LABEL - 8}" y="{y + 13}" text-anchor="end">{escape(bar.label)}</text>',
            f'<rect class="{kind}" x="{_LABEL}" y="{y}" width="{width:.1f}" height="18" rx="2"/>',
            f'<text x="{_LABEL + width + 6:.1f}" y="{y + 13}">{escape(bar.text)}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])
