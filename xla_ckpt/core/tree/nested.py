"""Nested dicts, lists and tuples: map, iterate and build them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from xla_ckpt.errors import CorruptCheckpointError

KeyPath = tuple[Any, ...]
"""Keys and indices that lead to a value."""


def map_leaves(
    value: Any,
    function: Callable[[KeyPath, Any], Any],
    key_path: KeyPath = (),
    *,
    is_leaf: Callable[[Any], bool] | None = None,
    keep_classes: bool = False,
) -> Any:
    """Return the same containers with each leaf replaced by ``function(key_path, leaf)``.

    Among sequences, only lists and tuples are containers. Their subclasses are leaves, such as `torch.Size`.

    Args:
        value: The containers.
        function: Called with the key path of a leaf, and the leaf.
        key_path: Key path of `value`.
        is_leaf: Returns True for containers that are leaves.
        keep_classes: Keep the classes of dicts and of named tuples. Otherwise all mappings become dicts, and named
            tuples are leaves.

    >>> map_leaves({"a": [1, (2,)]}, lambda keys, leaf: f"{keys}: {leaf}")
    {'a': ["('a', 0): 1", ("('a', 1, 0): 2",)]}
    """
    named = keep_classes and isinstance(value, tuple) and hasattr(value, "_fields")
    is_container = named or isinstance(value, Mapping) or type(value) in (list, tuple)
    if not is_container or (is_leaf is not None and is_leaf(value)):
        return function(key_path, value)

    def again(member: Any, key: Any) -> Any:
        return map_leaves(member, function, (*key_path, key), is_leaf=is_leaf, keep_classes=keep_classes)

    if isinstance(value, Mapping):
        members = {key: again(member, key) for key, member in value.items()}
        return _copy_class(value, members) if keep_classes and type(value) is not dict else members
    items = [again(member, i) for i, member in enumerate(value)]
    return type(value)(*items) if named else type(value)(items)


def _copy_class(value: Mapping[Any, Any], members: dict[Any, Any]) -> Any:
    """Create a dict of the class of `value` with these members, or a plain dict if `value` is another mapping.

    A copy of another mapping may share its members with the program's object, which would then be overwritten.
    """
    if not isinstance(value, dict):
        return members
    try:
        duplicate = copy.copy(value)
        for key, member in members.items():
            duplicate[key] = member  # `update` of a Counter would add
    except Exception:
        # The program's own class failed. A plain dict contains the same members.
        return members
    return members if duplicate is value else duplicate


def to_dicts_and_lists(value: Any) -> Any:
    """Convert all mappings to dicts, and all lists and tuples to lists.

    >>> to_dicts_and_lists({"a": (1, (2,))})
    {'a': [1, [2]]}
    """
    if isinstance(value, Mapping):
        return {key: to_dicts_and_lists(member) for key, member in value.items()}
    return [to_dicts_and_lists(member) for member in value] if isinstance(value, list | tuple) else value


def iterate_leaves(value: Any) -> Iterator[Any]:
    """Yield all values in nested mappings, lists and tuples that are not such containers themselves.

    >>> list(iterate_leaves({"a": [1, (2,)], "b": 3}))
    [1, 2, 3]
    """
    if isinstance(value, Mapping):
        for member in value.values():
            yield from iterate_leaves(member)
    elif isinstance(value, list | tuple):
        for member in value:
            yield from iterate_leaves(member)
    else:
        yield value


MAX_MISSING_MEMBERS = 1000
"""Maximum number of missing members of a list. DCP does not store empty dicts."""


class _OpenContainer(dict[str | int, Any]):
    """Container that is being built, unlike a dict that is a value."""


def build_nested(items: Iterable[tuple[Sequence[str | int], Any]]) -> dict[str, Any]:
    """Build nested containers from values and their paths: strings are dict keys, integers are list indices.

    Raises:
        CorruptCheckpointError: Paths contradict each other, or most of a list is missing.

    >>> build_nested([(("a", "b"), 1), (("c", 1, "d"), 2)])
    {'a': {'b': 1}, 'c': [None, {'d': 2}]}
    """
    root = _OpenContainer()
    for path, value in items:
        node = root
        for step in path[:-1]:
            below = node.setdefault(step, _OpenContainer())
            if not isinstance(below, _OpenContainer):
                raise _create_conflict_error(path)
            node = below
        if node.setdefault(path[-1], value) is not value:
            raise _create_conflict_error(path)
    state = _to_plain(root, ())
    if not isinstance(state, dict):
        raise CorruptCheckpointError("the state is a list, where a dict is expected")
    return state


def _create_conflict_error(path: Sequence[str | int]) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        "one place in the state has a value and is a container", leaf=".".join(map(str, path))
    )


def _to_plain(value: Any, path: Sequence[str | int]) -> Any:
    if not isinstance(value, _OpenContainer):
        return value
    if not value or any(isinstance(key, str) for key in value):
        if not all(isinstance(key, str) for key in value):
            raise CorruptCheckpointError(
                "one place in the state is a dict and a list", leaf=".".join(map(str, path)) or None
            )
        return {key: _to_plain(member, (*path, key)) for key, member in value.items()}
    size = 1 + max(key for key in value if isinstance(key, int))
    if size > len(value) + MAX_MISSING_MEMBERS:
        raise CorruptCheckpointError(
            "most of a list is not stored", leaf=".".join(map(str, path)), expected=f"{size} members", found=len(value)
        )
    return [_to_plain(value.get(i), (*path, i)) for i in range(size)]
