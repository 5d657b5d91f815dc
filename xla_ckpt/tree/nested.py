"""Nested dicts, lists and tuples, of a program or from somebody's file: walks over them are made of these."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from xla_ckpt.errors import CorruptCheckpointError

Keys = tuple[Any, ...]
"""The keys and numbers that lead to a value."""


def replaced_leaves(
    value: Any,
    change: Callable[[Keys, Any], Any],
    keys: Keys = (),
    *,
    is_leaf: Callable[[Any], bool] | None = None,
    classes: bool = False,
) -> Any:
    """The same containers, with ``change(keys, leaf)`` in place of every value that is no container.

    Of sequences only lists and tuples are containers, and their subclasses are leaves: a `torch.Size`, for instance.

    Args:
        value: The containers.
        change: Gets the keys that lead to a leaf, and the leaf.
        keys: Those that lead to `value`.
        is_leaf: Says which further values are leaves; a container for which it is false is none.
        classes: Keep the classes of dicts and of named tuples. Otherwise all mappings become dicts, and named tuples
            are leaves.

    >>> replaced_leaves({"a": [1, (2,)]}, lambda keys, leaf: f"{keys}: {leaf}")
    {'a': ["('a', 0): 1", ("('a', 1, 0): 2",)]}
    """
    named = classes and isinstance(value, tuple) and hasattr(value, "_fields")
    is_container = named or isinstance(value, Mapping) or type(value) in (list, tuple)
    if not is_container or (is_leaf is not None and is_leaf(value)):
        return change(keys, value)

    def again(member: Any, key: Any) -> Any:
        return replaced_leaves(member, change, (*keys, key), is_leaf=is_leaf, classes=classes)

    if isinstance(value, Mapping):
        members = {key: again(member, key) for key, member in value.items()}
        return _like(value, members) if classes and type(value) is not dict else members
    items = [again(member, i) for i, member in enumerate(value)]
    return type(value)(*items) if named else type(value)(items)


def _like(value: Mapping[Any, Any], members: dict[Any, Any]) -> Any:
    """A dict of the class of `value` with these members; a plain dict in place of any other mapping.

    A copy of another mapping may share its members with the program's, which would be overwritten.
    """
    if not isinstance(value, dict):
        return members
    try:
        duplicate = copy.copy(value)
        for key, member in members.items():
            duplicate[key] = member  # `update` of a Counter would add
    except Exception:
        # It is code of the program's own, and a plain dict holds the same.
        return members
    return members if duplicate is value else duplicate


def in_dicts_and_lists(value: Any) -> Any:
    """The same values, in dicts in place of all mappings, and in lists in place of all lists and tuples.

    >>> in_dicts_and_lists({"a": (1, (2,))})
    {'a': [1, [2]]}
    """
    if isinstance(value, Mapping):
        return {key: in_dicts_and_lists(member) for key, member in value.items()}
    return [in_dicts_and_lists(member) for member in value] if isinstance(value, list | tuple) else value


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


MAX_MISSING_MEMBERS = 1000
"""Members of a list that may be missing: DCP stores nothing of an empty dict."""


class _Open(dict[str | int, Any]):
    """A container whose members have keys of their own, unlike a dict that is one value."""


def nested(items: Iterable[tuple[Sequence[str | int], Any]]) -> dict[str, Any]:
    """The values at their paths: strings are keys of dicts, integers are places in lists.

    Raises:
        CorruptCheckpointError: A path is that of a value and of a container, or of a dict and of a list.

    >>> nested([(("a", "b"), 1), (("c", 1, "d"), 2)])
    {'a': {'b': 1}, 'c': [None, {'d': 2}]}
    """
    root = _Open()
    for path, value in items:
        node = root
        for step in path[:-1]:
            below = node.setdefault(step, _Open())
            if not isinstance(below, _Open):
                raise _clash(path)
            node = below
        if node.setdefault(path[-1], value) is not value:
            raise _clash(path)
    state = _plain(root, ())
    if not isinstance(state, dict):
        raise CorruptCheckpointError("the state is a list, where a dict is expected")
    return state


def _clash(path: Sequence[str | int]) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        "one place in the state has a value and is a container", leaf=".".join(map(str, path))
    )


def _plain(value: Any, path: Sequence[str | int]) -> Any:
    if not isinstance(value, _Open):
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
