"""A nested state as named array leaves plus a skeleton. `xla_ckpt.tree.unflatten` goes back.

`flatten` takes the arrays out of nested containers; what stays is the skeleton: JSON with ``{"$array": kind}`` where an
array was and ``{"$object": n}`` where a value was that only pickle can store. It does not know what an array is: the
caller says, and names its kind (``torch``, ``numpy``, ``jax``).
"""

from __future__ import annotations

import collections
import dataclasses
import json as json_text
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.tree import path as paths
from xla_ckpt.tree.classes import (
    class_name,
    container_below,
    is_enum_member,
    is_flags,
    is_namedtuple,
    scalar_below,
)
from xla_ckpt.tree.codec import Composite, Json, ValueCodec
from xla_ckpt.tree.module_metadata import ASSIGNED, module_metadata

MAX_DEPTH = 100
"""Containers inside containers; deeper trees are a cycle in all but name. Python's own stack ends not far behind."""

NAMESPACES = frozenset({"argparse:Namespace", "types:SimpleNamespace"})
"""Classes that are nothing but a bag of attributes."""

ABOUT = "~about"
"""Path component of what a composite value takes beside its arrays. No key begins with ``~``, unless it is escaped."""

CONTENT = "~content"
"""Path component of what an object of a class that extends a plain type or container holds beside its fields."""

FACTORIES: dict[str, Any] = {t.__name__: t for t in (int, float, str, bool, list, dict, set, tuple)}
"""What a defaultdict may make its values with, by name."""


@dataclass(slots=True)
class Flat:
    """A tree taken apart."""

    arrays: dict[str, Any] = field(default_factory=dict)
    """Array leaves by leaf path, in tree order."""

    objects: list[tuple[str, Any]] = field(default_factory=list)
    """(leaf path, value) of what is neither array, container nor plain; the skeleton refers to it by index."""

    skeleton: Json = None
    """The tree without them."""

    module_metadata: dict[str, dict[str, Json]] = field(default_factory=dict)
    """Leaf path of each module's state dict -> module -> its metadata (see `module_metadata`)."""


ArrayKind = Callable[[Any], str | None]
"""value -> what kind of array it is, or None if it is none."""


