"""Escape text for terminals: names in a checkpoint may contain characters that control a terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import Any

_SHORT_ESCAPES = {"\t": "\\t", "\n": "\\n", "\r": "\\r"}


class PrintableLines(str):
    """Text of several lines, each of which is printable."""

    __slots__ = ()


def make_printable(text: str) -> str:
    r"""Return the text with all non-printing characters escaped.

    These are control characters (C0, DEL, C1), line breaks, format characters (including Unicode's bidirectional
    controls) and lone surrogates. Terminals interpret some of them, and others reverse the order of the text behind
    them.

    >>> make_printable("a b"), make_printable("\x1b[2J"), make_printable("a\nb"), make_printable("a\u202eb\udcff")
    ('a b', '\\u001b[2J', 'a\\nb', 'a\\u202eb\\udcff')
    """
    if text.isprintable():  # true for almost all texts, and checked in one call
        return text
    return "".join(
        _escape_character(c) if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") else c for c in text
    )


def _escape_character(character: str) -> str:
    code = ord(character)
    return _SHORT_ESCAPES.get(character) or (f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}")


def join_lines(texts: Iterable[str]) -> PrintableLines:
    r"""Return texts as the lines of one text, with non-printing characters escaped.

    >>> join_lines(["a\nb", "c"])
    'a\\nb\nc'
    """
    return PrintableLines("\n".join(map(make_printable, texts)))


def make_lines_printable(text: str) -> PrintableLines:
    r"""Return a text of several lines escaped as by `make_printable`, except for its line feeds.

    >>> make_lines_printable("a\n\x1b[2J")
    'a\n\\u001b[2J'
    """
    return join_lines(text.split("\n"))


def is_terminal(stream: Any) -> bool:
    """Return True if a stream is a terminal; False if it is closed (None in Python) or has no `isatty`.

    >>> is_terminal(None)
    False
    """
    isatty = getattr(stream, "isatty", None)
    try:
        return isatty is not None and bool(isatty())
    except (OSError, ValueError):  # ValueError: the stream is closed
        return False
