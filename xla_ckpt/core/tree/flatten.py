"""Flatten a nested state into named arrays and a skeleton, and rebuild it (`Unflattener`).

The skeleton is JSON, like a JAX treedef: it contains ``{"$array": kind}`` in place of each array and ``{"$object": n}``
in place of each value that only pickle can store. The caller decides which values are arrays and names their kind
(``torch``, ``numpy``, ``jax``). A skeleton may come from a malicious file, so `Unflattener` rejects everything that
`flatten` does not write, and calls no code that the file chooses.
"""

from __future__ import annotations

import collections
import dataclasses
import json as json_text
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from xla_ckpt.core.tree import path as paths
from xla_ckpt.core.tree.state_dict import ASSIGN_KEY, attach_module_metadata, get_module_metadata
from xla_ckpt.core.tree.values import (
    Composite,
    Json,
    ValueCodec,
    can_make_flags,
    find_container_base,
    find_scalar_base,
    get_class_name,
    is_enum_member,
    is_flags,
    is_namedtuple,
)
from xla_ckpt.errors import CheckpointError, FormatError, IncompatibleCheckpointError, UnsupportedStateError

MAX_DEPTH = 100
"""Maximum number of nested containers. Python's recursion limit is not much higher."""

NAMESPACE_CLASSES = frozenset({"argparse:Namespace", "types:SimpleNamespace"})
"""Classes that only consist of attributes."""

EXTRA_COMPONENT = "~about"
"""Path component of the extra data of a composite value. Keys that start with ``~`` are escaped, so it is unique."""

CONTENT_COMPONENT = "~content"
"""Path component of the content of an object that extends a plain type or container, in addition to its fields."""

DEFAULT_FACTORIES: dict[str, Any] = {t.__name__: t for t in (int, float, str, bool, list, dict, set, tuple)}
"""Supported default factories of a defaultdict, by name."""


@dataclass(slots=True)
class FlatTree:
    """A flattened tree."""

    arrays: dict[str, Any] = field(default_factory=dict)
    """Array leaves by leaf path, in tree order."""

    objects: list[tuple[str, Any]] = field(default_factory=list)
    """(leaf path, value) of all values that are not arrays, containers or plain. The skeleton refers to their index."""

    skeleton: Json = None
    """The tree without arrays and objects."""

    module_metadata: dict[str, dict[str, Json]] = field(default_factory=dict)
    """Leaf path of each module's state dict -> module -> its metadata (see `get_module_metadata`)."""


GetArrayKind = Callable[[Any], str | None]
"""Function that returns the kind of an array, or None if the value is not an array."""


