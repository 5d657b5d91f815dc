"""Values that jax takes apart: classes that are registered with `jax.tree_util`, and typed keys of random numbers.

flax's FrozenDict, TrainState and nnx.State, and dataclasses of a program's own, say themselves to jax what they are
made of (jax's documentation of custom pytree nodes). Their parts are stored, and nothing of them is pickled. What is no
part, such as the functions of a TrainState, is the program's: `restore` takes it from its `like`. Without one it makes
the object again if all that is missing is plain, and else gives a dict of the parts.

Parts are matched by the names that key paths give them. A class without key paths has its parts by position, and may
keep their names beside them, as a dict of a program's own does: its stored structure must equal that of `like`.

Nothing here imports jax: a class is registered only in a program that has done so.
"""

from __future__ import annotations

import collections
import json as json_text
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xla_ckpt.errors import CheckpointError, FormatError, IncompatibleCheckpointError
from xla_ckpt.tree.classes import class_name
from xla_ckpt.tree.codec import Composite, Json, ValueCodec
from xla_ckpt.tree.flatten import MAX_DEPTH, Flat, flatten
from xla_ckpt.tree.skeleton import ValueParts, children

KEY = "jax:key"
"""Name of a typed key of random numbers."""

TREE = "jax:tree:"
"""Begins the name of a value of a registered class; ``module:class`` follows."""

STRUCTURE = "jax:structure"
"""Name of a `PyTreeDef`, which classes such as haiku's FlatMap keep beside their parts."""

_OWN = (dict, list, tuple, set, frozenset, collections.OrderedDict, collections.defaultdict, collections.deque)
"""Containers that the skeleton has names for."""


@dataclass(frozen=True, slots=True)
class KeyRows:
    """The numbers of typed keys, to be restored: a row of them for each key."""

    keys: tuple[int, ...]
    """Shape of the pattern's keys."""

    key_sharding: Any
    """How they are split, or None. What splits keys leaves rows whole, so that it splits their numbers alike."""

    def sharding(self, shape: tuple[int, ...]) -> Any:
        """How numbers of a shape are split; None if there are not as many keys as in the pattern."""
        return self.key_sharding if shape[:-1] == self.keys else None


def _jax() -> Any:
    """The jax that the program has imported; None while another thread of this process is at it."""
    jax = sys.modules.get("jax")
    return None if jax is None or getattr(jax.__spec__, "_initializing", False) else jax


def _is_builtin(value: Any) -> bool:
    # None is a container without parts to jax, and a placeholder in the pattern of a restore.
    return value is None or type(value) in _OWN or (isinstance(value, tuple) and hasattr(value, "_fields"))


def wanted_sharding(pattern: Any) -> Any:
    """Where an array, or keys, like a pattern go; None for jax's default device.

    An array that nobody has put somewhere is not committed: jax computes with it wherever the others lie. One in its
    place that was put on a device would not fit into a computation over a mesh.
    """
    return getattr(pattern, "sharding", None) if getattr(pattern, "committed", True) else None


def is_key(value: Any) -> bool:
    """Whether a value is a typed key of jax's random numbers, or the description of one."""
    jax = _jax()
    dtype = getattr(value, "dtype", None) if jax is not None else None
    return dtype is not None and type(dtype).__module__.startswith("jax") and _is_key_type(jax, dtype)


def _is_key_type(jax: Any, dtype: Any) -> bool:
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))


def parts(value: Any, stored: Any, codec: ValueCodec, plain: ValueCodec) -> ValueParts | None:
    """The parts of a pattern of a registered class or of keys, and what makes a value like it; None for any other.

    `stored` is the skeleton of what is stored in its place, which `codec` wrote; `plain` is that of `apart`. Keys
    become as many as were saved, of the same kind. Where the pattern has as many, they lie where the pattern's do.

    Raises:
        IncompatibleCheckpointError: The pattern is a key, and an array is stored. Or its parts are matched by position,
            and its structure differs from the stored one.
    """
    if is_key(value):
        return _parts_of_keys(value, stored)
    node = _node_of(value)
    if node is None:
        return None
    if node.by_position:
        _compare_structures(node, stored, codec, plain)
    return node.members, lambda values: node.structure.unflatten([values[name] for name in node.members])


def _compare_structures(node: _Node, stored: Any, codec: ValueCodec, plain: ValueCodec) -> None:
    """Raise an error if the parts of a pattern at the same positions as stored ones may be other parts."""
    (name, _, about), below = (stored["$composite"] if _name_of(stored) else ("", {}, None)), children(stored) or {}
    if len(below) != len(node.members):
        raise _other_structure(node, f"{len(node.members)} parts", f"{len(below)} parts")
    if name.startswith(TREE) and _last_name(name) != _last_name(class_name(node.kind)):
        raise _other_structure(node, class_name(node.kind), name.removeprefix(TREE))
    if not name.startswith(TREE) or about is None:  # orbax, and older versions for what is not plain, do not store it
        return
    found = about["structure"] if "structure" in about else about["outline"]
    wanted = _outline(node, plain) if "outline" in about else _taken_apart(node.known, codec).skeleton
    if wanted != found:
        raise _other_structure(node, json_text.dumps(wanted)[:200], json_text.dumps(found)[:200])


