"""Objects of plain Python classes, taken apart into their attributes: the projectors of GaLore, for instance.

An optimizer keeps them in its state, and their attributes are arrays and plain values. They are stored as these, so
that nothing is pickled, and a load needs no trust. Only objects that pickle itself would store so are taken apart:
those of a class without code of its own for that. A load makes the object without its `__init__` and runs no code of
the class; one with a `__del__`, which would run later, is no such class.
"""

from __future__ import annotations

import abc
import copyreg
import sys
from collections.abc import Callable
from typing import Any

from xla_ckpt.arrays.registry import array_kind
from xla_ckpt.errors import IncompatibleCheckpointError, UnsupportedStateError
from xla_ckpt.tree.classes import class_name
from xla_ckpt.tree.codec import Composite, ValueCodec
from xla_ckpt.tree.flatten import flatten

INSTANCE = "object:"
"""Begins the name of such an object; ``module:class`` follows."""

_DEFAULTS = ("__new__", "__reduce__", "__reduce_ex__", "__getstate__", "__setattr__", "__getattribute__")
_NONE = ("__setstate__", "__getnewargs__", "__getnewargs_ex__", "__del__", "__slots__", "__dataclass_fields__")


def is_plain_class(kind: type) -> bool:
    """Whether the objects of a class are nothing but their attributes, to pickle, too."""
    return (
        type(kind) in (type, abc.ABCMeta)
        and kind.__base__ is not None
        and kind.__dictoffset__ != 0
        and kind.__basicsize__ == _Plain.__basicsize__  # no memory of another kind of Python's, such as a dict's
        and kind not in copyreg.dispatch_table
        and all(getattr(kind, name, None) is getattr(object, name, None) for name in _DEFAULTS)
        and not any(hasattr(kind, name) for name in _NONE)
    )


class _Plain:
    pass


def parts(value: Any) -> Composite | None:
    """An object as its attributes, whatever these are; None for one of another kind of class."""
    kind = type(value)
    if not is_plain_class(kind) or imported(kind.__module__, kind.__qualname__) is not kind:
        return None
    return Composite(INSTANCE + class_name(kind), vars(value), None)


def apart(value: Any, codec: ValueCodec) -> Composite | None:
    """An object as its attributes; None if only pickle can store all of them.

    Args:
        value: The object.
        codec: Says what is plain, and takes all objects apart that have `parts`.
    """
    taken = parts(value)
    if taken is None:
        return None
    try:
        return None if flatten(vars(value), array_kind, codec).objects else taken
    except UnsupportedStateError:  # it contains itself, which pickle can store
        return None


def imported(module: str, qualname: str) -> Any:
    """What stands in an imported module under a qualified name; None if nothing does, or it is not imported.

    >>> imported("enum", "Enum"), imported("enum", "Nothing.at_all")
    (<enum 'Enum'>, None)
    """
    value: Any = sys.modules.get(module)
    for part in qualname.split("."):
        value = getattr(value, part, None)
    return value


def is_name(name: str) -> bool:
    """Whether a composite value is one of these."""
    return name.startswith(INSTANCE)


def class_of(composite: Composite, resolve: Callable[[str, type], Any]) -> Any:
    """The class of an object that `apart` has taken apart.

    Raises:
        IncompatibleCheckpointError: Its class is gone, or is no plain class any more.
        UntrustedObjectError: Its class is not imported.
    """
    name = composite.name.removeprefix(INSTANCE)
    kind = resolve(name, type)
    if not is_plain_class(kind):
        raise IncompatibleCheckpointError(
            f"the checkpoint holds the attributes of an object of {name}, which is no plain class now",
            expected="a class without code of its own for pickle",
            found=str(kind),
        )
    return kind


def compose(composite: Composite, resolve: Callable[[str, type], Any]) -> Any:
    """The object that `apart` has taken apart. No code of its class runs.

    Raises:
        IncompatibleCheckpointError, UntrustedObjectError: See `class_of`.
    """
    value = object.__new__(class_of(composite, resolve))
    value.__dict__.update(composite.members)
    return value
