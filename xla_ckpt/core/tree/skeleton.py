"""Skeletons of stored states: look up parts, list leaves, and match a template against them.

A skeleton is the JSON structure that `core.tree.flatten` writes. `TemplateMatcher` compares a template (containers,
arrays and placeholders of the program) with a stored skeleton, and collects the arrays to load and all mismatches.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree.flatten import CONTENT_COMPONENT, MAX_DEPTH, format_key
from xla_ckpt.core.tree.state_dict import attach_module_metadata
from xla_ckpt.core.tree.values import Json, ValueCodec
from xla_ckpt.errors import FormatError, annotate_errors

NOT_STORED = "wanted, but not stored"
"""Message for a leaf that is not stored."""

_PAIRS = frozenset({"$dict", "$OrderedDict", "$Counter"})
_ITEMS = frozenset({"$tuple", "$slice"})
_FIELDS = frozenset({"$namedtuple", "$dataclass", "$extended", "$namespace", "$composite"})
_WITH_CONTENT = frozenset({"$dataclass", "$extended"})


def get_children(skeleton: Json) -> dict[str, Json] | None:
    """Return the children of a stored container by path component, or None for other values.

    >>> get_children({"a": 1}), get_children({"$tuple": [5, 6]}), get_children(7)
    ({'a': 1}, {'0': 5, '1': 6}, None)

    Raises:
        FormatError: The container is malformed.
    """
    try:
        return _get_children(skeleton)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise FormatError("broken container in the skeleton", found=next(iter(skeleton))) from error


def _get_children(skeleton: Json) -> dict[str, Json] | None:
    if isinstance(skeleton, list):
        return _index_items(skeleton)
    if not isinstance(skeleton, dict):
        return None
    if len(skeleton) == 1:
        ((name, body),) = skeleton.items()
        if name.startswith("$"):
            return _get_wrapped_children(name, body)
    return _escape_keys(skeleton)


def _get_wrapped_children(name: str, body: Json) -> dict[str, Json] | None:
    """Return the children of ``{name: body}``, where `name` is a kind of container or value."""
    if name in _PAIRS:
        return _map_pairs(body)
    if name in _ITEMS:
        return _index_items(body)
    if name in _FIELDS:
        content = {CONTENT_COMPONENT: body[2]} if name in _WITH_CONTENT and len(body) > 2 else {}
        return {**_escape_keys(body[1]), **content}
    if name == "$defaultdict":
        return _map_pairs(body[1])
    if name == "$deque":
        return _index_items(body[1])
    return None


def _index_items(items: Sequence[Json]) -> dict[str, Json]:
    return {str(i): item for i, item in enumerate(items)}


def _escape_keys(members: Mapping[str, Json]) -> dict[str, Json]:
    return {paths.escape(key): member for key, member in members.items()}


def _map_pairs(pairs: Iterable[tuple[Json, Json]]) -> dict[str, Json]:
    return {format_key(key): member for key, member in pairs}


def get_part(skeleton: Json, path: str) -> Json:
    """Return the part of a skeleton at a path.

    Raises:
        KeyError: There is no such part.
    """
    for part in paths.split(path):
        below = get_children(skeleton)
        if below is None:
            raise KeyError(path)
        skeleton = below[part]
    return skeleton


def iterate_leaf_parts(skeleton: Json, path: str = paths.ROOT, depth: int = 0) -> Iterator[tuple[str, Json]]:
    """Yield (leaf path, part) of every part without children: arrays, objects, plain values, empty containers.

    >>> list(iterate_leaf_parts({"a": [1, {"$array": "torch"}], "b": {}}))
    [('a/0', 1), ('a/1', {'$array': 'torch'}), ('b', {})]

    Raises:
        FormatError: A container is malformed, or the nesting is too deep.
    """
    if depth > MAX_DEPTH:
        raise FormatError(f"the skeleton is nested deeper than {MAX_DEPTH}", leaf=path[:80])
    below = get_children(skeleton)
    if not below:
        yield path, skeleton
        return
    for part, child in below.items():
        if is_array(child):  # true for nearly every leaf of a large state
            yield paths.join(path, part), child
        else:
            yield from iterate_leaf_parts(child, paths.join(path, part), depth + 1)


def is_array(part: Json) -> bool:
    """Return True if a part of a skeleton represents an array."""
    return isinstance(part, dict) and len(part) == 1 and "$array" in part


def get_plain_values(skeleton: Json) -> dict[str, Json]:
    """Return leaf path -> typed JSON of every value of a state that is not an array.

    >>> get_plain_values({"a": [1, {"$array": "torch"}], "b": {}})
    {'a/0': 1, 'b': {}}
    """
    return {leaf: part for leaf, part in iterate_leaf_parts(skeleton) if not is_array(part)}


def is_object(part: Json) -> bool:
    """Return True if a part of a skeleton represents a pickled object."""
    return isinstance(part, dict) and set(part) == {"$object"}


def select_parts(skeleton: Json, part_paths: Iterable[str]) -> dict[str, Json]:
    """Return a skeleton with only the selected parts, in dicts with string keys.

    >>> select_parts({"a": {"b": 1, "c": 2}, "d": 3}, ["a/c"])
    {'a': {'c': 2}}

    Raises:
        KeyError: A part does not exist.
    """
    tree: dict[str, Any] = {}
    for path in part_paths:
        *above, last = map(paths.unescape, paths.split(path))
        at = tree
        for key in above:
            at = at.setdefault(key, {})
        at[last] = get_part(skeleton, path)
    return tree


def find_arrays(skeleton: Json, path: str) -> dict[str, str]:
    """Map the leaf path of every array at or below `path` to its kind."""
    return {leaf: str(part["$array"]) for leaf, part in iterate_leaf_parts(skeleton, path) if is_array(part)}


def find_objects(skeleton: Json) -> dict[int, str]:
    """Return number -> leaf path of every pickled object.

    Raises:
        FormatError: An object's number is malformed.
    """
    leaves: dict[int, str] = {}
    for leaf, part in iterate_leaf_parts(skeleton):
        if is_object(part):
            number = part["$object"]
            if type(number) is not int:
                raise FormatError("broken $object in the skeleton", leaf=leaf, found=str(number)[:80])
            leaves[number] = leaf
    return leaves


def renumber_objects(skeleton: Json, get_number: Callable[[int], int]) -> Json:
    """Return the skeleton with its pickled objects renumbered."""
    if isinstance(skeleton, list):
        return [renumber_objects(v, get_number) for v in skeleton]
    if isinstance(skeleton, dict):
        if is_object(skeleton):
            return {"$object": get_number(skeleton["$object"])}
        return {k: renumber_objects(v, get_number) for k, v in skeleton.items()}
    return skeleton


BuildValue = Callable[[Mapping[str, Any]], Any]
"""Function that builds a restored value from the restored arrays, by leaf path."""


SplitValue = tuple[Mapping[str, Any], Callable[[Mapping[str, Any]], Any]]
"""Parts of a value by name, and a function that builds a similar value from such parts."""


class TemplateMatcher:
    """Matches a template (`pattern`) with a stored skeleton, and collects the arrays to load and all mismatches."""

    def __init__(
        self,
        is_array: Callable[[Any], bool],
        codec: ValueCodec,
        restore_stored: Callable[[Json, str], BuildValue],
        *,
        split_container: Callable[[Any, Json], SplitValue | None] = lambda pattern, stored: None,
        convert_value: Callable[[Any, Json], Any] = lambda pattern, stored: NotImplemented,
        get_metadata: Callable[[str], Mapping[str, Mapping[str, Any]] | None] = lambda path: None,
    ) -> None:
        self.is_array = is_array
        self.codec = codec
        self.split_container = split_container
        """(pattern, stored part) -> the parts of a container whose class the skeleton cannot represent, or None."""
        self.convert_value = convert_value
        """(pattern, stored part) -> an array like the pattern, created from a stored value that is not an array;
        NotImplemented if that is impossible."""
        self.get_metadata = get_metadata
        """Leaf path -> metadata of the modules whose state dict is stored there, otherwise None."""
        self.restore_stored = restore_stored
        """Called for a stored part that the pattern accepts unchanged."""
        self.matched: dict[str, Any] = {}
        """Leaf path -> the pattern's array (or description of one)."""
        self.unmatched: dict[str, str] = {}
        """Leaf path -> reason why the pattern does not match: the leaf is not stored, or has another type."""

    def match(self, pattern: Any, stored: Json, path: str = paths.ROOT) -> BuildValue:
        """Match `pattern` with `stored`, and return a function from the restored arrays to the restored tree.

        The function may only be called if `unmatched` is empty.
        """
        if self.is_array(pattern):
            return self._match_array(pattern, stored, path)
        with annotate_errors(leaf=path):
            taken = self.split_container(pattern, stored)
        if taken is not None:
            return self._match_parts(taken, stored, path)
        if isinstance(pattern, Mapping):
            return self._match_mapping(pattern, stored, path)
        if isinstance(pattern, list | tuple | collections.deque):
            return self._match_sequence(pattern, stored, path)
        if dataclasses.is_dataclass(pattern) and not isinstance(pattern, type):
            return self._match_dataclass(pattern, stored, path)
        return self.restore_stored(stored, path)

    def _match_array(self, pattern: Any, stored: Json, path: str) -> BuildValue:
        if not (isinstance(stored, dict) and "$array" in stored):
            with annotate_errors(leaf=path):
                array = self.convert_value(pattern, stored)
            if array is NotImplemented:
                return self._add_unmatched(path, _describe_mismatch("an array", stored))
            return lambda arrays: array
        self.matched[path] = pattern
        return lambda arrays: arrays[path]

    def _match_parts(self, taken: SplitValue, stored: Json, path: str) -> BuildValue:
        members, compose = taken
        below = get_children(stored)
        makers = {
            name: self._match_child(part, below, paths.escape(name), path, stored) for name, part in members.items()
        }
        return lambda arrays: compose({name: make(arrays) for name, make in makers.items()})

    def _match_mapping(self, pattern: Mapping[Any, Any], stored: Json, path: str) -> BuildValue:
        below = get_children(stored)
        makers = {
            key: self._match_child(value, below, self._find_stored_key(key, below), path, stored)
            for key, value in pattern.items()
        }
        metadata = self.get_metadata(path) if type(pattern) is collections.OrderedDict else None
        if metadata is not None:
            return lambda arrays: attach_module_metadata({key: make(arrays) for key, make in makers.items()}, metadata)
        return lambda arrays: _build_mapping(pattern, {key: make(arrays) for key, make in makers.items()})

    def _match_sequence(self, pattern: Any, stored: Json, path: str) -> BuildValue:
        below = get_children(stored)
        if stored is None and len(pattern) == 0 and hasattr(pattern, "_fields"):
            return lambda arrays: pattern  # orbax stores None for a named tuple without fields, as optax's EmptyState
        if below is None or len(below) != len(pattern):
            return self._add_unmatched(path, _describe_mismatch(f"{len(pattern)} items", stored))
        names = getattr(pattern, "_fields", range(len(pattern)))
        makers = [self._match_child(p, below, str(name), path, stored) for name, p in zip(names, pattern, strict=True)]
        return lambda arrays: _build_sequence(pattern, [make(arrays) for make in makers])

    def _match_dataclass(self, pattern: Any, stored: Json, path: str) -> BuildValue:
        below = get_children(stored)
        makers = {
            field.name: self._match_child(getattr(pattern, field.name), below, paths.escape(field.name), path, stored)
            for field in dataclasses.fields(pattern)
        }
        return lambda arrays: dataclasses.replace(pattern, **{name: make(arrays) for name, make in makers.items()})

    def _find_stored_key(self, key: Any, below: dict[str, Json] | None) -> str:
        """Return the stored path component of a pattern's key. orbax stores the decimal digits of integer keys."""
        part = self._format_key(key)
        if type(key) is int and below is not None and part not in below and (text := paths.escape(str(key))) in below:
            return text
        return part

    def _format_key(self, key: Any) -> str:
        """Return the path component of a pattern's key, as `flatten` creates it from the saved key."""
        if isinstance(key, str):
            return paths.escape(key)
        encoded = self.codec.encode(key)
        if encoded is NotImplemented and isinstance(key, tuple):
            encoded = {"$tuple": [self.codec.encode(k) for k in key]}
        return format_key(encoded)

    def _match_child(
        self, pattern: Any, below: dict[str, Json] | None, part: str, path: str, stored: Json
    ) -> BuildValue:
        if below is None:
            return self._add_unmatched(path, _describe_mismatch("a container", stored))
        if part not in below:
            near = ", ".join(list(below)[:8]) or "nothing"
            return self._add_unmatched(paths.join(path, part), f"{NOT_STORED}; stored beside it: {near}")
        return self.match(pattern, below[part], paths.join(path, part))

    def _add_unmatched(self, path: str, reason: str) -> BuildValue:
        self.unmatched.setdefault(path or "(root)", reason)
        return lambda arrays: None


def _describe_mismatch(wanted: str, stored: Json) -> str:
    below = get_children(stored)
    nature = f"{len(below)} parts" if below is not None else str(stored)[:60]
    return f"{nature} stored, {wanted} wanted"


def _build_mapping(pattern: Any, members: dict[Any, Any]) -> Any:
    if isinstance(pattern, collections.defaultdict):
        return collections.defaultdict(pattern.default_factory, members)
    return members if type(pattern) is dict else type(pattern)(members)


def _build_sequence(pattern: Any, items: list[Any]) -> Any:
    if hasattr(pattern, "_fields"):
        return type(pattern)(*items)
    if isinstance(pattern, collections.deque):
        return collections.deque(items, pattern.maxlen)
    return type(pattern)(items)
