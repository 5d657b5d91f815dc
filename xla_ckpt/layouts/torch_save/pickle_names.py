"""What stands for a name in a pickle: a function of this file for each, or a class whose objects run nothing.

A pickle can give a state to whatever it has, and pickle then sets attributes: also those of a function or of a class
that stands for a name, which the next file would find changed. So each of them refuses a state: see `stateless`.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import pathlib
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
import torch

from xla_ckpt import dtypes
from xla_ckpt.errors import UnsupportedStateError, UntrustedObjectError

T = TypeVar("T")

STORAGES = {
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

_NUMPY_SCALAR = re.compile(r"[biufc]\d{1,2}")


def stateless(kind: type[T]) -> type[T]:
    """A class whose objects refuse the state that a pickle gives them. Outermost: dataclasses make their own."""

    def refuse(self: object, _: Any) -> None:
        raise ValueError(f"a state for a {type(self).__name__}, which has none")

    kind.__setstate__ = refuse  # type: ignore[attr-defined]
    return kind


@stateless
@dataclass(frozen=True, slots=True)
class StorageType:
    """The type of a storage: its element type, or None for bytes."""

    dtype: str | None


@stateless
@dataclass(frozen=True, slots=True)
class Storage:
    """A storage that a pickle names: a record of its zip."""

    key: str
    dtype: str | None
    count: int
    """Elements; bytes where there is no element type."""


@stateless
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorView:
    """A tensor as a pickle describes it: elements of a storage."""

    storage: Storage
    dtype: str
    offset: int
    """Of the first element in the storage (elements)."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    part: Any = None
    """What it is a part of, where the pickle says so and a caller of `loads` understands it: a DTensor, say."""


class Reference:
    """Stands where torch_xla's `TensorReference` stood: the number of a tensor that lies in a file of its own."""

    tid: Any = None

    def __setstate__(self, state: Any) -> None:
        self.tid = _only(dict, state).get("tid")


class _Called:
    """Stands for an object of a class. Each name that a pickle has is a type of its own: see `of`."""

    called = ""
    """The name of the class, or of the function, in the pickle."""

    @classmethod
    def of(cls, called: str) -> type[Self]:
        """What stands for a name: a pickle makes objects of a type without a call."""
        return type(cls.__name__, (cls,), {"called": called})


class Opaque(_Called):
    """Stands for an object that only somebody else's code makes. It takes what the pickle gives it, and keeps none."""

    def __new__(cls, *_: Any, **__: Any) -> Opaque:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> Opaque:
        return self

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, item: Any) -> None:
        """As a list that a pickle fills."""

    def extend(self, items: Any) -> None:
        """Likewise."""

    def add(self, item: Any) -> None:
        """As a set that a pickle fills."""


class Attributes(_Called):
    """Stands for an object whose attributes are all that is wanted of it: it becomes a dict of them.

    Only for classes that a caller of `loads` names, and that pickle by their attributes. Nothing of the class itself
    is imported or run.
    """

    def __setstate__(self, state: Any) -> None:
        # Without this method a pickle could give attributes to the class itself, which stands for others, too.
        vars(self).update(_only(dict, state))


@stateless
class Function:
    """A function of this library that a pickle may call."""

    def __init__(self, make: Callable[..., Any], spent: Callable[[int], None]) -> None:
        self.make = make
        self.spent = spent

    def __call__(self, *args: Any, **options: Any) -> Any:
        # What is called copies what it is given, and one list can be given as often as a pickle likes.
        self.spent(sum(len(value) for value in args if isinstance(value, _SIZED)))
        return self.make(*args, **options)


_SIZED = (list, tuple, dict, set, frozenset, str, bytes, bytearray)


