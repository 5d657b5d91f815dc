"""Leaf paths: the location of a leaf in a state tree, as one readable string.

A path consists of the keys from the root down, joined by ``/``: ``optimizer/state/layers.0.weight/exp_avg``. In a
string key, ``/`` and ``~`` are escaped as in JSON Pointer (RFC 6901: ``~1`` and ``~0``). A list index is a number. Any
other dict key is ``~(``, its JSON and ``)``, which differs from all string keys.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

ROOT = ""
"""Path of the tree itself."""

MAX_LISTED = 8
"""Maximum number of leaf paths that a message lists."""


def escape(key: str) -> str:
    """Escape a string key as one path component.

    >>> escape("a/b~c")
    'a~1b~0c'
    """
    return (key.replace("~", "~0").replace("/", "~1") if "/" in key or "~" in key else key) or "~e"


def escape_json_key(json_text: str) -> str:
    """Escape a key that is not a string, given as JSON, as one path component.

    >>> escape_json_key("[1, 2]")
    '~([1, 2])'
    """
    return "~(" + json_text.replace("~", "~0").replace("/", "~1") + ")"


def is_json_key(component: str) -> bool:
    """Return True if a path component represents a key that is not a string.

    >>> is_json_key("~(1)"), is_json_key("~0(1)")
    (True, False)
    """
    return component.startswith("~(")


def join(parent: str, component: str) -> str:
    """Return the path of a child.

    >>> join("model", "weight"), join(ROOT, "model")
    ('model/weight', 'model')
    """
    return f"{parent}/{component}" if parent else component


def split(path: str) -> tuple[str, ...]:
    """Return the components of a path, still escaped.

    >>> split("model/a~1b")
    ('model', 'a~1b')
    """
    return tuple(path.split("/")) if path else ()


def unescape(component: str) -> str:
    """Return the string key of a path component: the inverse of `escape`.

    >>> unescape("a~1b~0c")
    'a/b~c'
    """
    return "" if component == "~e" else component.replace("~1", "/").replace("~0", "~")


def format_leaves(leaves: Sequence[str]) -> str:
    """Format leaf paths for a message: the first ones, and the number of the others.

    >>> format_leaves(["a", "b"])
    'a, b'
    """
    more = len(leaves) - MAX_LISTED
    return ", ".join(leaves[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def format_top_parts(leaves: Iterable[str]) -> str:
    """Format the distinct first components of leaf paths for a message.

    >>> format_top_parts(["model/a", "model/b", "step"])
    'model, step'
    """
    return format_leaves(list(dict.fromkeys(leaf.partition("/")[0] for leaf in leaves))) or "nothing"


def is_under(path: str, prefix: str) -> bool:
    """Return True if `path` is `prefix` or below it.

    >>> is_under("model/w", "model"), is_under("models/w", "model")
    (True, False)
    """
    return not prefix or path == prefix or path.startswith(prefix + "/")


def is_match(path: str, pattern: str | None) -> bool:
    """Return True if a leaf matches a user's pattern: its path, a parent, or a shell-style wildcard pattern.

    The submodules and parameters of a torch module also match, because their names are separated by dots.

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
