"""Plain values as typed JSON, and the classes whose instances can be stored that way.

JSON does not distinguish tuples from lists, or 1 from True as a dict key, and has no sets or bytes. Every value that
plain JSON would change is wrapped as ``{"$kind": ...}``. This module contains the kinds of the standard library's pure
types. Types that need a framework or the operating system (torch.dtype, pathlib.Path, ...) are `ValueKind` objects that
callers pass to `ValueCodec`. Enums, namedtuples and classes that extend plain types are recognized by their class.
"""

from __future__ import annotations

import abc
import array
import base64
import collections
import datetime
import decimal
import enum
import fractions
import itertools
import struct
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from xla_ckpt.errors import FormatError, IncompatibleCheckpointError

_HEAP = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: flag of a class that was defined in Python."""


def get_class_name(kind: type) -> str:
    """Return ``module:qualname`` of a class, as stored in the skeleton."""
    return f"{kind.__module__}:{kind.__qualname__}"


def is_enum_member(value: Any) -> bool:
    """Return True if `value` is a named member of an enum (not a combination of flags)."""
    members = getattr(type(value), "__members__", {})
    return members.get(getattr(value, "name", None)) is value if members else False


def is_flags(value: Any) -> bool:
    """Return True if `value` is a combination of flags whose class does not customize their creation."""
    return isinstance(value, enum.Flag) and type(value.value) is int and can_make_flags(type(value))


def can_make_flags(kind: Any) -> bool:
    """Return True if combinations of flags of a class can be created without running code of the class."""
    return (
        type(kind) is enum.EnumMeta
        and issubclass(kind, enum.Flag)
        and kind._missing_.__func__ is enum.Flag._missing_.__func__  # type: ignore[attr-defined]  # a classmethod
        and getattr(kind, "__new_member__", None) is None
    )


_SCALAR_TYPES = (int, float, str, bytes)
"""Plain types that classes of a program may extend."""

_PICKLE_METHODS = ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")
_CODE_METHODS = (*_PICKLE_METHODS, "__setattr__", "__getattribute__", "__del__")
"""Methods that customize pickling, and methods that run when an instance is created or deleted."""


def find_scalar_base(kind: type) -> Any:
    """Return the plain type that a class extends only by methods and attributes, or None for other classes.

    >>> [find_scalar_base(kind) for kind in (type("Meters", (float,), {}), float, type("A", (list,), {}))]
    [<class 'float'>, None, None]
    """
    own = list(itertools.takewhile(lambda c: c not in _SCALAR_TYPES, kind.__mro__))
    base = kind.__mro__[len(own)] if len(own) < len(kind.__mro__) else None
    is_plain = all(
        type(c) in (type, abc.ABCMeta)
        and c.__flags__ & _HEAP
        and not vars(c).get("__slots__")
        and not any(name in vars(c) for name in _CODE_METHODS)
        for c in own
    )
    return base if own and is_plain and kind.__dictoffset__ != 0 else None


def is_namedtuple(value: object) -> bool:
    """Return True if the class of `value` is a named tuple without further base classes."""
    return isinstance(value, tuple) and type(value).__bases__ == (tuple,) and hasattr(value, "_fields")


def find_container_base(kind: type) -> Any:
    """Return the dict or list class that a class extends, object if it extends none, or None for other built-in base
    classes.

    >>> find_container_base(type("A", (dict,), {})), find_container_base(type("B", (Exception,), {}))
    (<class 'dict'>, None)
    """
    base = next(c for c in kind.__mro__ if not c.__flags__ & _HEAP)
    return base if base in (object, dict, list, collections.OrderedDict) else None


Json = Any
"""Value that `json.dumps` writes and `json.loads` returns unchanged."""


@dataclass(frozen=True, slots=True)
class ValueKind:
    """Encoder and decoder of one exact type of plain value."""

    name: str
    """Name in the file, without the ``$``."""

    type: type
    """Exact type (not a base class) that this kind encodes."""

    encode: Callable[[Any], Json]
    """Function from a value to JSON. Returns NotImplemented for unsupported values of the type, which another kind may
    support."""

    decode: Callable[[Json], Any]
    """Function from JSON to a value. All of its exceptions are reported as a malformed manifest."""


@dataclass(frozen=True, slots=True)
class Composite:
    """A value that consists of several arrays, split into its parts."""

    name: str
    """Name of the function that composes it: ``module:class``, or a name that the caller's `ValueCodec` knows."""

    members: Mapping[str, Any]
    """Arrays by name."""

    extra: Any
    """Tree of plain values that is also needed to compose it."""


