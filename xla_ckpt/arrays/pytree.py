"""Pytree nodes registered with `jax.tree_util`, and typed PRNG keys, split into their arrays.

flax's FrozenDict, TrainState and nnx.State, and a program's own dataclasses, register their children with jax (see
jax's documentation of custom pytree nodes). The children are stored, and nothing is pickled. Other data, such as the
functions of a TrainState, is taken from the template of a restore. Without a template the object is rebuilt if all
missing data is plain; otherwise its children are returned as a dict.

Children are matched by the names of their key paths. A class without key paths has its children by position, and may
keep their names as auxiliary data: its stored structure must equal the structure of the template.

Nothing here imports jax, because a class can only be registered in a program that has done so.
"""

from __future__ import annotations

import collections
import json as json_text
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xla_ckpt.core.tree.flatten import MAX_DEPTH, FlatTree, flatten
from xla_ckpt.core.tree.skeleton import SplitValue, get_children
from xla_ckpt.core.tree.values import Composite, Json, ValueCodec, get_class_name
from xla_ckpt.errors import CheckpointError, FormatError, IncompatibleCheckpointError

PRNG_KEY = "jax:key"
"""Name of typed PRNG keys."""

TREE_PREFIX = "jax:tree:"
"""Prefix of the name of a value of a registered class; ``module:class`` follows."""

TREEDEF = "jax:structure"
"""Name of a `PyTreeDef`, which classes such as haiku's FlatMap keep next to their children."""

_BUILTIN_CONTAINERS = (
    dict,
    list,
    tuple,
    set,
    frozenset,
    collections.OrderedDict,
    collections.defaultdict,
    collections.deque,
)
"""Containers that the skeleton has names for."""


@dataclass(frozen=True, slots=True)
class PRNGKeySpec:
    """The spec of the key data of typed keys to restore: one row per key."""

    key_shape: tuple[int, ...]
    """Shape of the pattern's keys."""

    key_sharding: Any
    """Sharding of the keys, or None. It applies to their data as well, because it never splits rows."""

    def get_sharding(self, shape: tuple[int, ...]) -> Any:
        """Return the sharding of key data; None if the number of keys differs from the pattern."""
        return self.key_sharding if shape[:-1] == self.key_shape else None


def _get_jax() -> Any:
    """Return the jax module of the program; None while another thread is importing it."""
    jax = sys.modules.get("jax")
    return None if jax is None or getattr(jax.__spec__, "_initializing", False) else jax


def _is_builtin(value: Any) -> bool:
    # None is a container without children in jax, and a placeholder in the pattern of a restore.
    return (
        value is None or type(value) in _BUILTIN_CONTAINERS or (isinstance(value, tuple) and hasattr(value, "_fields"))
    )


def get_target_sharding(pattern: Any) -> Any:
    """Return the sharding for an array, or keys, like a pattern; None for jax's default device.

    An uncommitted array gets none: jax moves it to the device of the other operands. A committed one in its place would
    not fit into a computation over a mesh.
    """
    return getattr(pattern, "sharding", None) if getattr(pattern, "committed", True) else None


def is_prng_key(value: Any) -> bool:
    """Return True if a value is a typed PRNG key of jax, or the spec of one."""
    jax = _get_jax()
    dtype = getattr(value, "dtype", None) if jax is not None else None
    return dtype is not None and type(dtype).__module__.startswith("jax") and _is_prng_key_dtype(jax, dtype)


def _is_prng_key_dtype(jax: Any, dtype: Any) -> bool:
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))


