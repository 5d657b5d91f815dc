"""Objects of plain Python classes, split into their attributes: GaLore's projectors, for instance.

An optimizer may have such objects in its state, with arrays and plain values as attributes. Storing these avoids
pickles, so a load needs no trust. Only objects that pickle itself would store in the same way are split: instances of a
class without custom pickle methods. A load creates the object without `__init__` and runs no code of the class; a class
with a `__del__`, which would run later, does not qualify.
"""

from __future__ import annotations

import abc
import copyreg
import sys
from collections.abc import Callable
from typing import Any

from xla_ckpt.arrays.registry import get_array_kind
from xla_ckpt.core.tree.flatten import flatten
from xla_ckpt.core.tree.values import Composite, ValueCodec, get_class_name
from xla_ckpt.errors import IncompatibleCheckpointError, UnsupportedStateError

OBJECT_PREFIX = "object:"
"""Prefix of the name of such an object; ``module:class`` follows."""

_DEFAULT_METHODS = ("__new__", "__reduce__", "__reduce_ex__", "__getstate__", "__setattr__", "__getattribute__")
_FORBIDDEN_ATTRIBUTES = (
    "__setstate__",
    "__getnewargs__",
    "__getnewargs_ex__",
    "__del__",
    "__slots__",
    "__dataclass_fields__",
)


def is_plain_class(kind: type) -> bool:
    """Return True if instances of a class consist only of their attributes, for pickle as well."""
    return (
        type(kind) in (type, abc.ABCMeta)
        and kind.__base__ is not None
        and kind.__dictoffset__ != 0
        and kind.__basicsize__ == _PlainObject.__basicsize__  # no memory of another built-in type, such as a dict's
        and kind not in copyreg.dispatch_table
        and all(getattr(kind, name, None) is getattr(object, name, None) for name in _DEFAULT_METHODS)
        and not any(hasattr(kind, name) for name in _FORBIDDEN_ATTRIBUTES)
    )


class _PlainObject:
    pass


def split_attributes(value: Any) -> Composite | None:
    """Split an object into its attributes, whatever these are; None for an instance of another kind of class."""
    kind = type(value)
    if not is_plain_class(kind) or find_imported(kind.__module__, kind.__qualname__) is not kind:
        return None
    return Composite(OBJECT_PREFIX + get_class_name(kind), vars(value), None)


def split_value(value: Any, codec: ValueCodec) -> Composite | None:
    """Split an object into its attributes; None if only pickle can store all of them.

    Args:
        value: The object.
        codec: Codec of plain values, which splits all objects that have `split_attributes`.
    """
    taken = split_attributes(value)
    if taken is None:
        return None
    try:
        return None if flatten(vars(value), get_array_kind, codec).objects else taken
    except UnsupportedStateError:  # it contains itself, which pickle can store
        return None


def find_imported(module: str, qualname: str) -> Any:
    """Return the object with a qualified name in an imported module; None if it is missing, or the module not imported.

    >>> find_imported("enum", "Enum"), find_imported("enum", "Nothing.at_all")
    (<enum 'Enum'>, None)
    """
    value: Any = sys.modules.get(module)
    for part in qualname.split("."):
        value = getattr(value, part, None)
    return value


def is_composite_name(name: str) -> bool:
    """Return True if the name of a composite value is one of a plain object."""
    return name.startswith(OBJECT_PREFIX)


def resolve_composite_class(composite: Composite, resolve: Callable[[str, type], Any]) -> Any:
    """Return the class of an object that `split_value` has split.

    Raises:
        IncompatibleCheckpointError: If the class is missing, or is no longer a plain class.
        UntrustedObjectError: If its module is not imported.
    """
    name = composite.name.removeprefix(OBJECT_PREFIX)
    kind = resolve(name, type)
    if not is_plain_class(kind):
        raise IncompatibleCheckpointError(
            f"the checkpoint holds the attributes of an object of {name}, which is no plain class now",
            expected="a class without code of its own for pickle",
            found=str(kind),
        )
    return kind


def compose(composite: Composite, resolve: Callable[[str, type], Any]) -> Any:
    """Compose an object that `split_value` has split. No code of its class runs.

    Raises:
        IncompatibleCheckpointError, UntrustedObjectError: See `resolve_composite_class`.
    """
    value = object.__new__(resolve_composite_class(composite, resolve))
    value.__dict__.update(composite.members)
    return value
