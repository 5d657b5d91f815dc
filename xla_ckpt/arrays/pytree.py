"""Pytree nodes registered with `jax.tree_util`, and typed PRNG keys, split into their arrays.

flax's FrozenDict, TrainState and nnx.State, and a program's own dataclasses, tell jax what they consist of (see jax's
documentation of custom pytree nodes). Their parts are stored, and nothing is pickled. What is not a part, such as the
functions of a TrainState, is taken from the template of a restore. Without a template the object is rebuilt if all
that is missing is plain; otherwise its parts are returned as a dict.

Parts are matched by the names of their key paths. A class without key paths has its parts by position, and may keep
their names as auxiliary data: its stored structure must equal that of the template.

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
"""Name of a typed key of random numbers."""

TREE_PREFIX = "jax:tree:"
"""Begins the name of a value of a registered class; ``module:class`` follows."""

TREEDEF = "jax:structure"
"""Name of a `PyTreeDef`, which classes such as haiku's FlatMap keep beside their parts."""

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
    """The numbers of typed keys, to be restored: a row of them for each key."""

    key_shape: tuple[int, ...]
    """Shape of the pattern's keys."""

    key_sharding: Any
    """How they are split, or None. What splits keys leaves rows whole, so that it splits their numbers alike."""

    def get_sharding(self, shape: tuple[int, ...]) -> Any:
        """How numbers of a shape are split; None if there are not as many keys as in the pattern."""
        return self.key_sharding if shape[:-1] == self.key_shape else None


def _get_jax() -> Any:
    """The jax that the program has imported; None while another thread of this process is at it."""
    jax = sys.modules.get("jax")
    return None if jax is None or getattr(jax.__spec__, "_initializing", False) else jax


def _is_builtin(value: Any) -> bool:
    # None is a container without parts to jax, and a placeholder in the pattern of a restore.
    return (
        value is None or type(value) in _BUILTIN_CONTAINERS or (isinstance(value, tuple) and hasattr(value, "_fields"))
    )


def get_target_sharding(pattern: Any) -> Any:
    """Where an array, or keys, like a pattern go; None for jax's default device.

    An array that nobody has put somewhere is not committed: jax computes with it wherever the others lie. One in its
    place that was put on a device would not fit into a computation over a mesh.
    """
    return getattr(pattern, "sharding", None) if getattr(pattern, "committed", True) else None


def is_prng_key(value: Any) -> bool:
    """Whether a value is a typed key of jax's random numbers, or the description of one."""
    jax = _get_jax()
    dtype = getattr(value, "dtype", None) if jax is not None else None
    return dtype is not None and type(dtype).__module__.startswith("jax") and _is_prng_key_dtype(jax, dtype)


def _is_prng_key_dtype(jax: Any, dtype: Any) -> bool:
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))


def split_pattern(pattern: Any, stored: Any, codec: ValueCodec, plain_codec: ValueCodec) -> SplitValue | None:
    """The parts of a pattern of a registered class or of keys, and what makes a value like it; None for any other.

    `stored` is the skeleton of what is stored in its place, which `codec` wrote; `plain_codec` is that of
    `split_value`. Keys become as many as were saved, of the same kind. Where the pattern has as many, they lie where
    the pattern's do.

    Raises:
        IncompatibleCheckpointError: The pattern is a key, and an array is stored. Or its parts are matched by position,
            and its structure differs from the stored one.
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
    """Raise an error if the parts of a pattern at the same positions as stored ones may be other parts."""
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
    ):  # orbax, and older versions for what is not plain, do not store it
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
    """The name of a class without those of its module and of what it is defined in, which may change."""
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
    """The error for an array that is wanted where typed keys are stored; None where something else is."""
    if _get_composite_name(stored) != PRNG_KEY:
        return None
    return IncompatibleCheckpointError(
        "an array is wanted, and a typed key of jax's random numbers is stored in its place",
        expected="an array",
        found="a key, as jax.random.key makes it",
        hint="Put a key into `like`, and take the numbers of what comes: jax.random.key_data(key).",
    )


def _get_composite_name(stored: Any) -> str | None:
    """What the skeleton calls a value of several parts; None if it is none."""
    composite = stored.get("$composite") if isinstance(stored, dict) else None
    return None if composite is None else composite[0]


@dataclass(frozen=True, slots=True)
class _PyTreeNode:
    """A value of a registered class, taken apart."""

    kind: type
    members: dict[str, Any]
    """Its parts by name."""

    treedef: Any
    """jax's structure of it, of which the parts are the leaves."""

    is_matched_by_position: bool
    """Whether its parts have no names but their positions."""

    @property
    def aux_data(self) -> Any:
        """What jax knows of the value beside its parts."""
        return self.treedef.node_data()[1]