def _other_structure(node: _Node, wanted: str, found: str) -> IncompatibleCheckpointError:
    return IncompatibleCheckpointError(
        f"the stored structure differs from that of the {node.kind.__name__} in `like`, whose parts have no key paths",
        expected=wanted,
        found=found,
        hint="Make `like` as it was at the save, keys and their order included. Or register the class with "
        "jax.tree_util.register_pytree_with_keys before the save: then its parts are matched by their keys.",
    )


def _last_name(name: str) -> str:
    """The name of a class without those of its module and of what it is defined in, which may change."""
    return name.rpartition(":")[2].rpartition(".")[2]


def _parts_of_keys(value: Any, stored: Any) -> ValueParts | None:
    if isinstance(stored, dict) and "$array" in stored:
        raise IncompatibleCheckpointError(
            "a typed key of jax's random numbers is wanted, and an array is stored in its place",
            expected="a key, as jax.random.key makes it",
            found="an array, such as the numbers that jax.random.key_data and jax.random.PRNGKey give",
            hint="Restore the array, and make the key of it: jax.random.wrap_key_data(array).",
        )
    if _name_of(stored) != KEY:
        return None
    composite = stored["$composite"]
    wrap, impl = _jax().random.wrap_key_data, composite[2]["impl"]
    rows = KeyRows(value.shape, wanted_sharding(value))
    return {"data": rows}, lambda members: wrap(members["data"], impl=impl)


def key_in_place_of_array(stored: Any) -> IncompatibleCheckpointError | None:
    """The error for an array that is wanted where typed keys are stored; None where something else is."""
    if _name_of(stored) != KEY:
        return None
    return IncompatibleCheckpointError(
        "an array is wanted, and a typed key of jax's random numbers is stored in its place",
        expected="an array",
        found="a key, as jax.random.key makes it",
        hint="Put a key into `like`, and take the numbers of what comes: jax.random.key_data(key).",
    )


def _name_of(stored: Any) -> str | None:
    """What the skeleton calls a value of several parts; None if it is none."""
    composite = stored.get("$composite") if isinstance(stored, dict) else None
    return None if composite is None else composite[0]


@dataclass(frozen=True, slots=True)
class _Node:
    """A value of a registered class, taken apart."""

    kind: type
    members: dict[str, Any]
    """Its parts by name."""

    structure: Any
    """jax's structure of it, of which the parts are the leaves."""

    by_position: bool
    """Whether its parts have no names but their positions."""

    @property
    def known(self) -> Any:
        """What jax knows of the value beside its parts."""
        return self.structure.node_data()[1]


def _node_of(value: Any) -> _Node | None:
    """A value of a registered class, taken apart; None for any other value."""
    jax = _jax()
    if jax is None or _is_builtin(value):
        return None
    util = jax.tree_util
    found, structure = util.tree_flatten_with_path(value, is_leaf=lambda part: part is not value)
    if structure.node_data() is None:
        return None
    names = [_name(path[0]) for path, _ in found]
    by_position = any(isinstance(path[0], util.FlattenedIndexKey | util.SequenceKey) for path, _ in found)
    if len(set(names)) < len(names):
        names, by_position = [str(n) for n in range(len(names))], True
    members = dict(zip(names, (part for _, part in found), strict=True))
    return _Node(type(value), members, structure, by_position)


def is_registered(value: Any) -> bool:
    """Whether a value is of a class that is registered with jax, and not one of Python's containers."""
    return _node_of(value) is not None


def holds_registered(value: Any) -> bool:
    """Whether a value, or one in the containers of Python's that it consists of, is of a registered class."""
    return _jax() is not None and _holds_registered(value, set(), 0)


def _holds_registered(value: Any, others: set[type], depth: int) -> bool:
    """The same; `others` are the classes that are known not to be registered."""
    kind = type(value)
    if kind in others or depth > MAX_DEPTH:
        return False
    if _is_builtin(value):
        members = value.values() if isinstance(value, dict) else value or ()
        return any(_holds_registered(member, others, depth + 1) for member in members)
    if is_registered(value):
        return True
    others.add(kind)
    return False


def has_methods(value: Any, *names: str) -> bool:
    """Whether an object has these methods.

    Of a registered class only those count that the class defines: `nnx.Rngs` makes a stream of random numbers of
    whatever attribute it is asked for.
    """
    holder = type(value) if is_registered(value) else value
    return all(callable(getattr(holder, name, None)) for name in names)


