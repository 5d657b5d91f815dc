"""Stubs for objects in a pickle: classes whose instances run nothing.

A pickle can set the state of any object it has, also of a function or a class that replaces a name, which would change
it for the next file. So each stub refuses a state: see `refuse_state`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np

from xla_ckpt.errors import UntrustedObjectError

T = TypeVar("T")

STORAGE_DTYPES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}

QUANTIZED_STORAGE_DTYPES = {"QInt8Storage": "qint8", "QUInt8Storage": "quint8", "QInt32Storage": "qint32"}
"""Storages of quantized numbers, of which an element is an integer."""

_NUMPY_SCALAR = re.compile(r"[biufc]\d{1,2}")


def refuse_state(kind: type[T]) -> type[T]:
    """A class whose objects refuse the state that a pickle gives them. Outermost: dataclasses make their own."""

    def refuse(self: object, _: Any) -> None:
        raise ValueError(f"a state for a {type(self).__name__}, which has none")

    kind.__setstate__ = refuse  # type: ignore[attr-defined]
    return kind


@refuse_state
@dataclass(frozen=True, slots=True)
class StorageTypeStub:
    """The type of a storage: its element type, or None for bytes."""

    dtype: str | None


@refuse_state
@dataclass(frozen=True, slots=True)
class StorageStub:
    """A storage that a pickle names: a record of its zip."""

    key: str
    dtype: str | None
    count: int
    """Elements; bytes where there is no element type."""


@refuse_state
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorView:
    """A tensor as a pickle describes it: elements of a storage."""

    storage: StorageStub
    dtype: str
    offset: int
    """Of the first element in the storage (elements)."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    part: Any = None
    """What it is a part of, where the pickle says so and a caller of `loads` understands it: a DTensor, say."""


@refuse_state
@dataclass(frozen=True, slots=True)
class CompositeTensor:
    """A tensor that consists of several: see `xla_ckpt.arrays.composite_tensor`, which puts it together."""

    kind: str
    """The name of a composite there; `META_TENSOR_KIND` for a tensor without bytes."""
    members: Mapping[str, Any]
    """A `TensorView` for each of its tensors, until `replaced` puts something else there."""
    about: Any
    """What else it takes."""


META_TENSOR_KIND = "torch:meta"


@refuse_state
@dataclass(frozen=True, slots=True)
class NestedTensorStub:
    """A nested tensor as a pickle describes it: `TensorView`s of all elements, and of what its parts are of them."""

    buffer: TensorView
    sizes: TensorView
    strides: TensorView
    offsets: TensorView


class TensorReferenceStub:
    """Stands where torch_xla's `TensorReference` stood: the number of a tensor that lies in a file of its own."""

    tid: Any = None

    def __setstate__(self, state: Any) -> None:
        self.tid = require_type(dict, state).get("tid")


class _NamedStub:
    """Stands for an object of a class. Each name that a pickle has is a type of its own: see `for_name`."""

    called = ""
    """The name of the class, or of the function, in the pickle."""

    @classmethod
    def for_name(cls, called: str) -> type[Self]:
        """What stands for a name: a pickle makes objects of a type without a call."""
        return type(cls.__name__, (cls,), {"called": called})


class OpaqueStub(_NamedStub):
    """Stands for an object that only somebody else's code makes. It takes what the pickle gives it, and keeps none."""

    def __new__(cls, *_: Any, **__: Any) -> OpaqueStub:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> OpaqueStub:
        return self

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, item: Any) -> None:
        """As a list that a pickle fills."""

    def extend(self, items: Any) -> None:
        """Likewise."""

    def add(self, item: Any) -> None:
        """As a set that a pickle fills."""


class AttributesStub(_NamedStub):
    """Stands for an object whose attributes are all that is wanted of it: it becomes a dict of them.

    Only for classes that a caller of `loads` names, and that pickle by their attributes. Nothing of the class itself
    is imported or run.
    """

    def __setstate__(self, state: Any) -> None:
        # Without this method a pickle could give attributes to the class itself, which stands for others, too.
        vars(self).update(require_type(dict, state))


@refuse_state
class FunctionStub:
    """A function of this library that a pickle may call."""

    def __init__(self, make: Callable[..., Any], spent: Callable[[int], None]) -> None:
        self.function = make
        self.consume_budget = spent

    def __call__(self, *args: Any, **options: Any) -> Any:
        # What is called copies what it is given, and one list can be given as often as a pickle likes.
        self.consume_budget(sum(len(value) for value in args if isinstance(value, _SIZED)))
        return self.function(*args, **options)


_SIZED = (list, tuple, dict, set, frozenset, str, bytes, bytearray)


@refuse_state
class TypeStub:
    """A type that a pickle may name and not call: the factory of a defaultdict, the class of a tensor."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind


class NamespaceStub:
    """Stands where an `argparse.NamespaceStub` stood, until `replaced` puts one there."""

    def __setstate__(self, state: Any) -> None:
        vars(self).update(require_type(dict, state))


class BytesIOStub:
    """Stands where a file in memory stood, until `replaced` puts one with the same bytes there."""

    data = b""
    position = 0

    def __setstate__(self, state: Any) -> None:
        data, position, _ = require_type(tuple, state)  # the last are attributes, which a plain one has none of
        self.data, self.position = require_type(bytes, data), parse_sizes([position])[0]
        if self.position >= 1 << 63:
            raise ValueError("a file in memory that stands where none can")


class NumpyDTypeStub:
    """Stands for a numpy dtype."""

    def __init__(self, text: str, *_: Any) -> None:
        if not isinstance(text, str) or not _NUMPY_SCALAR.fullmatch(text):
            called = repr(text[:20]) if isinstance(text, str) else type(text).__name__
            raise UntrustedObjectError(f"the file names the numpy dtype {called}, which is none of a number")
        self.text = "<" + text

    def __setstate__(self, state: Any) -> None:
        if state[1] == ">":
            self.text = ">" + self.text[1:]


class NumpyArrayStub:
    """Stands where a numpy array stood, until `replaced` puts an array of numbers there."""

    value: Any = None

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state
        if isinstance(dtype, OpaqueStub):
            self.value = dtype
            return
        # Not copied yet: a pickle may say this of one string of bytes as often as it likes.
        numbers = np.frombuffer(require_type(bytes, data), np.dtype(require_type(NumpyDTypeStub, dtype).text))
        self.value = numbers.reshape(parse_sizes(shape), order="F" if is_fortran else "C")


def parse_sizes(values: Any) -> tuple[int, ...]:
    """Sizes that a pickle gives.

    Raises:
        ValueError: They are none.
    """
    if not isinstance(values, tuple | list) or any(type(v) is not int or v < 0 for v in values):
        raise ValueError("sizes of a tensor that are no numbers")
    return tuple(values)


def require_type(kind: Any, value: Any) -> Any:
    """A value that a pickle gives.

    Raises:
        ValueError: It is of another type than pickle writes there.
    """
    if not isinstance(value, kind):
        raise ValueError(f"a {type(value).__name__} where pickle writes another type")  # noqa: TRY004
    return value
