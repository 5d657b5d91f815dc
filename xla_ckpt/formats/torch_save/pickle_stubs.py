"""Stubs for objects in a pickle: classes whose instances run no code.

A pickle can set the state of any object in it, also of a function or class that replaces a name, which would modify
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
"""Storages of quantized numbers, whose elements are integers."""

_NUMPY_SCALAR = re.compile(r"[biufc]\d{1,2}")


def refuse_state(kind: type[T]) -> type[T]:
    """Make instances of a stub class refuse a state from a pickle. Apply it last: dataclasses set `__setstate__`."""

    def refuse(self: object, _: Any) -> None:
        raise ValueError(f"a state for a {type(self).__name__}, which has none")

    kind.__setstate__ = refuse  # type: ignore[attr-defined]
    return kind


@refuse_state
@dataclass(frozen=True, slots=True)
class StorageTypeStub:
    """Type of a storage: its dtype, or None for bytes."""

    dtype: str | None


@refuse_state
@dataclass(frozen=True, slots=True)
class StorageStub:
    """Storage in a pickle: a record of its zip."""

    key: str
    dtype: str | None
    count: int
    """Number of elements; number of bytes if there is no dtype."""


@refuse_state
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorView:
    """Tensor in a pickle: elements of a storage."""

    storage: StorageStub
    dtype: str
    offset: int
    """Offset of the first element in the storage (elements)."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    part: Any = None
    """Layout of the array that the tensor is a part of (a DTensor), if a stub of the caller sets it."""


@refuse_state
@dataclass(frozen=True, slots=True)
class CompositeTensor:
    """Tensor that consists of several tensors; `xla_ckpt.arrays.composite_tensor` composes it."""

    kind: str
    """Name of the composite kind; `META_TENSOR_KIND` for a tensor without bytes."""
    members: Mapping[str, Any]
    """A `TensorView` for each of its tensors, until `replace_tensors` replaces it."""
    about: Any
    """Other arguments of its constructor."""


META_TENSOR_KIND = "torch:meta"


@refuse_state
@dataclass(frozen=True, slots=True)
class NestedTensorStub:
    """Nested tensor in a pickle: `TensorView`s of its buffer, and of the sizes, strides and offsets of its parts."""

    buffer: TensorView
    sizes: TensorView
    strides: TensorView
    offsets: TensorView


class TensorReferenceStub:
    """Stub for torch_xla's `TensorReference`: the number of a tensor that is stored in a file of its own."""

    tid: Any = None

    def __setstate__(self, state: Any) -> None:
        self.tid = require_type(dict, state).get("tid")


class _NamedStub:
    """Stub for an object of a class. Each name in a pickle has a type of its own: see `for_name`."""

    called = ""
    """Name of the class or function in the pickle."""

    @classmethod
    def for_name(cls, called: str) -> type[Self]:
        """Return the stub type for a name. A pickle can create instances of a type without a call."""
        return type(cls.__name__, (cls,), {"called": called})


class OpaqueStub(_NamedStub):
    """Stub for an object that only code outside this library can create. It accepts all data, and keeps none."""

    def __new__(cls, *_: Any, **__: Any) -> OpaqueStub:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> OpaqueStub:
        return self

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, item: Any) -> None:
        """Ignore an item: a pickle may fill it like a list."""

    def extend(self, items: Any) -> None:
        """Ignore items: a pickle may fill it like a list."""

    def add(self, item: Any) -> None:
        """Ignore an item: a pickle may fill it like a set."""


class AttributesStub(_NamedStub):
    """Stub for an object of which only the attributes are needed. It becomes a dict of them.

    Only for classes that a caller of `load_pickle` passes, and that are pickled by their attributes. The class itself
    is neither imported nor run.
    """

    def __setstate__(self, state: Any) -> None:
        # Without this method a pickle could set attributes of the class itself, which is shared by other stubs.
        vars(self).update(require_type(dict, state))


@refuse_state
class FunctionStub:
    """Function of this library that a pickle may call."""

    def __init__(self, make: Callable[..., Any], spent: Callable[[int], None]) -> None:
        self.function = make
        self.consume_budget = spent

    def __call__(self, *args: Any, **options: Any) -> Any:
        # The function copies its arguments, and a pickle can pass one list many times.
        self.consume_budget(sum(len(value) for value in args if isinstance(value, _SIZED)))
        return self.function(*args, **options)


_SIZED = (list, tuple, dict, set, frozenset, str, bytes, bytearray)


@refuse_state
class TypeStub:
    """Type that a pickle may reference but not call: the factory of a defaultdict, the class of a tensor."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind


class NamespaceStub:
    """Stub for an `argparse.Namespace`, until `replace_tensors` creates one."""

    def __setstate__(self, state: Any) -> None:
        vars(self).update(require_type(dict, state))


class BytesIOStub:
    """Stub for an `io.BytesIO`, until `replace_tensors` creates one with the same bytes."""

    data = b""
    position = 0

    def __setstate__(self, state: Any) -> None:
        data, position, _ = require_type(tuple, state)  # the last item contains attributes, which a plain one lacks
        self.data, self.position = require_type(bytes, data), parse_sizes([position])[0]
        if self.position >= 1 << 63:
            raise ValueError("a file in memory that stands where none can")


class NumpyDTypeStub:
    """Stub for a numpy dtype."""

    def __init__(self, text: str, *_: Any) -> None:
        if not isinstance(text, str) or not _NUMPY_SCALAR.fullmatch(text):
            called = repr(text[:20]) if isinstance(text, str) else type(text).__name__
            raise UntrustedObjectError(f"the file names the numpy dtype {called}, which is none of a number")
        self.text = "<" + text

    def __setstate__(self, state: Any) -> None:
        if state[1] == ">":
            self.text = ">" + self.text[1:]


class NumpyArrayStub:
    """Stub for a numpy array, until `replace_tensors` creates an array of numbers."""

    value: Any = None

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state
        if isinstance(dtype, OpaqueStub):
            self.value = dtype
            return
        # Not copied yet: a pickle may reference one bytes object many times.
        numbers = np.frombuffer(require_type(bytes, data), np.dtype(require_type(NumpyDTypeStub, dtype).text))
        self.value = numbers.reshape(parse_sizes(shape), order="F" if is_fortran else "C")


def parse_sizes(values: Any) -> tuple[int, ...]:
    """Return sizes from a pickle as a tuple.

    Raises:
        ValueError: They are not sizes.
    """
    if not isinstance(values, tuple | list) or any(type(v) is not int or v < 0 for v in values):
        raise ValueError("sizes of a tensor that are no numbers")
    return tuple(values)


def require_type(kind: Any, value: Any) -> Any:
    """Return a value from a pickle.

    Raises:
        ValueError: It has another type than pickle writes there.
    """
    if not isinstance(value, kind):
        raise ValueError(f"a {type(value).__name__} where pickle writes another type")  # noqa: TRY004
    return value
