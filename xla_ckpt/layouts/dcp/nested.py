"""The state that a caller of DCP's nested, from the paths under which DCP stores its values. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.layouts.dcp.metadata import KeyPath

MAX_MISSING_MEMBERS = 1000
"""Members of a list that may be missing: DCP stores nothing of an empty dict."""


class _Node(dict[str | int, Any]):
    """A container whose members have keys of their own, unlike a dict that is one value."""


def nested(items: Iterable[tuple[KeyPath, Any]]) -> dict[str, Any]:
    """The values at their paths: strings are keys of dicts, integers are places in lists.

    Raises:
        CorruptCheckpointError: A path is that of a value and of a container, or of a dict and of a list.

    >>> nested([(("a", "b"), 1), (("c", 1, "d"), 2)])
    {'a': {'b': 1}, 'c': [None, {'d': 2}]}
    """
    root = _Node()
    for path, value in items:
        node = root
        for step in path[:-1]:
            below = node.setdefault(step, _Node())
            if not isinstance(below, _Node):
                raise _clash(path)
            node = below
        if node.setdefault(path[-1], value) is not value:
            raise _clash(path)
    state = _plain(root, ())
    if not isinstance(state, dict):
        raise CorruptCheckpointError("the state is a list, where DCP stores dicts")
    return state


def _clash(path: KeyPath) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        "one place in the state has a value and is a container", leaf=".".join(map(str, path))
    )


def _plain(value: Any, path: KeyPath) -> Any:
    if not isinstance(value, _Node):
        return value
    if not value or any(isinstance(key, str) for key in value):
        if not all(isinstance(key, str) for key in value):
            raise CorruptCheckpointError(
                "one place in the state is a dict and a list", leaf=".".join(map(str, path)) or None
            )
        return {key: _plain(member, (*path, key)) for key, member in value.items()}
    size = 1 + max(key for key in value if isinstance(key, int))
    if size > len(value) + MAX_MISSING_MEMBERS:
        raise CorruptCheckpointError(
            "most of a list is not stored", leaf=".".join(map(str, path)), expected=f"{size} members", found=len(value)
        )
    return [_plain(value.get(i), (*path, i)) for i in range(size)]