class _Flattener:
    """Flattens one tree. Its methods return the skeleton of their argument."""

    def __init__(self, get_array_kind: GetArrayKind, codec: ValueCodec) -> None:
        self.get_array_kind = get_array_kind
        self.codec = codec
        self.flat = FlatTree()
        self.open_containers: set[int] = set()
        """Ids of the containers around the current value, to detect cycles."""

    def visit(self, value: Any, path: str) -> Json:
        if (kind := self.get_array_kind(value)) is not None:
            self.flat.arrays[path] = value
            return {"$array": kind}
        plain = self.codec.encode(value)
        if plain is not NotImplemented:
            return plain
        if id(value) in self.open_containers:
            raise UnsupportedStateError("the state contains itself", leaf=path)
        if len(self.open_containers) >= MAX_DEPTH:
            raise UnsupportedStateError(f"the state is nested deeper than {MAX_DEPTH} containers", leaf=path)
        self.open_containers.add(id(value))
        try:
            return self.flatten_container(value, path)
        finally:
            self.open_containers.discard(id(value))

    def flatten_container(self, value: Any, path: str) -> Json:
        """Flatten a container by its exact class, because a subclass may have more state than its members."""
        kind = type(value)
        if kind in (dict, collections.OrderedDict, collections.Counter, collections.defaultdict):
            return self.flatten_mapping(value, path)
        if kind is list:
            return self.flatten_items(value, path)
        if kind is tuple:
            return {"$tuple": self.flatten_items(value, path)}
        if kind is collections.deque:
            return {"$deque": [value.maxlen, self.flatten_items(value, path)]}
        if kind in (set, frozenset):
            return self.flatten_set(value, path)
        if kind is slice:
            return {"$slice": self.flatten_items([value.start, value.stop, value.step], path)}
        return self.flatten_instance(value, path)

    def flatten_mapping(self, value: Any, path: str) -> Json:
        """Flatten a dict, or an instance of a dict class of the standard library."""
        kind = type(value)
        metadata = get_module_metadata(value) if kind is collections.OrderedDict else None
        if metadata is not None:
            self.flat.module_metadata[path] = {name: self.flatten_metadata(of, path) for name, of in metadata.items()}
        if kind is dict or metadata is not None:
            if all(type(k) is str and not k.startswith("$") for k in value):
                return self.flatten_fields(value, path)
            return self.flatten_pairs(f"${kind.__name__}", value, path)
        if kind is collections.defaultdict:
            factory = self.get_factory_name(value)
            if factory is NotImplemented:
                return self.add_object(value, path)
            pairs = self.flatten_pairs("$defaultdict", value, path)
            return pairs if "$object" in pairs else {"$defaultdict": [factory, pairs["$defaultdict"]]}
        return self.flatten_pairs(f"${kind.__name__}", value, path)

    def flatten_metadata(self, value: Mapping[str, Any], path: str) -> Json:
        """Flatten the metadata of one module.

        Raises:
            UnsupportedStateError: The metadata contain a value that is not plain.
        """
        walk = _Flattener(lambda _: None, self.codec)
        encoded = walk.visit({name: v for name, v in value.items() if name != ASSIGN_KEY}, path)
        if walk.flat.objects:
            raise UnsupportedStateError(
                "the metadata of a module (state_dict()._metadata) hold a value that is not plain",
                leaf=path,
                expected="numbers, texts, and containers of them",
                found=type(walk.flat.objects[0][1]).__name__,
                hint="Return the value from get_extra_state() of the module.",
            )
        return encoded

    def flatten_set(self, value: Any, path: str) -> Json:
        """Flatten a set in an order that is the same in all processes. It is pickled if a member is not plain."""
        members = [self.encode_key(v) for v in value]
        if NotImplemented in members:
            return self.add_object(value, path)
        ordered = sorted(members, key=lambda j: json_text.dumps(j, sort_keys=True))
        return {f"${type(value).__name__}": ordered}

    def flatten_instance(self, value: Any, path: str) -> Json:
        """Flatten an instance of a supported class. Instances of other classes are pickled."""
        if (composite := value if isinstance(value, Composite) else self.codec.split_value(value)) is not None:
            return self.flatten_composite(composite, path)
        name = get_class_name(type(value))
        if is_namedtuple(value):
            return {"$namedtuple": [name, self.flatten_fields(value._asdict(), path)]}
        if name in NAMESPACE_CLASSES:
            return {"$namespace": [name, self.flatten_fields(vars(value), path)]}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            members = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if hasattr(value, f.name)}
            base = find_container_base(type(value))
            if base is None or set(getattr(value, "__dict__", {})) - set(members):  # non-field attributes would be lost
                return self.add_object(value, path)
            body = [name, self.flatten_fields(members, path)]
            if base is object:
                return {"$dataclass": body}
            content = base(base.items(value)) if issubclass(base, dict) else base(value)
            return {"$dataclass": [*body, self.visit(content, paths.join(path, CONTENT_COMPONENT))]}
        if (named := self.flatten_enum(value)) is not NotImplemented:
            return named
        if (base := find_scalar_base(type(value))) is not None:
            content = self.visit(base.__new__(base, value), paths.join(path, CONTENT_COMPONENT))
            return {"$extended": [name, self.flatten_fields(vars(value), path), content]}
        if (parts := self.codec.split_object(value, path)) is not None:
            return self.flatten_composite(parts, path)
        return self.add_object(value, path)

    @staticmethod
    def flatten_enum(value: Any) -> Json:
        """Flatten an enum member or a combination of flags. Returns NotImplemented for other values."""
        if is_enum_member(value):
            return {"$enum": [get_class_name(type(value)), value.name]}
        return {"$flags": [get_class_name(type(value)), value.value]} if is_flags(value) else NotImplemented

    def flatten_composite(self, value: Composite, path: str) -> Json:
        """Flatten a value that consists of several parts. Its extra data must be plain."""
        about = self.visit(value.extra, paths.join(path, EXTRA_COMPONENT))
        return {"$composite": [value.name, self.flatten_fields(value.members, path), about]}

    def add_object(self, value: Any, path: str) -> Json:
        self.flat.objects.append((path, value))
        return {"$object": len(self.flat.objects) - 1}

    def flatten_items(self, values: Any, path: str) -> list[Json]:
        return [self.visit(v, paths.join(path, str(i))) for i, v in enumerate(values)]

    def flatten_fields(self, members: Mapping[str, Any], path: str) -> dict[str, Json]:
        above = paths.join(path, "") if path else path
        return {k: self.visit(v, above + paths.escape(k)) for k, v in members.items()}

    def flatten_pairs(self, name: str, value: Mapping[Any, Any], path: str) -> Json:
        keys = [self.encode_key(k) for k in value]
        if NotImplemented in keys:  # a key is an object, so the whole dict is pickled
            return self.add_object(value, path)
        return {
            name: [
                [k, self.visit(v, paths.join(path, format_key(k)))] for k, v in zip(keys, value.values(), strict=True)
            ]
        }

    def encode_key(self, value: Any) -> Json:
        """Encode a dict key or set member as JSON: plain values, tuples and enums. Returns NotImplemented for other
        values.
        """
        plain = self.codec.encode(value)
        if plain is not NotImplemented:
            return plain
        if type(value) is tuple or type(value) is frozenset:
            members = [self.encode_key(v) for v in value]
            if NotImplemented not in members:
                return {"$tuple" if type(value) is tuple else "$frozenset": members}
        base = find_scalar_base(type(value))
        if base is not None and not vars(value) and type(value).__hash__ is base.__hash__:
            return {"$extended": [get_class_name(type(value)), {}, self.codec.encode(base.__new__(base, value))]}
        return self.flatten_enum(value)

    @staticmethod
    def get_factory_name(value: collections.defaultdict[Any, Any]) -> Any:
        function = value.default_factory
        if function is None:
            return None
        name = getattr(function, "__name__", "")
        return name if DEFAULT_FACTORIES.get(name) is function else NotImplemented