def split_pattern(pattern: Any, stored: Any, codec: ValueCodec, plain_codec: ValueCodec) -> SplitValue | None:
    """Split a pattern of a registered class or of keys, with a function that composes a value like it; None for any
    other.

    `stored` is the skeleton of the stored value, which `codec` encoded; `plain_codec` is the codec of `split_value`.
    The number and kind of keys are the stored ones. If the pattern has as many, they get its sharding.

    Raises:
        IncompatibleCheckpointError: If the pattern is a key, and an array is stored; or if its children are matched by
            position, and its structure differs from the stored one.
    """
    if is_prng_key(pattern):
        return _split_key_pattern(pattern, stored)
    node = _flatten_node(pattern)
    if node is None:
        return None
    if node.is_matched_by_position:
        _check_same_structure(node, stored, codec, plain_codec)
    return node.members, lambda values: node.treedef.unflatten([values[name] for name in node.members])


def _check_same_structure(node: _PyTreeNode, stored: Any, codec: ValueCodec, plain_codec: ValueCodec) -> None:
    """Check that children of a pattern and stored ones at the same positions are the same children.

    Raises:
        IncompatibleCheckpointError: If the structures differ.
    """
    (name, _, about), below = (
        (stored["$composite"] if _get_composite_name(stored) else ("", {}, None)),
        get_children(stored) or {},
    )
    if len(below) != len(node.members):
        raise _create_structure_error(node, f"{len(node.members)} parts", f"{len(below)} parts")
    if name.startswith(TREE_PREFIX) and _get_class_name(name) != _get_class_name(get_class_name(node.kind)):
        raise _create_structure_error(node, get_class_name(node.kind), name.removeprefix(TREE_PREFIX))
    if (
        not name.startswith(TREE_PREFIX) or about is None
    ):  # orbax, and older versions for data that is not plain, do not store it
        return
    found = about["structure"] if "structure" in about else about["outline"]
    wanted = (
        _serialize_outline(node, plain_codec)
        if "outline" in about
        else _flatten_aux_data(node.aux_data, codec).skeleton
    )
    if wanted != found:
        raise _create_structure_error(node, json_text.dumps(wanted)[:200], json_text.dumps(found)[:200])


def _create_structure_error(node: _PyTreeNode, expected: str, found: str) -> IncompatibleCheckpointError:
    return IncompatibleCheckpointError(
        f"the stored structure differs from that of the {node.kind.__name__} in `like`, whose parts have no key paths",
        expected=expected,
        found=found,
        hint="Make `like` as it was at the save, keys and their order included. Or register the class with "
        "jax.tree_util.register_pytree_with_keys before the save: then its parts are matched by their keys.",
    )


def _get_class_name(name: str) -> str:
    """Return the name of a class without its module and enclosing scopes, which may change."""
    return name.rpartition(":")[2].rpartition(".")[2]


def _split_key_pattern(pattern: Any, stored: Any) -> SplitValue | None:
    if isinstance(stored, dict) and "$array" in stored:
        raise IncompatibleCheckpointError(
            "a typed key of jax's random numbers is wanted, and an array is stored in its place",
            expected="a key, as jax.random.key makes it",
            found="an array, such as the numbers that jax.random.key_data and jax.random.PRNGKey give",
            hint="Restore the array, and make the key of it: jax.random.wrap_key_data(array).",
        )
    if _get_composite_name(stored) != PRNG_KEY:
        return None
    composite = stored["$composite"]
    wrap, impl = _get_jax().random.wrap_key_data, composite[2]["impl"]
    rows = PRNGKeySpec(pattern.shape, get_target_sharding(pattern))
    return {"data": rows}, lambda members: wrap(members["data"], impl=impl)


def find_key_mismatch(stored: Any) -> IncompatibleCheckpointError | None:
    """Return the error for typed keys that are stored where an array is requested; None if something else is stored."""
    if _get_composite_name(stored) != PRNG_KEY:
        return None
    return IncompatibleCheckpointError(
        "an array is wanted, and a typed key of jax's random numbers is stored in its place",
        expected="an array",
        found="a key, as jax.random.key makes it",
        hint="Put a key into `like`, and take the numbers of what comes: jax.random.key_data(key).",
    )


