"""A whole document of HTML around pages. Pure.

It has no script at all, and its Content-Security-Policy allows none, nor anything from elsewhere: only the style sheet
that stands in it, by its digest.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

from xla_ckpt.tables.html import escaped
from xla_ckpt.view.pages import Page

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

BEGINNING = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="generator" content="xla-ckpt view">'
)
"""How each document begins. A file that begins so may be written anew; any other one is somebody's."""

CONTENT_POLICY = (
    f"default-src 'none'; style-src 'sha256-{base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}'; "
    "form-action 'self'; base-uri 'none'"
)
"""What a browser may do with a page: show it, by its own style, and send its forms back to where it came from."""


def document(title: str, body: str, *, home: str | None) -> bytes:
    """A document.

    Args:
        title: Its title.
        body: HTML of its main part.
        home: Link to the first page; None where this is all there is.
    """
    back = "" if home is None else f'<nav aria-label="Pages"><a href="{escaped(home)}">All tags</a></nav>'
    return (
        f'{BEGINNING}<meta http-equiv="Content-Security-Policy" content="{escaped(CONTENT_POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>{escaped(title)}</title><style>{STYLE}</style></head><body>"
        f'<a class="skip" href="#main">To the content</a><header>xla-ckpt view{back}</header>'
        f'<main id="main" tabindex="-1">{body}</main></body></html>\n'
    ).encode()


def one_document(title: str, pages: Sequence[tuple[str, Page]]) -> bytes:
    """All pages in one document, which needs no server. Each comes with the name by which links find it."""
    contents = "".join(f'<li><a href="#{escaped(name)}">{escaped(page.title)}</a></li>' for name, page in pages)
    sections = "\n".join(f'<section id="{escaped(name)}">{page.body}</section>' for name, page in pages)
    listed = f'<nav aria-label="Contents"><ul>{contents}</ul></nav>'
    return document(title, f"<h1>{escaped(title)}</h1>{listed}{sections}", home=None)
