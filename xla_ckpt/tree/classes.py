"""What a value's class says of how the value is stored: enums, namedtuples, and classes that extend plain types."""

from __future__ import annotations

import abc
import collections
import enum
import itertools
from typing import Any

_HEAP = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: the flag of a class that was written in Python."""


def class_name(kind: type) -> str:
    """``module:qualname`` of a class, as the skeleton stores it."""
    return f"{kind.__module__}:{kind.__qualname__}"


def is_enum_member(value: Any) -> bool:
    """Whether `value` is a named member of an enum (a combination of flags is not)."""
    members = getattr(type(value), "__members__", {})
    return members.get(getattr(value, "name", None)) is value if members else False


def is_flags(value: Any) -> bool:
    """Whether `value` is a combination of flags, of a class without code of its own for making them."""
    return isinstance(value, enum.Flag) and type(value.value) is int and makes_flags(type(value))


def makes_flags(kind: Any) -> bool:
    """Whether combinations of flags of a class are made without running code of the class."""
    return (
        type(kind) is enum.EnumMeta
        and issubclass(kind, enum.Flag)
        and kind._missing_.__func__ is enum.Flag._missing_.__func__  # type: ignore[attr-defined]  # a classmethod
        and getattr(kind, "__new_member__", None) is None
    )


_SCALARS = (int, float, str, bytes)
"""Types of plain values that classes of a program extend."""

_OF_PICKLE = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")
_CODE = (*_OF_PICKLE, "__setattr__", "__getattribute__", "__del__")
"""Methods by which a class says itself how it is stored, and those that run when it is made or goes."""


def scalar_below(kind: type) -> Any:
    """The type of plain values that a class extends by methods and attributes alone; None if it is no such class.

    >>> scalar_below(type("Meters", (float,), {})), scalar_below(float), scalar_below(type("A", (list,), {}))
    (<class 'float'>, None, None)
    """
    own = list(itertools.takewhile(lambda c: c not in _SCALARS, kind.__mro__))
    base = kind.__mro__[len(own)] if len(own) < len(kind.__mro__) else None
    is_plain = all(
        type(c) in (type, abc.ABCMeta)
        and c.__flags__ & _HEAP
        and not vars(c).get("__slots__")
        and not any(name in vars(c) for name in _CODE)
        for c in own
    )
    return base if own and is_plain and kind.__dictoffset__ != 0 else None


def is_namedtuple(value: object) -> bool:
    """Whether `value` is of a class that extends tuple by names of its members alone."""
    return isinstance(value, tuple) and type(value).__bases__ == (tuple,) and hasattr(value, "_fields")


def container_below(kind: type) -> Any:
    """The dict or list that a class extends; object if it extends none; None if it extends another class of Python's.

    >>> container_below(type("A", (dict,), {})), container_below(type("B", (Exception,), {}))
    (<class 'dict'>, None)
    """
    base = next(c for c in kind.__mro__ if not c.__flags__ & _HEAP)
    return base if base in (object, dict, list, collections.OrderedDict) else None