def _get_composite_name(stored: Any) -> str | None:
    """Return the skeleton's name of a composite value; None for any other."""
    composite = stored.get("$composite") if isinstance(stored, dict) else None
    return None if composite is None else composite[0]


@dataclass(frozen=True, slots=True)
class _PyTreeNode:
    """A flattened value of a registered class."""

    kind: type
    members: dict[str, Any]
    """Its children by name."""

    treedef: Any
    """The jax structure of the value, with its children as leaves."""

    is_matched_by_position: bool
    """True if its children have no names, only positions."""

    @property
    def aux_data(self) -> Any:
        """Auxiliary data of the value in jax."""
        return self.treedef.node_data()[1]


def _flatten_node(value: Any) -> _PyTreeNode | None:
    """Flatten a value of a registered class by one level; None for any other value."""
    jax = _get_jax()
    if jax is None or _is_builtin(value):
        return None
    util = jax.tree_util
    found, structure = util.tree_flatten_with_path(value, is_leaf=lambda part: part is not value)
    if structure.node_data() is None:
        return None
    names = [_get_entry_name(path[0]) for path, _ in found]
    by_position = any(isinstance(path[0], util.FlattenedIndexKey | util.SequenceKey) for path, _ in found)
    if len(set(names)) < len(names):
        names, by_position = [str(n) for n in range(len(names))], True
    members = dict(zip(names, (part for _, part in found), strict=True))
    return _PyTreeNode(type(value), members, structure, by_position)


def is_registered_pytree(value: Any) -> bool:
    """Return True if the class of a value is registered with jax, except Python's containers."""
    return _flatten_node(value) is not None


def contains_registered(value: Any) -> bool:
    """Return True if a value, or one nested in its Python containers, is of a registered class."""
    return _get_jax() is not None and _contains_registered(value, set(), 0)


def _contains_registered(value: Any, unregistered_classes: set[type], depth: int) -> bool:
    """Implement `contains_registered`; `unregistered_classes` is a cache of classes that are not registered."""
    kind = type(value)
    if kind in unregistered_classes or depth > MAX_DEPTH:
        return False
    if _is_builtin(value):
        members = value.values() if isinstance(value, dict) else value or ()
        return any(_contains_registered(member, unregistered_classes, depth + 1) for member in members)
    if is_registered_pytree(value):
        return True
    unregistered_classes.add(kind)
    return False


def has_methods(value: Any, *names: str) -> bool:
    """Return True if an object has these methods.

    For a registered class, only methods defined by the class count, because `nnx.Rngs` returns a stream of random
    numbers for any attribute.
    """
    holder = type(value) if is_registered_pytree(value) else value
    return all(callable(getattr(holder, name, None)) for name in names)


def _get_entry_name(entry: Any) -> str:
    """Return the name of a child from its key path entry: a key, an attribute, or a number."""
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def split_value(value: Any, codec: ValueCodec) -> Composite | None:
    """Split a value of a registered class, a typed key, or a `PyTreeDef`; None for anything else.

    `codec` determines which values are plain. A plain value of a class registered as static has no children, and is
    stored like any value of its kind.
    """
    if is_prng_key(value) and isinstance(value, _get_jax().Array):  # a flax Variable has the dtype of the key in it
        random = _get_jax().random
        return Composite(PRNG_KEY, {"data": random.key_data(value)}, {"impl": str(random.key_impl(value))})
    if (structure := split_treedef(value)) is not None:
        return structure
    node = _flatten_node(value)
    if node is None:
        return None
    flat = _flatten_aux_data(node.aux_data, codec)
    is_plain = not (flat.objects or flat.arrays)  # and no function, for instance
    if node.aux_data is value:  # jax.tree_util.register_static
        return None if is_plain else Composite(TREE_PREFIX + get_class_name(node.kind), {}, None)
    about = None
    if is_plain:
        about = {"structure": node.aux_data}
    elif node.is_matched_by_position:
        about = {"outline": _serialize_outline(node, codec)}
    return Composite(TREE_PREFIX + get_class_name(node.kind), node.members, about)


