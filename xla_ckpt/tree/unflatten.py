"""A nested state from its skeleton, and from what is put in the places of its arrays and objects.

A skeleton may come from a file that somebody forged. So whatever is no skeleton of `xla_ckpt.tree.flatten` is refused.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from xla_ckpt.errors import CheckpointError, FormatError, IncompatibleCheckpointError
from xla_ckpt.tree import path as paths
from xla_ckpt.tree.classes import (
    container_below,
    makes_flags,
    scalar_below,
)
from xla_ckpt.tree.codec import Composite, Json, ValueCodec
from xla_ckpt.tree.flatten import (
    ABOUT,
    CONTENT,
    FACTORIES,
    MAX_DEPTH,
    NAMESPACES,
    component,
)
from xla_ckpt.tree.module_metadata import with_module_metadata

Resolve = Callable[[str, type], Any]
"""(``module:qualname``, base kind) -> the class of a namedtuple, dataclass or enum; raises where it cannot."""

MAX_SAME_HASH = 1000
"""Most keys of a dict, or members of a set, with the same hash: each of them is compared with all others."""


def check_hashes(keys: list[Any]) -> None:
    """Check that a dict of these keys, or a set, is made in time linear in their number.

    Raises:
        ValueError: Too many of them have the same hash.
    """
    if len(keys) > MAX_SAME_HASH and collections.Counter(map(hash, keys)).most_common(1)[0][1] > MAX_SAME_HASH:
        raise ValueError(f"more than {MAX_SAME_HASH} keys have the same hash")


def resolve_nothing(name: str, base: type) -> Any:
    """A `Resolve` that knows no class."""
    raise FormatError(f"the skeleton names the class {name}", hint=f"It should be a {base.__name__} of this program.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unflattener:
    """Rebuilds a tree from its skeleton."""

    array: Callable[[str, str], Any]
    """(leaf path, kind of array) -> the array to put there."""

    codec: ValueCodec
    object: Callable[[int, str], Any] = lambda index, path: resolve_nothing(f"object {index}", type(None))
    """(index, leaf path) -> the pickled object to put there."""

    resolve: Resolve = resolve_nothing

    compose: Callable[[Composite], Any] | None = None
    """What is put in the place of a value that consists of several arrays; None for that value."""

    module_metadata: Mapping[str, Mapping[str, Json]] = field(default_factory=dict)
    """Leaf path of each module's state dict -> module -> its metadata, as `flatten` found them."""

    def build(self, skeleton: Json, path: str = paths.ROOT, depth: int = 0) -> Any:
        """The tree below `path`.

        Raises:
            FormatError: The skeleton is nothing that `flatten` writes.
            IncompatibleCheckpointError: A class that it names is another one in this program.
        """
        if depth > MAX_DEPTH:
            raise FormatError(f"the skeleton is nested deeper than {MAX_DEPTH}", leaf=path)
        if isinstance(skeleton, list):
            return self._items(skeleton, path, depth + 1)
        if not isinstance(skeleton, dict):
            return self.codec.decode(skeleton)
        if path in self.module_metadata and isinstance(members := self._dict(skeleton, path, depth), dict):
            return with_module_metadata(members, self.metadata_at(path))
        return self._dict(skeleton, path, depth)

    def metadata_at(self, path: str) -> dict[str, Any]:
        """Return the metadata of the modules whose state dict is at a path."""
        plain = Unflattener(array=lambda leaf, kind: None, codec=self.codec)
        return {name: plain.build(of, path) for name, of in self.module_metadata[path].items()}

    def _dict(self, skeleton: dict[str, Json], path: str, depth: int) -> Any:
        if len(skeleton) == 1 and type(kind := skeleton.get("$array")) is str:
            return self.array(path, kind)  # as nearly every leaf of a large state is
        if len(skeleton) != 1 or not next(iter(skeleton)).startswith("$"):
            return self._fields(skeleton, path, depth + 1)
        ((name, body),) = skeleton.items()
        if name not in _CONTAINERS:
            return self.codec.decode(skeleton)
        try:
            return _CONTAINERS[name](self, body, path, depth + 1)
        except CheckpointError as error:  # `naming` would take a third of the time of many arrays
            error.at(leaf=path)
            raise
        except (TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            raise FormatError(f"broken {name} in the skeleton", leaf=path, found=str(body)[:80]) from error

    def _items(self, body: Json, path: str, depth: int) -> list[Any]:
        return [self.build(v, paths.join(path, str(i)), depth) for i, v in enumerate(body)]

    def _fields(self, body: Json, path: str, depth: int) -> dict[str, Any]:
        return {k: self.build(v, paths.join(path, paths.escape(k)), depth) for k, v in body.items()}

    def _keyed(self, body: Json, path: str, depth: int) -> list[tuple[Any, Any]]:
        """Pairs of which a dict can be made in time linear in their number."""
        pairs = [(self.build(k, path, depth), self.build(v, paths.join(path, component(k)), depth)) for k, v in body]
        check_hashes([key for key, _ in pairs])
        return pairs

    def _members(self, body: Json, path: str, depth: int) -> list[Any]:
        """Items of which a set can be made likewise."""
        items = self._items(body, path, depth)
        check_hashes(items)
        return items

    def _defaultdict(self, body: Json, path: str, depth: int) -> Any:
        factory, pairs = body
        function = None if factory is None else FACTORIES[factory]
        return collections.defaultdict(function, self._keyed(pairs, path, depth))

    def _deque(self, body: Json, path: str, depth: int) -> Any:
        maxlen, items = body
        return collections.deque(self._items(items, path, depth), maxlen)

    def _namedtuple(self, body: Json, path: str, depth: int) -> Any:
        name, fields = body
        kind = self.resolve(name, tuple)
        members = self._fields(fields, path, depth)
        if tuple(members) != tuple(kind._fields):
            raise IncompatibleCheckpointError(
                f"the fields of {name} have changed", expected=tuple(members), found=kind._fields
            )
        return tuple.__new__(kind, members.values())

    def _dataclass(self, body: Json, path: str, depth: int) -> Any:
        name, fields, *content = body
        kind = self.resolve(name, object)
        base = container_below(kind)
        if base is None or len(content) != (base is not object):
            raise IncompatibleCheckpointError(f"the class {name} has changed what it extends", found=str(base))
        value = base.__new__(kind)  # no __init__: a file must not be able to call code
        if content:
            members = self.build(content[0], paths.join(path, CONTENT), depth)
            for k, v in enumerate(members) if base is list else members.items():
                list.append(value, v) if base is list else base.__setitem__(value, k, v)
        for k, v in self._fields(fields, path, depth).items():
            object.__setattr__(value, k, v)
        return value

    def _extended(self, body: Json, path: str, depth: int) -> Any:
        name, fields, content = body
        kind, value = self.resolve(name, float), self.build(content, paths.join(path, CONTENT), depth)
        base = scalar_below(kind)
        if base is None or type(value) is not base:
            raise IncompatibleCheckpointError(f"the class {name} has changed what it extends", found=str(base))
        extended: Any = base.__new__(kind, value)  # neither the __new__ nor the __init__ of the class
        vars(extended).update(self._fields(fields, path, depth))
        return extended

    def _namespace(self, body: Json, path: str, depth: int) -> Any:
        name, fields = body
        if name not in NAMESPACES:
            raise FormatError("unknown kind of namespace in the skeleton", leaf=path, found=str(name)[:80])
        return self.resolve(name, object)(**self._fields(fields, path, depth))

    def _composite(self, body: Json, path: str, depth: int) -> Any:
        name, members, about = body
        parts = Composite(
            str(name), self._fields(members, path, depth), self.build(about, paths.join(path, ABOUT), depth)
        )
        return self.codec.compose(parts, self.resolve) if self.compose is None else self.compose(parts)

    def _enum(self, body: Json, path: str, depth: int) -> Any:
        name, member = body
        members = self.resolve(name, int).__members__
        if member not in members:
            raise IncompatibleCheckpointError(f"{name} has no member {member} any more", found=list(members))
        return members[member]

    def _flags(self, body: Json, path: str, depth: int) -> Any:
        name, value = body
        kind = self.resolve(name, int)
        if type(value) is not int:
            raise FormatError("flags are a number", leaf=path, found=str(value)[:80])
        if not makes_flags(kind):
            raise IncompatibleCheckpointError(f"{name} is no class of plain flags any more", found=str(kind))
        try:
            return kind(value)
        except ValueError as error:
            raise IncompatibleCheckpointError(
                f"{name} has no such flags any more", expected=hex(value)[:80], found=list(kind.__members__)
            ) from error


_CONTAINERS: dict[str, Callable[[Unflattener, Json, str, int], Any]] = {
    "$array": lambda to, body, path, _: to.array(path, str(body)),
    "$object": lambda to, body, path, _: to.object(int(body), path),
    "$dict": lambda to, *at: dict(to._keyed(*at)),
    "$OrderedDict": lambda to, *at: collections.OrderedDict(to._keyed(*at)),
    "$Counter": lambda to, *at: collections.Counter(dict(to._keyed(*at))),
    "$defaultdict": Unflattener._defaultdict,
    "$tuple": lambda to, *at: tuple(to._items(*at)),
    "$deque": Unflattener._deque,
    "$set": lambda to, *at: set(to._members(*at)),
    "$frozenset": lambda to, *at: frozenset(to._members(*at)),
    "$slice": lambda to, *at: slice(*to._items(*at)),
    "$namedtuple": Unflattener._namedtuple,
    "$namespace": Unflattener._namespace,
    "$dataclass": Unflattener._dataclass,
    "$enum": Unflattener._enum,
    "$flags": Unflattener._flags,
    "$extended": Unflattener._extended,
    "$composite": Unflattener._composite,
}
"""Name in the file -> what makes the value of (an `Unflattener`, the body, its path, its depth)."""