def _decode_float_bits(text: str) -> float:
    return float(struct.unpack("<d", bytes.fromhex(text))[0])


def encode_float(value: float) -> Json:
    """Encode a float exactly: as a JSON number if possible, otherwise by its bits (inf, NaN with its payload)."""
    finite = value - value == 0
    return value if finite else {"$float": struct.pack("<d", value).hex()}


MAX_JSON_BITS = 14_000
"""Maximum number of bits of integers that are JSON numbers. Python reads and writes at most 4,300 decimal digits."""


def encode_int(value: int) -> Json:
    """Encode an integer as a JSON number, or as hexadecimal digits if it would be too long."""
    return value if value.bit_length() <= MAX_JSON_BITS else {"$int": f"{value:x}"}


def _create_instant_kind(kind: Any) -> ValueKind:
    """Create the kind of datetime or time. The ISO format preserves an offset, but not a named time zone."""
    return ValueKind(
        kind.__name__,
        kind,
        lambda v: [v.isoformat(), v.fold] if type(v.tzinfo) in (type(None), datetime.timezone) else NotImplemented,
        lambda j: kind.fromisoformat(j[0]).replace(fold=j[1]),
    )


def _encode_items(value: array.array[Any]) -> Json:
    """Encode an array of a C type, with its itemsize, which depends on the platform."""
    return [value.typecode, value.itemsize, base64.b64encode(value.tobytes()).decode()]


def _decode_items(json: Json) -> array.array[Any]:
    typecode, itemsize, data = json
    items = array.array(typecode, base64.b64decode(data, validate=True))
    if items.itemsize != itemsize:
        raise ValueError(f"an item of {typecode} has {items.itemsize} bytes here")
    if typecode in "uw":
        items.tounicode()  # otherwise invalid text would only be detected on use
    return items


def _decode_timezone(json: Json) -> datetime.timezone:
    seconds, name = json
    offset = datetime.timedelta(seconds=seconds)
    return datetime.timezone(offset) if name is None else datetime.timezone(offset, name)


def _decode_fraction(json: Json) -> fractions.Fraction:
    numerator, denominator = json
    # Python would expand a string such as 1e10000000 to a number with as many digits.
    if type(numerator) is not int or type(denominator) is not int:
        raise TypeError("a fraction consists of two integers")
    return fractions.Fraction(numerator, denominator)


STANDARD_KINDS: tuple[ValueKind, ...] = (
    ValueKind("bytes", bytes, lambda v: base64.b64encode(v).decode(), lambda j: base64.b64decode(j, validate=True)),
    ValueKind(
        "bytearray",
        bytearray,
        lambda v: base64.b64encode(v).decode(),
        lambda j: bytearray(base64.b64decode(j, validate=True)),
    ),
    ValueKind(
        "complex",
        complex,
        lambda v: [encode_float(v.real), encode_float(v.imag)],
        lambda j: complex(*(_decode_float_bits(p["$float"]) if isinstance(p, dict) else p for p in j)),
    ),
    ValueKind("range", range, lambda v: [v.start, v.stop, v.step], lambda j: range(*j)),
    ValueKind("ellipsis", type(...), lambda v: None, lambda j: ...),
    *map(_create_instant_kind, (datetime.datetime, datetime.time)),
    ValueKind("date", datetime.date, lambda v: v.isoformat(), datetime.date.fromisoformat),
    ValueKind(
        "timedelta", datetime.timedelta, lambda v: [v.days, v.seconds, v.microseconds], lambda j: datetime.timedelta(*j)
    ),
    ValueKind(
        "timezone", datetime.timezone, lambda v: [v.utcoffset(None).total_seconds(), v.tzname(None)], _decode_timezone
    ),
    ValueKind("decimal", decimal.Decimal, str, decimal.Decimal),
    ValueKind("fraction", fractions.Fraction, lambda v: [v.numerator, v.denominator], _decode_fraction),
    ValueKind("uuid", uuid.UUID, str, uuid.UUID),
    ValueKind("array.array", array.array, _encode_items, _decode_items),
)