def _flatten_aux_data(aux_data: Any, codec: ValueCodec) -> FlatTree:
    return flatten(aux_data, lambda part: "array" if hasattr(part, "__array__") else None, codec)


def _serialize_outline(node: _PyTreeNode, codec: ValueCodec) -> str:
    """Serialize the auxiliary data of a value, without data that is not plain, such as functions."""
    return json_text.dumps(_flatten_aux_data(node.aux_data, codec).skeleton)


def split_treedef(value: Any) -> Composite | None:
    """Split a `PyTreeDef` into its nodes; None for any other value."""
    jax = _get_jax()
    if jax is None or not isinstance(value, jax.tree_util.PyTreeDef):
        return None
    return Composite(TREEDEF, {}, {"nodes": _serialize_treedef(value)})


def _serialize_treedef(treedef: Any) -> Json:
    """Serialize a structure as ``[class, auxiliary data, [children]]``, ``[]`` for None, and None for a leaf."""
    if (data := treedef.node_data()) is None:
        return None
    kind, known = data
    return (
        []
        if kind is type(None)
        else [get_class_name(kind), known, [_serialize_treedef(child) for child in treedef.children()]]
    )


def _parse_treedef(nodes: Json, resolve: Callable[[str, type], Any]) -> Any:
    """Parse a structure from `_serialize_treedef`."""
    util = _get_jax().tree_util
    leaf = util.tree_structure(0)
    if not nodes:
        return leaf if nodes is None else util.tree_structure(None)
    name, known, below = nodes
    node_data = resolve(name, type), known
    return leaf.from_node_data_and_children(
        util.default_registry, node_data, [_parse_treedef(child, resolve) for child in below]
    )


def is_composite_name(name: str) -> bool:
    """Return True if the name of a composite value is one of a registered class, a key or a `PyTreeDef`."""
    return name in (PRNG_KEY, TREEDEF) or name.startswith(TREE_PREFIX)


def resolve_composite_class(composite: Composite, resolve: Callable[[str, type], Any]) -> Any:
    """Return the class of a value that `split_value` has split; None if no class is needed to compose it.

    Raises:
        IncompatibleCheckpointError: If the class is missing.
        UntrustedObjectError: If its module is not imported.
    """
    return resolve(composite.name.removeprefix(TREE_PREFIX), type) if _can_reconstruct(composite) else None


def _can_reconstruct(composite: Composite) -> bool:
    """Return True if an object can be reconstructed from the stored data."""
    return composite.name.startswith(TREE_PREFIX) and composite.extra is not None and "outline" not in composite.extra


def compose(composite: Composite, resolve: Callable[[str, type], Any]) -> Any:
    """Compose a value that `split_value` has split; or a dict of its children if it cannot be composed without a
    pattern.

    Raises:
        FormatError: If its parts are invalid.
        UntrustedObjectError: If its module is not imported.
    """
    kind = resolve_composite_class(composite, resolve)
    jax = _get_jax()
    if jax is None or (kind is None and composite.name.startswith(TREE_PREFIX)):
        return dict(composite.members)
    try:
        if composite.name == PRNG_KEY:
            return jax.random.wrap_key_data(composite.members["data"], impl=composite.extra["impl"])
        if composite.name == TREEDEF:
            return _parse_treedef(composite.extra["nodes"], resolve)
        leaf = jax.tree_util.tree_structure(0)
        structure = leaf.from_node_data_and_children(
            jax.tree_util.default_registry, (kind, composite.extra["structure"]), [leaf] * len(composite.members)
        )
        return structure.unflatten(composite.members.values())
    except CheckpointError:
        raise
    except Exception as error:
        # The class rebuilds itself from the content of a file, so any exception is an error in the file.
        raise FormatError(f"a {composite.name} cannot be put together again: {error}") from error
