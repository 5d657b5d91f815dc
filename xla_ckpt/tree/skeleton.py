"""Restoring into a given structure: a pattern of containers, arrays and placeholders laid over a stored skeleton."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from xla_ckpt.errors import IncompatibleCheckpointError
from xla_ckpt.tree import path as paths
from xla_ckpt.tree.codec import Json, ValueCodec
from xla_ckpt.tree.flatten import component

_PAIRS = frozenset({"$dict", "$OrderedDict", "$Counter"})
_ITEMS = frozenset({"$tuple", "$slice"})
_FIELDS = frozenset({"$namedtuple", "$dataclass", "$namespace"})


def children(skeleton: Json) -> dict[str, Json] | None:
    """The parts of a stored container by path component; None for everything that has none.

    >>> children({"a": 1}), children({"$tuple": [5, 6]}), children(7)
    ({'a': 1}, {'0': 5, '1': 6}, None)
    """
    if isinstance(skeleton, list):
        return {str(i): v for i, v in enumerate(skeleton)}
    if not isinstance(skeleton, dict):
        return None
    if len(skeleton) == 1:
        ((name, body),) = skeleton.items()
        if name in _PAIRS:
            return {component(k): v for k, v in body}
        if name in _ITEMS:
            return {str(i): v for i, v in enumerate(body)}
        if name in _FIELDS:
            return {paths.escape(k): v for k, v in body[1].items()}
        if name == "$defaultdict":
            return {component(k): v for k, v in body[1]}
        if name == "$deque":
            return {str(i): v for i, v in enumerate(body[1])}
        if name.startswith("$"):
            return None
    return {paths.escape(k): v for k, v in skeleton.items()}


def part_at(skeleton: Json, path: str) -> Json:
    """The part of a skeleton at a path.

    Raises:
        KeyError: There is none.
    """
    for part in paths.split(path):
        below = children(skeleton)
        if below is None:
            raise KeyError(path)
        skeleton = below[part]
    return skeleton


def array_paths(skeleton: Json, path: str) -> dict[str, str]:
    """Leaf path -> kind of every array at or below `path`."""
    if isinstance(skeleton, dict) and len(skeleton) == 1 and "$array" in skeleton:
        return {path: str(skeleton["$array"])}
    found: dict[str, str] = {}
    for part, child in (children(skeleton) or {}).items():
        found |= array_paths(child, paths.join(path, part))
    return found


def objects_in(skeleton: Json, path: str = paths.ROOT) -> dict[int, str]:
    """Number -> leaf path of every pickled object at or below `path`."""
    if isinstance(skeleton, dict) and set(skeleton) == {"$object"}:
        return {skeleton["$object"]: path}
    found: dict[int, str] = {}
    for part, child in (children(skeleton) or {}).items():
        found |= objects_in(child, paths.join(path, part))
    return found


def renumbered(skeleton: Json, number: Callable[[int], int]) -> Json:
    """The skeleton with other numbers for its pickled objects."""
    if isinstance(skeleton, list):
        return [renumbered(v, number) for v in skeleton]
    if isinstance(skeleton, dict):
        if set(skeleton) == {"$object"}:
            return {"$object": number(skeleton["$object"])}
        return {k: renumbered(v, number) for k, v in skeleton.items()}
    return skeleton


Make = Callable[[Mapping[str, Any]], Any]
"""From the restored arrays, by leaf path, to a restored value."""


class Weave:
    """Lays a pattern over a stored skeleton, and collects what it wants."""

    def __init__(self, is_array: Callable[[Any], bool], codec: ValueCodec, whole: Callable[[Json, str], Make]) -> None:
        self.is_array = is_array
        self.codec = codec
        self.whole = whole
        """Called for a stored part that the pattern takes as it is."""
        self.wanted: dict[str, Any] = {}
        """Leaf path -> the pattern's array (or description of one)."""

    def visit(self, pattern: Any, stored: Json, path: str = paths.ROOT) -> Make:
        """Check `pattern` against `stored`; a function from the restored arrays to the restored tree.

        Raises:
            IncompatibleCheckpointError: The pattern has a part that is not stored, or of another nature.
        """
        if self.is_array(pattern):
            if not (isinstance(stored, dict) and "$array" in stored):
                raise _mismatch(path, "an array", stored)
            self.wanted[path] = pattern
            return lambda arrays: arrays[path]
        below = children(stored)
        if isinstance(pattern, Mapping):
            parts = {k: paths.escape(k) if isinstance(k, str) else self._component(k, path) for k in pattern}
            made = {k: self._child(pattern[k], below, part, path, stored) for k, part in parts.items()}
            return lambda arrays: _like_mapping(pattern, {k: m(arrays) for k, m in made.items()})
        if isinstance(pattern, list | tuple | collections.deque):
            if below is None or len(below) != len(pattern):
                raise _mismatch(path, f"{len(pattern)} items", stored)
            names = getattr(pattern, "_fields", range(len(pattern)))
            several = [self._child(p, below, str(n), path, stored) for n, p in zip(names, pattern, strict=True)]
            return lambda arrays: _like_sequence(pattern, [m(arrays) for m in several])
        if dataclasses.is_dataclass(pattern) and not isinstance(pattern, type):
            fields = {
                f.name: self._child(getattr(pattern, f.name), below, paths.escape(f.name), path, stored)
                for f in dataclasses.fields(pattern)
            }
            return lambda arrays: dataclasses.replace(pattern, **{k: m(arrays) for k, m in fields.items()})
        return self.whole(stored, path)

    def _component(self, key: Any, path: str) -> str:
        encoded = self.codec.encode(key)
        if encoded is NotImplemented and isinstance(key, tuple):
            encoded = {"$tuple": [self.codec.encode(k) for k in key]}
        return component(encoded)

    def _child(self, pattern: Any, below: dict[str, Json] | None, part: str, path: str, stored: Json) -> Make:
        if below is None:
            raise _mismatch(path, "a container", stored)
        if part not in below:
            near = ", ".join(list(below)[:8]) or "nothing"
            raise IncompatibleCheckpointError(
                "the checkpoint has no such leaf", leaf=paths.join(path, part), hint=f"Stored beside it: {near}."
            )
        return self.visit(pattern, below[part], paths.join(path, part))


def _mismatch(path: str, expected: str, stored: Json) -> IncompatibleCheckpointError:
    below = children(stored)
    found = f"{len(below)} parts" if below is not None else str(stored)[:60]
    return IncompatibleCheckpointError(
        "the checkpoint holds something else at this place", leaf=path or "(root)", expected=expected, found=found
    )


def _like_mapping(pattern: Any, made: dict[Any, Any]) -> Any:
    if isinstance(pattern, collections.defaultdict):
        return collections.defaultdict(pattern.default_factory, made)
    return made if type(pattern) is dict else type(pattern)(made)


def _like_sequence(pattern: Any, made: list[Any]) -> Any:
    if hasattr(pattern, "_fields"):
        return type(pattern)(*made)
    if isinstance(pattern, collections.deque):
        return collections.deque(made, pattern.maxlen)
    return type(pattern)(made)