def _name(entry: Any) -> str:
    """What jax calls a part: a key, an attribute, or a number."""
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def apart(value: Any, codec: ValueCodec) -> Composite | None:
    """A value of a registered class, a typed key, or a structure of jax's as its parts; None for anything else.

    `codec` says what is plain. A plain value of a class that is registered as static has no parts, and is stored as
    any value of its kind.
    """
    if is_key(value) and isinstance(value, _jax().Array):  # a Variable of flax's has the dtype of the key in it
        random = _jax().random
        return Composite(KEY, {"data": random.key_data(value)}, {"impl": str(random.key_impl(value))})
    if (structure := structure_apart(value)) is not None:
        return structure
    node = _node_of(value)
    if node is None:
        return None
    flat = _taken_apart(node.known, codec)
    is_plain = not (flat.objects or flat.arrays)  # and no function, for instance
    if node.known is value:  # jax.tree_util.register_static
        return None if is_plain else Composite(TREE + class_name(node.kind), {}, None)
    about = None
    if is_plain:
        about = {"structure": node.known}
    elif node.by_position:
        about = {"outline": _outline(node, codec)}
    return Composite(TREE + class_name(node.kind), node.members, about)


def _taken_apart(known: Any, codec: ValueCodec) -> Flat:
    return flatten(known, lambda part: "array" if hasattr(part, "__array__") else None, codec)


def _outline(node: _Node, codec: ValueCodec) -> str:
    """What jax knows of a value beside its parts, without what is not plain in it, such as functions."""
    return json_text.dumps(_taken_apart(node.known, codec).skeleton)


def structure_apart(value: Any) -> Composite | None:
    """A `PyTreeDef` as its nodes; None for any other value."""
    jax = _jax()
    if jax is None or not isinstance(value, jax.tree_util.PyTreeDef):
        return None
    return Composite(STRUCTURE, {}, {"nodes": _nodes(value)})


def _nodes(structure: Any) -> Json:
    """A structure as ``[class, what jax knows of it, [children]]``, as ``[]`` for None, and as None for a leaf."""
    if (data := structure.node_data()) is None:
        return None
    kind, known = data
    return [] if kind is type(None) else [class_name(kind), known, [_nodes(child) for child in structure.children()]]


def _structure_of(nodes: Json, resolve: Callable[[str, type], Any]) -> Any:
    """The structure that `_nodes` has taken apart."""
    util = _jax().tree_util
    leaf = util.tree_structure(0)
    if not nodes:
        return leaf if nodes is None else util.tree_structure(None)
    name, known, below = nodes
    node_data = resolve(name, type), known
    return leaf.from_node_data_and_children(
        util.default_registry, node_data, [_structure_of(child, resolve) for child in below]
    )


def is_name(name: str) -> bool:
    """Whether a composite value is one of these."""
    return name in (KEY, STRUCTURE) or name.startswith(TREE)


def class_of(composite: Composite, resolve: Callable[[str, type], Any]) -> Any:
    """The class of a value that `apart` has taken apart; None if it takes none to make it again.

    Raises:
        IncompatibleCheckpointError: It is gone.
        UntrustedObjectError: It is not imported.
    """
    return resolve(composite.name.removeprefix(TREE), type) if _is_whole(composite) else None


def _is_whole(composite: Composite) -> bool:
    """Whether an object of a class can be made again of what is stored."""
    return composite.name.startswith(TREE) and composite.about is not None and "outline" not in composite.about


def compose(composite: Composite, resolve: Callable[[str, type], Any]) -> Any:
    """The value that `apart` has taken apart; a dict of its parts, where it cannot be made without a pattern.

    Raises:
        FormatError: Its parts make no such value.
        UntrustedObjectError: Its class is not imported.
    """
    kind = class_of(composite, resolve)
    jax = _jax()
    if jax is None or (kind is None and composite.name.startswith(TREE)):
        return dict(composite.members)
    try:
        if composite.name == KEY:
            return jax.random.wrap_key_data(composite.members["data"], impl=composite.about["impl"])
        if composite.name == STRUCTURE:
            return _structure_of(composite.about["nodes"], resolve)
        leaf = jax.tree_util.tree_structure(0)
        structure = leaf.from_node_data_and_children(
            jax.tree_util.default_registry, (kind, composite.about["structure"]), [leaf] * len(composite.members)
        )
        return structure.unflatten(composite.members.values())
    except CheckpointError:
        raise
    except Exception as error:
        # The class makes itself, from what a file says: whatever it raises then is the file's fault.
        raise FormatError(f"a {composite.name} cannot be put together again: {error}") from error
