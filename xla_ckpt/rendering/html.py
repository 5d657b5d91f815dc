"""Render text and tables as HTML, for web pages and for notebooks (`_repr_html_`).

Names in a checkpoint may contain anything, so only `escape_html` converts text to HTML.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from xla_ckpt.display import make_printable
from xla_ckpt.rendering.table import Bar, PlainTable

MAX_ROWS = 2000
"""Maximum number of rows of a table, because more would make browsers slow and notebooks large."""

MAX_SHORT_CELL = 24
"""Maximum length (characters) of cells that are not folded on narrow screens, such as numbers and times."""

Linker = Callable[[str, Mapping[str, str]], str | None]
"""(column, cells of a row by column) -> link target of the cell, or None."""


def escape_html(text: str) -> str:
    r"""Escape text for HTML elements and quoted attributes.

    Invisible characters are replaced by their code points, because some would reverse the order of the following text,
    and NUL is invalid in HTML.

    >>> escape_html("<b a='1'>"), escape_html("a\u202eb\x00")
    ('&lt;b a=&#x27;1&#x27;&gt;', 'a\\u202eb\\u0000')
    """
    return html.escape(make_printable(text))


def render_html(renderable: RenderableType, link: Linker = lambda column, row: None, level: int = 3) -> str:
    """Render text and tables as HTML.

    Args:
        renderable: Text, tables, or groups of them.
        link: Returns the link targets of table cells.
        level: Heading level of bold lines.

    Raises:
        TypeError: `renderable` contains other objects.
    """
    return "\n".join(_render_parts(renderable, link, level))


def _render_parts(renderable: RenderableType, link: Linker, level: int) -> Iterator[str]:
    if isinstance(renderable, Group):
        for part in renderable.renderables:
            yield from _render_parts(part, link, level)
    elif isinstance(renderable, PlainTable):
        yield _render_table(renderable, link)
    elif isinstance(renderable, Text):
        for line in renderable.split("\n"):
            if line.plain.strip():
                element = f"h{level}" if str(line.style) == "bold" else "p"
                yield f"<{element}>{_render_line(line)}</{element}>"
    else:
        raise TypeError(f"this is neither text nor table: {type(renderable).__name__}")


def _render_line(line: Text) -> str:
    """Render a line with its styles, which must not overlap."""
    html_, at = "", 0
    for span in sorted(line.spans):
        html_ += escape_html(line.plain[at : span.start])
        html_ += f'<b class="{escape_html(str(span.style))}">{escape_html(line.plain[span.start : span.end])}</b>'
        at = span.end
    return html_ + escape_html(line.plain[at:])


def _render_table(rows: PlainTable, link: Linker) -> str:
    head = "".join(
        f'<th scope="col"{_format_alignment(r)}>{escape_html(n)}</th>'
        for n, r in zip(rows.names, rows.right_aligned, strict=True)
    )
    body = "".join(_render_row(rows, number, link) for number in range(min(len(rows.rows), MAX_ROWS)))
    more = len(rows.rows) - MAX_ROWS
    foot = f"<tfoot><tr><td>and {more} more</td></tr></tfoot>" if more > 0 else ""
    caption = f"<caption>{escape_html(rows.title.strip())}</caption>" if rows.title.strip() else ""
    # Tables that are wider than the page can be scrolled, also with the keyboard.
    return (
        f'<div class="scrolled" tabindex="0" role="group" aria-label="{escape_html(rows.title.strip() or "table")}">'
        f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody>{foot}</table></div>"
    )


def _render_row(rows: PlainTable, number: int, link: Linker) -> str:
    cells = rows.rows[number]
    texts = {name: cell for name, cell in zip(rows.names, cells, strict=True) if isinstance(cell, str)}
    row = ""
    for i, (name, cell) in enumerate(zip(rows.names, cells, strict=True)):
        inner, target = escape_html(cell) if isinstance(cell, str) else render_bar(cell), link(name, texts)
        if target is not None:
            inner = f'<a href="{escape_html(target)}">{inner}</a>'
        kind = _format_alignment(rows.right_aligned[i])
        if number in rows.problem_rows and i == len(cells) - 1:
            kind = ' class="red"'
        elif isinstance(cell, str) and len(cell) <= MAX_SHORT_CELL:
            kind += ' class="short"'
        elif isinstance(cell, str):
            kind += ' class="long"'
        row += f'<th scope="row"{kind}>{inner}</th>' if i == 0 else f"<td{kind}>{inner}</td>"
    return f"<tr>{row}</tr>"


def _format_alignment(right: bool) -> str:
    return ' align="right"' if right else ""


def render_bar(cell: Bar) -> str:
    """Render a bar as an SVG image with a text label."""
    x, width = 200 * cell.begin, max(200 * (cell.end - cell.begin), 1.5)
    label = escape_html(str(cell))
    return (
        f'<svg class="bar" role="img" aria-label="{label}" viewBox="0 0 200 12" width="200" height="12">'
        f'<rect x="{min(x, 198.5):.1f}" width="{width:.1f}" height="12" fill="#4062bb"/></svg>'
    )