class _Flattener:
    """Takes one tree apart. Its methods return the skeleton of what they are given."""

    def __init__(self, array_kind: ArrayKind, codec: ValueCodec) -> None:
        self.array_kind = array_kind
        self.codec = codec
        self.flat = Flat()
        self.open: set[int] = set()
        """The containers around the value that is visited: one that comes again contains itself."""

    def visit(self, value: Any, path: str) -> Json:
        if (kind := self.array_kind(value)) is not None:
            self.flat.arrays[path] = value
            return {"$array": kind}
        plain = self.codec.encode(value)
        if plain is not NotImplemented:
            return plain
        if id(value) in self.open:
            raise UnsupportedStateError("the state contains itself", leaf=path)
        if len(self.open) >= MAX_DEPTH:
            raise UnsupportedStateError(f"the state is nested deeper than {MAX_DEPTH} containers", leaf=path)
        self.open.add(id(value))
        try:
            return self.container(value, path)
        finally:
            self.open.discard(id(value))

    def container(self, value: Any, path: str) -> Json:
        """A container, by its exact class: a subclass may hold more than its members."""
        kind = type(value)
        if kind in (dict, collections.OrderedDict, collections.Counter, collections.defaultdict):
            return self.mapping(value, path)
        if kind is list:
            return self.items(value, path)
        if kind is tuple:
            return {"$tuple": self.items(value, path)}
        if kind is collections.deque:
            return {"$deque": [value.maxlen, self.items(value, path)]}
        if kind in (set, frozenset):
            return self.unordered(value, path)
        if kind is slice:
            return {"$slice": self.items([value.start, value.stop, value.step], path)}
        return self.instance(value, path)

    def mapping(self, value: Any, path: str) -> Json:
        """A dict, or one of the standard library's classes of dicts."""
        kind = type(value)
        metadata = module_metadata(value) if kind is collections.OrderedDict else None
        if metadata is not None:
            self.flat.module_metadata[path] = {name: self.metadata(of, path) for name, of in metadata.items()}
        if kind is dict or metadata is not None:
            if all(type(k) is str and not k.startswith("$") for k in value):
                return self.fields(value, path)
            return self.pairs(f"${kind.__name__}", value, path)
        if kind is collections.defaultdict:
            factory = self.factory(value)
            if factory is NotImplemented:
                return self.object(value, path)
            pairs = self.pairs("$defaultdict", value, path)
            return pairs if "$object" in pairs else {"$defaultdict": [factory, pairs["$defaultdict"]]}
        return self.pairs(f"${kind.__name__}", value, path)

    def metadata(self, value: Mapping[str, Any], path: str) -> Json:
        """The metadata of one module, which must be plain."""
        walk = _Flattener(lambda _: None, self.codec)
        encoded = walk.visit({name: v for name, v in value.items() if name != ASSIGNED}, path)
        if walk.flat.objects:
            raise UnsupportedStateError(
                "the metadata of a module (state_dict()._metadata) hold a value that is not plain",
                leaf=path,
                expected="numbers, texts, and containers of them",
                found=type(walk.flat.objects[0][1]).__name__,
                hint="Return the value from get_extra_state() of the module.",
            )
        return encoded

    def unordered(self, value: Any, path: str) -> Json:
        """A set, in an order that does not depend on the process; a pickle if a member is no plain value."""
        members = [self.hashable(v) for v in value]
        if NotImplemented in members:
            return self.object(value, path)
        ordered = sorted(members, key=lambda j: json_text.dumps(j, sort_keys=True))
        return {f"${type(value).__name__}": ordered}

    def instance(self, value: Any, path: str) -> Json:
        """An instance of a class that comes apart, or that the skeleton names; a pickle if it is of any other class."""
        if (composite := value if isinstance(value, Composite) else self.codec.apart(value)) is not None:
            return self.composite(composite, path)
        name = class_name(type(value))
        if is_namedtuple(value):
            return {"$namedtuple": [name, self.fields(value._asdict(), path)]}
        if name in NAMESPACES:
            return {"$namespace": [name, self.fields(vars(value), path)]}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            members = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
            base = container_below(type(value))
            if base is None or set(getattr(value, "__dict__", {})) - set(members):  # what is no field would be lost
                return self.object(value, path)
            body = [name, self.fields(members, path)]
            if base is object:
                return {"$dataclass": body}
            content = base(base.items(value)) if issubclass(base, dict) else base(value)
            return {"$dataclass": [*body, self.visit(content, paths.join(path, CONTENT))]}
        if (named := self.of_enum(value)) is not NotImplemented:
            return named
        if (base := scalar_below(type(value))) is not None:
            content = self.visit(base.__new__(base, value), paths.join(path, CONTENT))
            return {"$extended": [name, self.fields(vars(value), path), content]}
        if (parts := self.codec.attributes(value, path)) is not None:
            return self.composite(parts, path)
        return self.object(value, path)

    @staticmethod
    def of_enum(value: Any) -> Json:
        """A member of an enum, or a combination of flags; NotImplemented for any other value."""
        if is_enum_member(value):
            return {"$enum": [class_name(type(value)), value.name]}
        return {"$flags": [class_name(type(value)), value.value]} if is_flags(value) else NotImplemented

    def composite(self, value: Composite, path: str) -> Json:
        """A value that consists of several parts. What else it takes must be plain."""
        about = self.visit(value.about, paths.join(path, ABOUT))
        return {"$composite": [value.name, self.fields(value.members, path), about]}

    def object(self, value: Any, path: str) -> Json:
        self.flat.objects.append((path, value))
        return {"$object": len(self.flat.objects) - 1}

    def items(self, values: Any, path: str) -> list[Json]:
        return [self.visit(v, paths.join(path, str(i))) for i, v in enumerate(values)]

    def fields(self, members: Mapping[str, Any], path: str) -> dict[str, Json]:
        above = paths.join(path, "") if path else path
        return {k: self.visit(v, above + paths.escape(k)) for k, v in members.items()}

    def pairs(self, name: str, value: Mapping[Any, Any], path: str) -> Json:
        keys = [self.hashable(k) for k in value]
        if NotImplemented in keys:  # a key that is itself an object: the whole dict is one
            return self.object(value, path)
        return {
            name: [
                [k, self.visit(v, paths.join(path, component(k)))] for k, v in zip(keys, value.values(), strict=True)
            ]
        }

    def hashable(self, value: Any) -> Json:
        """A dict key or set member as JSON: plain values, tuples and enums of them; else NotImplemented."""
        plain = self.codec.encode(value)
        if plain is not NotImplemented:
            return plain
        if type(value) is tuple or type(value) is frozenset:
            members = [self.hashable(v) for v in value]
            if NotImplemented not in members:
                return {"$tuple" if type(value) is tuple else "$frozenset": members}
        base = scalar_below(type(value))
        if base is not None and not vars(value) and type(value).__hash__ is base.__hash__:
            return {"$extended": [class_name(type(value)), {}, self.codec.encode(base.__new__(base, value))]}
        return self.of_enum(value)

    @staticmethod
    def factory(value: collections.defaultdict[Any, Any]) -> Any:
        function = value.default_factory
        if function is None:
            return None
        name = getattr(function, "__name__", "")
        return name if FACTORIES.get(name) is function else NotImplemented


def component(key: Json) -> str:
    """The path component of an encoded dict key."""
    return paths.escape(key) if isinstance(key, str) else paths.escape_other(json_text.dumps(key))


def flatten(tree: Any, array_kind: ArrayKind, codec: ValueCodec) -> Flat:
    """Take `tree` apart.

    Raises:
        UnsupportedStateError: A cycle, or absurd nesting.

    >>> flat = flatten({"w": 3.5, "names": ("a", 1)}, lambda v: "mine" if isinstance(v, float) else None, ValueCodec())
    >>> flat.arrays, flat.skeleton
    ({'w': 3.5}, {'w': {'$array': 'mine'}, 'names': {'$tuple': ['a', 1]}})
    """
    walk = _Flattener(array_kind, codec)
    walk.flat.skeleton = walk.visit(tree, paths.ROOT)
    return walk.flat