def format_key(key: Json) -> str:
    """Return the path component of an encoded dict key."""
    return paths.escape(key) if isinstance(key, str) else paths.escape_json_key(json_text.dumps(key))


def flatten(tree: Any, get_array_kind: GetArrayKind, codec: ValueCodec) -> FlatTree:
    """Flatten `tree` into arrays, objects and a skeleton.

    Args:
        tree: The state.
        get_array_kind: Returns the kind of an array, or None if the value is not an array.
        codec: Encoder of plain values.

    Raises:
        UnsupportedStateError: The tree contains a cycle, or is nested too deeply.

    >>> flat = flatten({"w": 3.5, "names": ("a", 1)}, lambda v: "mine" if isinstance(v, float) else None, ValueCodec())
    >>> flat.arrays, flat.skeleton
    ({'w': 3.5}, {'w': {'$array': 'mine'}, 'names': {'$tuple': ['a', 1]}})
    """
    walk = _Flattener(get_array_kind, codec)
    walk.flat.skeleton = walk.visit(tree, paths.ROOT)
    return walk.flat


ResolveClass = Callable[[str, type], Any]
"""(``module:qualname``, base kind) -> the class of a namedtuple, dataclass or enum. Raises an error if unknown."""

MAX_HASH_COLLISIONS = 1000
"""Maximum number of dict keys or set members with equal hashes, because each is compared with all others."""


def check_hashes(keys: list[Any]) -> None:
    """Check that a dict or set with these keys can be built in linear time.

    Raises:
        ValueError: Too many keys have the same hash.
    """
    if (
        len(keys) > MAX_HASH_COLLISIONS
        and collections.Counter(map(hash, keys)).most_common(1)[0][1] > MAX_HASH_COLLISIONS
    ):
        raise ValueError(f"more than {MAX_HASH_COLLISIONS} keys have the same hash")


