"""Nested dicts, lists and tuples that came out of somebody else's file: every walk over them is one of these two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


def replaced_leaves(value: Any, change: Callable[[str, Any], Any], path: str, *, tuples: bool = True) -> Any:
    """The same containers, with ``change(path, leaf)`` in place of every value that is no container.

    Mappings become dicts. Of sequences only lists and tuples are containers, and their subclasses are leaves: a
    `torch.Size`, for instance. Without `tuples`, all of them become lists.

    >>> replaced_leaves({"a": [1, (2,)]}, lambda path, leaf: f"{path}={leaf}", "top")
    {'a': ['top/a/0=1', ('top/a/1/0=2',)]}
    """
    if isinstance(value, Mapping):
        return {k: replaced_leaves(v, change, f"{path}/{k}", tuples=tuples) for k, v in value.items()}
    if type(value) in (list, tuple) or (not tuples and isinstance(value, list | tuple)):
        made = [replaced_leaves(v, change, f"{path}/{i}", tuples=tuples) for i, v in enumerate(value)]
        return tuple(made) if tuples and type(value) is tuple else made
    return change(path, value)


def leaves(value: Any) -> Iterator[Any]:
    """All values in nested mappings, lists and tuples of any kind that are no such containers themselves.

    >>> list(leaves({"a": [1, (2,)], "b": 3}))
    [1, 2, 3]
    """
    if isinstance(value, Mapping):
        for member in value.values():
            yield from leaves(member)
    elif isinstance(value, list | tuple):
        for member in value:
            yield from leaves(member)
    else:
        yield value
