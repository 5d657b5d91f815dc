"""What the drawings are made of: shapes and words as SVG, and whether all words are within a drawing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape, unescape

STYLE = """
svg{font-family:system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif;font-size:13px}
.back{fill:#fbfbfd;stroke:#c9ccd6}.text{fill:#20232b}.soft{fill:#555b69}
.code{font-family:ui-monospace,"DejaVu Sans Mono",monospace;font-size:12px}
.line{stroke:#555b69;fill:none;stroke-width:1.3}.a{fill:#bcd3f7}.b{fill:#f7d9b0}.c{fill:#c4e6c3}.d{fill:#e3c8ef}.e{fill:#e6e8ee}.f{fill:#f4b9b5}
.box{stroke:#555b69;stroke-width:1}.bold{font-weight:600}
@media (prefers-color-scheme:dark){
.back{fill:#20232b;stroke:#454a57}.text{fill:#eceef3}.soft{fill:#aab0bf}.line{stroke:#aab0bf}.box{stroke:#aab0bf}
.a{fill:#2f5590}.b{fill:#80561c}.c{fill:#2f6b3a}.d{fill:#63407a}.e{fill:#3a3f4c}.f{fill:#8b3733}}
"""


WORDS = re.compile(r'<text x="([\d.]+)" y="[\d.]+" class="([\w ]+)" text-anchor="(\w+)">(.*?)</text>')
WIDTHS = {"code": 7.3, "bold": 7.8, "text": 7.0, "soft": 7.0}
"""Pixels of a letter in DejaVu Sans, on an average: no other font that browsers take here is wider."""


def width_of(words: str, kind: str) -> float:
    """About how wide words are, in pixels."""
    return WIDTHS[kind.rsplit(maxsplit=1)[-1]] * len(words)


def text(x: float, y: float, words: str, kind: str = "text", anchor: str = "start") -> str:
    """A line of text whose baseline begins, or has its middle or end, at a place."""
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str, words: str = "", more: str = "text") -> str:
    """A box, with words in its middle, which have to fit."""
    if width_of(words, more) > width:
        raise ValueError(f"{words!r} is wider than its box of {width} pixels")
    box = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" class="box {kind}"/>'
    return box + (text(x + width / 2, y + height / 2 + 4.5, words, more, "middle") if words else "")


def line(*points: tuple[float, float], end: bool = False) -> str:
    """A line through points, with a head at its end if it is an arrow."""
    path = "M" + "L".join(f"{x} {y}" for x, y in points)
    return f'<path d="{path}" class="line"{" marker-end=" + chr(34) + "url(#head)" + chr(34) if end else ""}/>'


def drawing(width: int, height: int, title: str, says: str, parts: Iterable[str]) -> str:
    """A whole file.

    Args:
        width: In pixels, as `height`.
        height: See `width`.
        title: What it shows, for programs that read a page aloud; `says` is the same at length.
        says: See `title`.
        parts: What is drawn.
    """
    head = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" class="soft"/></marker></defs>'
    )
    back = f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6" class="back"/>'
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    told = f'<title id="title">{escape(title)}</title><desc id="says">{escape(says)}</desc>'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title says">'
    return "\n".join([start, told, f"<style>{STYLE}</style>{head}{back}", *parts, "</svg>\n"])


def cut_off(svg: str) -> list[str]:
    """The words of a drawing that reach past its right edge."""
    width = float(re.findall(r'viewBox="0 0 ([\d.]+)', svg)[0])
    share = {"start": 1.0, "middle": 0.5, "end": 0.0}
    reach = [
        (float(x) + share[anchor] * width_of(unescape(words), kind), unescape(words))
        for x, kind, anchor, words in WORDS.findall(svg)
    ]
    return [words for right, words in reach if right > width - 6]