class ValueCodec:
    """Encoder and decoder of plain values: JSON's own types, the standard kinds, and kinds of the caller.

    >>> codec = ValueCodec()
    >>> codec.decode(codec.encode(complex(1, 2)))
    (1+2j)
    >>> codec.encode(object()) is NotImplemented
    True
    """

    def __init__(
        self,
        extra_kinds: tuple[ValueKind, ...] = (),
        split_value: Callable[[Any], Composite | None] = lambda value: None,
        compose: Callable[[Composite, Callable[[str, type], Any]], Any] | None = None,
        split_object: Callable[[Any, str], Composite | None] = lambda value, path: None,
        load_more_kinds: Callable[[str | None], tuple[ValueKind, ...]] = lambda name: (),
    ) -> None:
        self._by_type: dict[type, list[ValueKind]] = {}
        self._by_name: dict[str, ValueKind] = {}
        self._load_more_kinds: Callable[[str | None], tuple[ValueKind, ...]] | None = load_more_kinds
        """Returns the kinds of a framework that may not be loaded yet, given the name of an unknown kind, or None for
        an unknown value. Called until it returns kinds."""
        self._add_kinds(STANDARD_KINDS + extra_kinds)
        self.split_value = split_value
        """Splits a value that consists of several arrays. Returns None for other values."""
        self.split_object = split_object
        """(object that would be pickled, leaf path) -> its parts, or None to pickle it."""
        self._compose = compose

    def _add_kinds(self, kinds: tuple[ValueKind, ...]) -> None:
        for known in kinds:
            self._by_type.setdefault(known.type, []).append(known)
            self._by_name["$" + known.name] = known

    def _load_more(self, name: str | None = None) -> bool:
        """Load the kinds of a framework that has been imported since. Return True if there are more kinds now."""
        kinds = self._load_more_kinds(name) if self._load_more_kinds is not None else ()
        if kinds:
            self._add_kinds(kinds)
            self._load_more_kinds = None  # only now, because another thread may be in this method
        return bool(kinds)

    def compose(self, composite: Composite, resolve_class: Callable[[str, type], Any]) -> Any:
        """Compose a value that `split_value` has split.

        Args:
            composite: Parts of the value.
            resolve_class: Function that returns its class.

        Raises:
            FormatError: The kind of composite is unknown.
        """
        if self._compose is None:
            raise FormatError("unknown kind of composite value in the skeleton", found=composite.name[:80])
        return self._compose(composite, resolve_class)

    def encode(self, value: Any) -> Json:
        """Encode a scalar value as JSON. Returns NotImplemented if it is not plain."""
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return encode_int(value)
        if kind is float:
            return encode_float(value)
        if kind not in self._by_type and not self._load_more():
            return NotImplemented
        for known in self._by_type.get(kind, ()):
            body = known.encode(value)
            if body is not NotImplemented:
                return {"$" + known.name: body}
        return NotImplemented

    def decode(self, json: Json) -> Any:
        """Decode a value from `encode`.

        Raises:
            FormatError: `json` is malformed, or of an unknown kind.
            IncompatibleCheckpointError: This machine cannot create the value.
        """
        if json is None or isinstance(json, bool | int | float | str):
            return json
        if isinstance(json, dict) and len(json) == 1:
            ((name, body),) = json.items()
            if name == "$float":
                return self._decode_checked(name, _decode_float_bits, body)
            if name == "$int":
                return self._decode_checked(name, lambda digits: int(digits, 16), body)
            if name not in self._by_name:
                self._load_more(name.removeprefix("$"))
            if (kind := self._by_name.get(name)) is not None:
                return self._decode_checked(name, kind.decode, body)
        raise FormatError("unknown value in the skeleton", found=str(json)[:80])

    @staticmethod
    def _decode_checked(name: str, decode: Callable[[Json], Any], body: Json) -> Any:
        try:
            return decode(body)
        except IncompatibleCheckpointError:
            raise  # the file is intact, but this machine cannot create the value
        except Exception as error:
            # Decoders call constructors of many libraries. Any exception means that the file is malformed.
            raise FormatError(f"broken {name} value in the skeleton", found=str(body)[:80]) from error
