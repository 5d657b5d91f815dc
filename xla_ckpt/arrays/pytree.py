"""Values that jax takes apart: classes that are registered with `jax.tree_util`, and typed keys of random numbers.

flax's FrozenDict, TrainState and nnx.State, and dataclasses of a program's own, say themselves to jax what they are
made of (jax's documentation of custom pytree nodes). Their parts are stored, and nothing of them is pickled. What is no
part, such as the functions of a TrainState, is the program's: `restore` takes it from its `like`. Without one it makes
the object again if all that is missing is plain, and else gives a dict of the parts.

Nothing here imports jax: a class is registered only in a program that has done so.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xla_ckpt.errors import FormatError, IncompatibleCheckpointError
from xla_ckpt.tree.classes import class_name
from xla_ckpt.tree.codec import Composite, ValueCodec
from xla_ckpt.tree.flatten import flatten
from xla_ckpt.tree.skeleton import ValueParts

KEY = "jax:key"
"""Name of a typed key of random numbers."""

TREE = "jax:tree:"
"""Begins the name of a value of a registered class; ``module:class`` follows."""

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


def parts(value: Any, stored: Any) -> ValueParts | None:
    """The parts of a pattern of a registered class or of keys, and what makes a value like it; None for any other.

    `stored` is the skeleton of what is stored in its place. Keys become as many as were saved, of the same kind. Where
    the pattern has as many, they lie where the pattern's do.

    Raises:
        IncompatibleCheckpointError: The pattern is a key, and an array is stored.
    """
    if is_key(value):
        return _parts_of_keys(value, stored)
    taken = _taken(value)
    if taken is None:
        return None
    members, structure = taken
    return members, lambda values: structure.unflatten([values[name] for name in members])


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


def _taken(value: Any) -> tuple[dict[str, Any], Any] | None:
    """The parts of a value of a registered class by name, and jax's structure of it; None for any other value."""
    jax = _jax()
    if jax is None or _is_builtin(value):
        return None
    children, structure = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda part: part is not value)
    if structure.node_data() is None:
        return None
    names = [_name(path[0]) for path, _ in children]
    if len(set(names)) < len(names):
        names = [str(n) for n in range(len(names))]
    return dict(zip(names, (part for _, part in children), strict=True)), structure


def _name(entry: Any) -> str:
    """What jax calls a part: a key, an attribute, or a number."""
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)


def apart(value: Any, codec: ValueCodec) -> Composite | None:
    """A value of a registered class, or a typed key, as its parts; None for anything else.

    `codec` says what is plain.
    """
    if is_key(value) and isinstance(value, _jax().Array):  # a Variable of flax's has the dtype of the key in it
        random = _jax().random
        return Composite(KEY, {"data": random.key_data(value)}, {"impl": str(random.key_impl(value))})
    taken = _taken(value)
    if taken is None:
        return None
    members, structure = taken
    known = structure.node_data()[1]  # what jax knows of the value beside its parts
    flat = flatten(known, lambda part: "array" if hasattr(part, "__array__") else None, codec)
    is_plain = not (flat.objects or flat.arrays)  # and no function, for instance
    return Composite(TREE + class_name(type(value)), members, {"structure": known} if is_plain else None)


def is_name(name: str) -> bool:
    """Whether a composite value is one of these."""
    return name == KEY or name.startswith(TREE)


def class_of(composite: Composite, resolve: Callable[[str, type], Any]) -> Any:
    """The class of a value that `apart` has taken apart; None if it takes none to make it again.

    Raises:
        IncompatibleCheckpointError: It is gone.
        UntrustedObjectError: It is not imported.
    """
    if composite.name == KEY or composite.about is None:
        return None
    return resolve(composite.name.removeprefix(TREE), type)


def compose(composite: Composite, resolve: Callable[[str, type], Any]) -> Any:
    """The value that `apart` has taken apart; a dict of its parts, where it cannot be made without a pattern.

    Raises:
        FormatError: Its parts make no such value.
        UntrustedObjectError: Its class is not imported.
    """
    if composite.name != KEY and composite.about is None:
        return dict(composite.members)
    kind = class_of(composite, resolve)
    jax = _jax()
    if jax is None:
        return dict(composite.members)
    try:
        if kind is None:
            return jax.random.wrap_key_data(composite.members["data"], impl=composite.about["impl"])
        leaf = jax.tree_util.tree_structure(0)
        structure = leaf.from_node_data_and_children(
            jax.tree_util.default_registry, (kind, composite.about["structure"]), [leaf] * len(composite.members)
        )
        return structure.unflatten(composite.members.values())
    except Exception as error:
        # The class makes itself, from what a file says: whatever it raises then is the file's fault.
        raise FormatError(f"a {composite.name} cannot be put together again: {error}") from error
