"""Leaf paths: the location of a leaf in a state tree, as one readable string.

A path is the keys from the root down, joined by ``/``: ``optimizer/state/layers.0.weight/exp_avg``. A string key that
contains ``/`` or ``~`` is escaped as in JSON Pointer (RFC 6901: ``~1`` and ``~0``). A list index is its number. Any
other dict key is ``~(`` its JSON ``)``, which no string key can look like.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

ROOT = ""
"""The path of the tree itself."""

MAX_LISTED = 8
"""Leaf paths that a sentence names before it only counts."""


def escape(key: str) -> str:
    """A string key as one path component.

    >>> escape("a/b~c")
    'a~1b~0c'
    """
    return (key.replace("~", "~0").replace("/", "~1") if "/" in key or "~" in key else key) or "~e"


def escape_json_key(json_text: str) -> str:
    """A key that is not a string, given as its JSON text, as one path component.

    >>> escape_json_key("[1, 2]")
    '~([1, 2])'
    """
    return "~(" + json_text.replace("~", "~0").replace("/", "~1") + ")"


def is_json_key(component: str) -> bool:
    """Whether a path component is that of a key that is not a string.

    >>> is_json_key("~(1)"), is_json_key("~0(1)")
    (True, False)
    """
    return component.startswith("~(")


def join(parent: str, component: str) -> str:
    """The path of a child.

    >>> join("model", "weight"), join(ROOT, "model")
    ('model/weight', 'model')
    """
    return f"{parent}/{component}" if parent else component


def split(path: str) -> tuple[str, ...]:
    """The components of a path, still escaped.

    >>> split("model/a~1b")
    ('model', 'a~1b')
    """
    return tuple(path.split("/")) if path else ()


def unescape(component: str) -> str:
    """The string key that `escape` made `format_key` from.

    >>> unescape("a~1b~0c")
    'a/b~c'
    """
    return "" if component == "~e" else component.replace("~1", "/").replace("~0", "~")


def format_leaves(leaves: Sequence[str]) -> str:
    """Some leaf paths as a sentence names them: the first ones, and how many more there are.

    >>> format_leaves(["a", "b"])
    'a, b'
    """
    more = len(leaves) - MAX_LISTED
    return ", ".join(leaves[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def format_top_parts(leaves: Iterable[str]) -> str:
    """The first parts of some leaf paths, as a sentence names them.

    >>> format_top_parts(["model/a", "model/b", "step"])
    'model, step'
    """
    return format_leaves(list(dict.fromkeys(leaf.partition("/")[0] for leaf in leaves))) or "nothing"


def is_under(path: str, prefix: str) -> bool:
    """Whether `path` is `prefix` or lies below it.

    >>> is_under("model/w", "model"), is_under("models/w", "model")
    (True, False)
    """
    return not prefix or path == prefix or path.startswith(prefix + "/")


def is_match(path: str, pattern: str | None) -> bool:
    """Whether a person who types `pattern` means this leaf: it has that name, lies below it, or is like it in a shell.

    Below ``layers.0`` is also what a module of torch has there: its names have dots.

    >>> is_match("model/layers.0.weight", "model/layers.0"), is_match("model/layers.01.weight", "model/layers.0")
    (True, False)
    >>> is_match("model/layers.0.weight", "model/*weight"), is_match("model/layers.0.weight", None)
    (True, True)
    """
    return (
        pattern is None
        or is_under(path, pattern)
        or path.startswith(pattern + ".")
        or fnmatch.fnmatchcase(path, pattern)
    )