def refuse_class(name: str, base: type) -> Any:
    """Reject a class: a `ResolveClass` without any classes.

    Raises:
        FormatError: Always.
    """
    raise FormatError(f"the skeleton names the class {name}", hint=f"It should be a {base.__name__} of this program.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unflattener:
    """Rebuilds a tree from its skeleton."""

    get_array: Callable[[str, str], Any]
    """(leaf path, kind of array) -> the array."""

    codec: ValueCodec
    get_object: Callable[[int, str], Any] = lambda index, path: refuse_class(f"object {index}", type(None))
    """(index, leaf path) -> the unpickled object."""

    resolve_class: ResolveClass = refuse_class

    compose: Callable[[Composite], Any] | None = None
    """Composite value -> its replacement, or None to compose the value itself."""

    module_metadata: Mapping[str, Mapping[str, Json]] = field(default_factory=dict)
    """Leaf path of each module's state dict -> module -> its metadata, as returned by `flatten`."""

    def build(self, skeleton: Json, path: str = paths.ROOT, depth: int = 0) -> Any:
        """Build the tree below `path`.

        Raises:
            FormatError: The skeleton is not in the form that `flatten` writes.
            IncompatibleCheckpointError: A class in the skeleton differs from the class in this program.
        """
        if depth > MAX_DEPTH:
            raise FormatError(f"the skeleton is nested deeper than {MAX_DEPTH}", leaf=path)
        if isinstance(skeleton, list):
            return self._build_items(skeleton, path, depth + 1)
        if not isinstance(skeleton, dict):
            return self.codec.decode(skeleton)
        if path in self.module_metadata and isinstance(members := self._build_dict(skeleton, path, depth), dict):
            return attach_module_metadata(members, self.build_metadata(path))
        return self._build_dict(skeleton, path, depth)

    def build_metadata(self, path: str) -> dict[str, Any]:
        """Return the metadata of the modules whose state dict is at a path."""
        plain = Unflattener(get_array=lambda leaf, kind: None, codec=self.codec)
        return {name: plain.build(of, path) for name, of in self.module_metadata[path].items()}

    def _build_dict(self, skeleton: dict[str, Json], path: str, depth: int) -> Any:
        if len(skeleton) == 1 and type(kind := skeleton.get("$array")) is str:
            return self.get_array(path, kind)  # true for nearly every leaf of a large state
        if len(skeleton) != 1 or not next(iter(skeleton)).startswith("$"):
            return self._build_fields(skeleton, path, depth + 1)
        ((name, body),) = skeleton.items()
        if name not in _BUILDERS:
            return self.codec.decode(skeleton)
        try:
            return _BUILDERS[name](self, body, path, depth + 1)
        except CheckpointError as error:  # `annotate_errors` would take a third of the time for many arrays
            error.at(leaf=path)
            raise
        except (TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
            raise FormatError(f"broken {name} in the skeleton", leaf=path, found=str(body)[:80]) from error

    def _build_items(self, body: Json, path: str, depth: int) -> list[Any]:
        return [self.build(v, paths.join(path, str(i)), depth) for i, v in enumerate(body)]

    def _build_fields(self, body: Json, path: str, depth: int) -> dict[str, Any]:
        return {k: self.build(v, paths.join(path, paths.escape(k)), depth) for k, v in body.items()}

    def _build_pairs(self, body: Json, path: str, depth: int) -> list[tuple[Any, Any]]:
        """Build the items of a dict, and check that the dict can be built in linear time."""
        pairs = [(self.build(k, path, depth), self.build(v, paths.join(path, format_key(k)), depth)) for k, v in body]
        check_hashes([key for key, _ in pairs])
        return pairs

    def _build_set_members(self, body: Json, path: str, depth: int) -> list[Any]:
        """Build the members of a set, and check that the set can be built in linear time."""
        items = self._build_items(body, path, depth)
        check_hashes(items)
        return items

    def _build_defaultdict(self, body: Json, path: str, depth: int) -> Any:
        factory, pairs = body
        function = None if factory is None else DEFAULT_FACTORIES[factory]
        return collections.defaultdict(function, self._build_pairs(pairs, path, depth))

    def _build_deque(self, body: Json, path: str, depth: int) -> Any:
        maxlen, items = body
        return collections.deque(self._build_items(items, path, depth), maxlen)

    def _build_namedtuple(self, body: Json, path: str, depth: int) -> Any:
        name, fields = body
        kind = self.resolve_class(name, tuple)
        members = self._build_fields(fields, path, depth)
        if tuple(members) != tuple(kind._fields):
            raise IncompatibleCheckpointError(
                f"the fields of {name} have changed", expected=tuple(members), found=kind._fields
            )
        return tuple.__new__(kind, members.values())

    def _build_dataclass(self, body: Json, path: str, depth: int) -> Any:
        name, fields, *content = body
        kind = self.resolve_class(name, object)
        base = find_container_base(kind)
        if base is None or len(content) != (base is not object):
            raise IncompatibleCheckpointError(f"the class {name} has changed what it extends", found=str(base))
        value = base.__new__(kind)  # without __init__, so that a file cannot call code
        if content:
            members = self.build(content[0], paths.join(path, CONTENT_COMPONENT), depth)
            for k, v in enumerate(members) if base is list else members.items():
                list.append(value, v) if base is list else base.__setitem__(value, k, v)
        for k, v in self._build_fields(fields, path, depth).items():
            object.__setattr__(value, k, v)
        return value

    def _build_extended(self, body: Json, path: str, depth: int) -> Any:
        name, fields, content = body
        kind, value = self.resolve_class(name, float), self.build(content, paths.join(path, CONTENT_COMPONENT), depth)
        base = find_scalar_base(kind)
        if base is None or type(value) is not base:
            raise IncompatibleCheckpointError(f"the class {name} has changed what it extends", found=str(base))
        extended: Any = base.__new__(kind, value)  # without the __new__ and __init__ of the class
        vars(extended).update(self._build_fields(fields, path, depth))
        return extended

    def _build_namespace(self, body: Json, path: str, depth: int) -> Any:
        name, fields = body
        if name not in NAMESPACE_CLASSES:
            raise FormatError("unknown kind of namespace in the skeleton", leaf=path, found=str(name)[:80])
        return self.resolve_class(name, object)(**self._build_fields(fields, path, depth))

    def _build_composite(self, body: Json, path: str, depth: int) -> Any:
        name, members, about = body
        parts = Composite(
            str(name),
            self._build_fields(members, path, depth),
            self.build(about, paths.join(path, EXTRA_COMPONENT), depth),
        )
        return self.codec.compose(parts, self.resolve_class) if self.compose is None else self.compose(parts)

    def _build_enum(self, body: Json, path: str, depth: int) -> Any:
        name, member = body
        members = self.resolve_class(name, int).__members__
        if member not in members:
            raise IncompatibleCheckpointError(f"{name} has no member {member} any more", found=list(members))
        return members[member]

    def _build_flags(self, body: Json, path: str, depth: int) -> Any:
        name, value = body
        kind = self.resolve_class(name, int)
        if type(value) is not int:
            raise FormatError("flags are a number", leaf=path, found=str(value)[:80])
        if not can_make_flags(kind):
            raise IncompatibleCheckpointError(f"{name} is no class of plain flags any more", found=str(kind))
        try:
            return kind(value)
        except ValueError as error:
            raise IncompatibleCheckpointError(
                f"{name} has no such flags any more", expected=hex(value)[:80], found=list(kind.__members__)
            ) from error


_BUILDERS: dict[str, Callable[[Unflattener, Json, str, int], Any]] = {
    "$array": lambda to, body, path, _: to.get_array(path, str(body)),
    "$object": lambda to, body, path, _: to.get_object(int(body), path),
    "$dict": lambda to, *at: dict(to._build_pairs(*at)),
    "$OrderedDict": lambda to, *at: collections.OrderedDict(to._build_pairs(*at)),
    "$Counter": lambda to, *at: collections.Counter(dict(to._build_pairs(*at))),
    "$defaultdict": Unflattener._build_defaultdict,
    "$tuple": lambda to, *at: tuple(to._build_items(*at)),
    "$deque": Unflattener._build_deque,
    "$set": lambda to, *at: set(to._build_set_members(*at)),
    "$frozenset": lambda to, *at: frozenset(to._build_set_members(*at)),
    "$slice": lambda to, *at: slice(*to._build_items(*at)),
    "$namedtuple": Unflattener._build_namedtuple,
    "$namespace": Unflattener._build_namespace,
    "$dataclass": Unflattener._build_dataclass,
    "$enum": Unflattener._build_enum,
    "$flags": Unflattener._build_flags,
    "$extended": Unflattener._build_extended,
    "$composite": Unflattener._build_composite,
}
"""Name in the skeleton -> function that builds the value from (an `Unflattener`, the body, its path, its depth)."""