def _flatten_node(value: Any) -> _PyTreeNode | None:
    """A value of a registered class, taken apart; None for any other value."""
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
    """Whether a value is of a class that is registered with jax, and not one of Python's containers."""
    return _flatten_node(value) is not None


def contains_registered(value: Any) -> bool:
    """Whether a value, or one in the containers of Python's that it consists of, is of a registered class."""
    return _get_jax() is not None and _contains_registered(value, set(), 0)


def _contains_registered(value: Any, unregistered_classes: set[type], depth: int) -> bool:
    """The same; `unregistered_classes` are the classes that are known not to be registered."""
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
    """Whether an object has these methods.

    Of a registered class only those count that the class defines: `nnx.Rngs` makes a stream of random numbers of
    whatever attribute it is asked for.
    """
    holder = type(value) if is_registered_pytree(value) else value
    return all(callable(getattr(holder, name, None)) for name in names)


def _get_entry_name(entry: Any) -> str:
    """What jax calls a part: a key, an attribute, or a number."""
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def split_value(value: Any, codec: ValueCodec) -> Composite | None:
    """A value of a registered class, a typed key, or a structure of jax's as its parts; None for anything else.

    `codec` says what is plain. A plain value of a class that is registered as static has no parts, and is stored as
    any value of its kind.
    """
    if is_prng_key(value) and isinstance(
        value, _get_jax().Array
    ):  # a Variable of flax's has the dtype of the key in it
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
    """What jax knows of a value beside its parts, without what is not plain in it, such as functions."""
    return json_text.dumps(_flatten_aux_data(node.aux_data, codec).skeleton)


def split_treedef(value: Any) -> Composite | None:
    """A `PyTreeDef` as its nodes; None for any other value."""
    jax = _get_jax()
    if jax is None or not isinstance(value, jax.tree_util.PyTreeDef):
        return None
    return Composite(TREEDEF, {}, {"nodes": _serialize_treedef(value)})


def _serialize_treedef(treedef: Any) -> Json:
    """A structure as ``[class, what jax knows of it, [children]]``, as ``[]`` for None, and as None for a leaf."""
    if (data := treedef.node_data()) is None:
        return None
    kind, known = data
    return (
        []
        if kind is type(None)
        else [get_class_name(kind), known, [_serialize_treedef(child) for child in treedef.children()]]
    )


def _parse_treedef(nodes: Json, resolve: Callable[[str, type], Any]) -> Any:
    """The structure that `_serialize_treedef` has taken apart."""
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
    """Whether a composite value is one of these."""
    return name in (PRNG_KEY, TREEDEF) or name.startswith(TREE_PREFIX)


def resolve_composite_class(composite: Composite, resolve: Callable[[str, type], Any]) -> Any:
    """The class of a value that `split_value` has taken apart; None if it takes none to make it again.

    Raises:
        IncompatibleCheckpointError: It is gone.
        UntrustedObjectError: It is not imported.
    """
    return resolve(composite.name.removeprefix(TREE_PREFIX), type) if _can_reconstruct(composite) else None


def _can_reconstruct(composite: Composite) -> bool:
    """Whether an object of a class can be made again of what is stored."""
    return composite.name.startswith(TREE_PREFIX) and composite.extra is not None and "outline" not in composite.extra


def compose(composite: Composite, resolve: Callable[[str, type], Any]) -> Any:
    """The value that `split_value` has taken apart; a dict of its parts, where it cannot be made without a pattern.

    Raises:
        FormatError: Its parts make no such value.
        UntrustedObjectError: Its class is not imported.
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
        # The class makes itself, from what a file says: whatever it raises then is the file's fault.
        raise FormatError(f"a {composite.name} cannot be put together again: {error}") from error