@stateless
class Factory:
    """A type that a pickle may name and not call: the factory of a defaultdict, the class of a tensor."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind


class Namespace:
    """Stands where an `argparse.Namespace` stood, until `replaced` puts one there."""

    def __setstate__(self, state: Any) -> None:
        vars(self).update(_only(dict, state))


class Buffer:
    """Stands where a file in memory stood, until `replaced` puts one with the same bytes there."""

    data = b""
    position = 0

    def __setstate__(self, state: Any) -> None:
        data, position, _ = _only(tuple, state)  # the last are attributes, which a plain one has none of
        self.data, self.position = _only(bytes, data), _ints([position])[0]
        if self.position >= 1 << 63:
            raise ValueError("a file in memory that stands where none can")


class NumpyDType:
    """Stands for a numpy dtype."""

    def __init__(self, text: str, *_: Any) -> None:
        if not isinstance(text, str) or not _NUMPY_SCALAR.fullmatch(text):
            called = repr(text[:20]) if isinstance(text, str) else type(text).__name__
            raise UntrustedObjectError(f"the file names the numpy dtype {called}, which is none of a number")
        self.text = "<" + text

    def __setstate__(self, state: Any) -> None:
        if state[1] == ">":
            self.text = ">" + self.text[1:]


class NumpyArray:
    """Stands where a numpy array stood, until `replaced` puts an array of numbers there."""

    value: Any = None

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state
        if isinstance(dtype, Opaque):
            self.value = dtype
            return
        # Not copied yet: a pickle may say this of one string of bytes as often as it likes.
        numbers = np.frombuffer(_only(bytes, data), np.dtype(_only(NumpyDType, dtype).text))
        self.value = numbers.reshape(_ints(shape), order="F" if is_fortran else "C")


def _ints(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or any(type(v) is not int or v < 0 for v in values):
        raise ValueError("sizes of a tensor that are no numbers")
    return tuple(values)


def _view(storage: Any, offset: Any, size: Any, stride: Any, dtype: str | None) -> TensorView:
    shape, strides = _ints(size), _ints(stride)
    if not isinstance(storage, Storage) or dtype is None or len(shape) != len(strides):
        raise ValueError("a tensor without a storage, or of no type")
    dtypes.dtype(dtype)  # raises for a type that cannot be described
    return TensorView(storage=storage, dtype=dtype, offset=_ints([offset])[0], shape=shape, strides=strides)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *others: Any) -> TensorView:
    _check_bits(*others[2:3])
    return _view(storage, offset, size, stride, getattr(storage, "dtype", None))


def _tensor_v3(storage: Any, offset: Any, size: Any, stride: Any, *others: Any) -> TensorView:
    _check_bits(*others[3:4])
    return _view(
        storage, offset, size, stride, str(_only((torch.dtype, type, Opaque), others[2])).removeprefix("torch.")
    )


def _check_bits(bits: Any = None) -> None:
    """Refuse a tensor whose elements are not the values that it has: torch conjugates or negates them when asked."""
    if isinstance(bits, Mapping) and any(bits.values()):
        raise UnsupportedStateError(
            f"a tensor is stored lazily: {', '.join(bit for bit in bits if isinstance(bit, str))}",
            hint="Save what its resolve_conj() and resolve_neg() return.",
        )


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _with_attributes(make: Any, kind: Any, args: Any, *_: Any) -> Any:
    """A tensor that had attributes. They are left out."""
    make = make.make if isinstance(make, Function) else make
    if make not in (_tensor, _tensor_v3, _parameter) or not isinstance(kind, Factory):
        raise ValueError("a tensor of a class of its own")
    return make(*_only(tuple, args))


def _size(values: Any = ()) -> torch.Size:
    return torch.Size(_ints(values))


def _device(kind: Any, index: Any = None) -> torch.device:
    _only(str, kind)
    return torch.device(f"{kind}:{_only(int, index)}" if index is not None else kind)


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ValueError("bytes in an encoding that pickle does not use")
    return bytes(_only(str, text), "latin1")


def _bytearray(data: Any = b"", encoding: Any = "latin1") -> bytearray:
    return bytearray(_encode(data, encoding) if isinstance(data, str) else _only(bytes, data))


def _only(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"a {type(value).__name__} where pickle writes another type")  # noqa: TRY004
    return value


def _defaultdict(factory: Any = None, *_: Any) -> Any:
    return collections.defaultdict(factory.kind if isinstance(factory, Factory) else _only(type(None), factory))


def _scalar(dtype: Any, data: Any) -> Any:
    return np.frombuffer(_only(bytes, data), np.dtype(_only(NumpyDType, dtype).text))[0]


_LIST = (list, tuple)

NAMES_IN_PICKLES: dict[str, Any] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _with_attributes,
    "torch.Tensor": Factory(None),
    "torch.nn.parameter.Parameter": Factory(None),
    "torch_xla.utils.serialization.TensorReference": Reference,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.storage.UntypedStorage": StorageType(None),
    "torch.UntypedStorage": StorageType(None),
    **{f"torch.{name}": StorageType(dtype) for name, dtype in STORAGES.items()},
    "collections.OrderedDict": lambda items=(): collections.OrderedDict(_only((*_LIST, dict), items)),
    "collections.defaultdict": _defaultdict,
    "collections.Counter": lambda held=(): collections.Counter(_only(dict, held or {})),
    "collections.deque": lambda items=(), maxlen=None: collections.deque(_only(_LIST, items), maxlen),
    "_codecs.encode": _encode,
    "_io.BytesIO": Buffer,
    "builtins.set": lambda items=(): set(_only(_LIST, items)),
    "builtins.frozenset": lambda items=(): frozenset(_only(_LIST, items)),
    "builtins.bytearray": _bytearray,
    "builtins.bytes": lambda data=b"": bytes(_only((bytes, *_LIST), data)),
    "builtins.complex": complex,
    "builtins.slice": slice,
    **{f"builtins.{t.__name__}": Factory(t) for t in (int, float, str, bool, list, dict, tuple)},
    "datetime.datetime": datetime.datetime,
    "datetime.date": datetime.date,
    "datetime.time": datetime.time,
    "datetime.timedelta": datetime.timedelta,
    "datetime.timezone": datetime.timezone,
    "decimal.Decimal": lambda text: decimal.Decimal(_only(str, text)),
    "argparse.Namespace": Namespace,
    "types.SimpleNamespace": types.SimpleNamespace,
    "pathlib.PosixPath": lambda *parts: pathlib.Path(*(_only(str, p) for p in parts)),
    "pathlib._local.PosixPath": lambda *parts: pathlib.Path(*(_only(str, p) for p in parts)),
    "numpy.dtype": NumpyDType,
    "numpy.ndarray": Factory(None),
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy.core.multiarray._reconstruct": NumpyArray,
    "numpy._core.multiarray._reconstruct": NumpyArray,
}
"""Name in a pickle -> what stands for it here. Nothing else that a pickle names is ever looked up."""
