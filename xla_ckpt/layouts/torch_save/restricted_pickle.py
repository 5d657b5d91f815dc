"""Unpickling without running anything: an allowlist of names, each of which stands for a function of this file.

Containers and plain values are made. A tensor becomes a `TensorView`, which describes it. Any other name in the pickle
is refused with that name, before anything of it is imported or called; or an `Opaque` stands for it, which does
nothing.

A pickle can give a state to whatever it has, and pickle then sets attributes: also those of a function or of a class
that stands for a name, which the next file would find changed. So each of them refuses a state: see `_sealed`.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import io
import pathlib
import pickle
import re
import types
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING  # what pickle itself applies to the names of old protocols
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from xla_ckpt import dtypes
from xla_ckpt.errors import CheckpointError, CorruptCheckpointError, UnsupportedStateError, UntrustedObjectError
from xla_ckpt.files.pickle_bounds import FEW_VALUES, MAX_SHARING, check
from xla_ckpt.storage.undisturbed import undisturbed

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


def _sealed(kind: type[T]) -> type[T]:
    """A class whose objects refuse the state that a pickle gives them. Outermost: dataclasses make their own."""

    def refuse(self: object, _: Any) -> None:
        raise ValueError(f"a state for a {type(self).__name__}, which has none")

    kind.__setstate__ = refuse  # type: ignore[attr-defined]
    return kind


@_sealed
@dataclass(frozen=True, slots=True)
class StorageType:
    """The type of a storage: its element type, or None for bytes."""

    dtype: str | None


@_sealed
@dataclass(frozen=True, slots=True)
class Storage:
    """A storage that a pickle names: a record of its zip."""

    key: str
    dtype: str | None
    count: int
    """Elements; bytes where there is no element type."""


@_sealed
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorView:
    """A tensor as a pickle describes it: elements of a storage."""

    storage: Storage
    dtype: str
    offset: int
    """Of the first element in the storage (elements)."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Reference:
    """Stands where torch_xla's `TensorReference` stood: the number of a tensor that lies in a file of its own."""

    tid: Any = None

    def __setstate__(self, state: Any) -> None:
        self.tid = _only(dict, state).get("tid")


class Opaque:
    """Stands for an object that only code of somebody else's makes. It takes what the pickle gives it, and keeps none.

    Each name that a pickle has is a type of its own, because a pickle makes objects of a type without a call.
    """

    called = ""
    """The name of the class, or of the function, in the pickle."""

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


def opaque(called: str) -> type[Opaque]:
    """What stands for a name."""
    return type("Opaque", (Opaque,), {"called": called})


class Attributes:
    """Stands for an object whose attributes are all that is wanted of it: it becomes a dict of them.

    Only for classes that a caller of `loads` names, and that pickle by their attributes. Nothing of the class itself
    is imported or run.
    """

    called = ""
    """The name of the class in the pickle."""

    def __setstate__(self, state: Any) -> None:
        # Without this method a pickle could give attributes to the class itself, which stands for others, too.
        vars(self).update(_only(dict, state))


def attributes(called: str) -> type[Attributes]:
    """What stands for a class of this name."""
    return type("Attributes", (Attributes,), {"called": called})


@_sealed
class _Function:
    """A function of this library that a pickle may call."""

    def __init__(self, make: Callable[..., Any], spent: Callable[[int], None]) -> None:
        self.make = make
        self.spent = spent

    def __call__(self, *args: Any, **options: Any) -> Any:
        # What is called copies what it is given, and one list can be given as often as a pickle likes.
        self.spent(sum(len(value) for value in args if isinstance(value, _SIZED)))
        return self.make(*args, **options)


_SIZED = (list, tuple, dict, set, frozenset, str, bytes, bytearray)


@_sealed
class _Factory:
    """A type that a pickle may name and not call: the factory of a defaultdict, the class of a tensor."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind


class _Namespace:
    """Stands where an `argparse.Namespace` stood, until `replaced` puts one there."""

    def __setstate__(self, state: Any) -> None:
        vars(self).update(_only(dict, state))


class _Buffer:
    """Stands where a file in memory stood, until `replaced` puts one with the same bytes there."""

    data = b""
    position = 0

    def __setstate__(self, state: Any) -> None:
        data, position, _ = _only(tuple, state)  # the last are attributes, which a plain one has none of
        self.data, self.position = _only(bytes, data), _ints([position])[0]
        if self.position >= 1 << 63:
            raise ValueError("a file in memory that stands where none can")


class _NumpyDType:
    def __init__(self, text: str, *_: Any) -> None:
        if not isinstance(text, str) or not _NUMPY_SCALAR.fullmatch(text):
            called = repr(text[:20]) if isinstance(text, str) else type(text).__name__
            raise UntrustedObjectError(f"the file names the numpy dtype {called}, which is none of a number")
        self.text = "<" + text

    def __setstate__(self, state: Any) -> None:
        if state[1] == ">":
            self.text = ">" + self.text[1:]


class _NumpyArray:
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
        numbers = np.frombuffer(_only(bytes, data), np.dtype(_only(_NumpyDType, dtype).text))
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
    make = make.make if isinstance(make, _Function) else make
    if make not in (_tensor, _tensor_v3, _parameter) or not isinstance(kind, _Factory):
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
    return collections.defaultdict(factory.kind if isinstance(factory, _Factory) else _only(type(None), factory))


def _scalar(dtype: Any, data: Any) -> Any:
    return np.frombuffer(_only(bytes, data), np.dtype(_only(_NumpyDType, dtype).text))[0]


_LIST = (list, tuple)

_NAMES: dict[str, Any] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _with_attributes,
    "torch.Tensor": _Factory(None),
    "torch.nn.parameter.Parameter": _Factory(None),
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
    "_io.BytesIO": _Buffer,
    "builtins.set": lambda items=(): set(_only(_LIST, items)),
    "builtins.frozenset": lambda items=(): frozenset(_only(_LIST, items)),
    "builtins.bytearray": _bytearray,
    "builtins.bytes": lambda data=b"": bytes(_only((bytes, *_LIST), data)),
    "builtins.complex": complex,
    "builtins.slice": slice,
    **{f"builtins.{t.__name__}": _Factory(t) for t in (int, float, str, bool, list, dict, tuple)},
    "datetime.datetime": datetime.datetime,
    "datetime.date": datetime.date,
    "datetime.time": datetime.time,
    "datetime.timedelta": datetime.timedelta,
    "datetime.timezone": datetime.timezone,
    "decimal.Decimal": lambda text: decimal.Decimal(_only(str, text)),
    "argparse.Namespace": _Namespace,
    "types.SimpleNamespace": types.SimpleNamespace,
    "pathlib.PosixPath": lambda *parts: pathlib.Path(*(_only(str, p) for p in parts)),
    "pathlib._local.PosixPath": lambda *parts: pathlib.Path(*(_only(str, p) for p in parts)),
    "numpy.dtype": _NumpyDType,
    "numpy.ndarray": _Factory(None),
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy.core.multiarray._reconstruct": _NumpyArray,
    "numpy._core.multiarray._reconstruct": _NumpyArray,
}
"""Name in a pickle -> what stands for it here. Nothing else that a pickle names is ever looked up."""


_OF_OTHER_CLASSES = frozenset({_with_attributes, _defaultdict})
"""Functions whose argument may be a class, of which there are more than this file knows."""


def _or_opaque(make: Callable[..., Any], called: str) -> Callable[..., Any]:
    """A function of this file that makes an `Opaque` of what it would refuse."""
    refused = (CheckpointError, ValueError) if make in _OF_OTHER_CLASSES else CheckpointError

    def made(*args: Any, **options: Any) -> Any:
        try:
            return make(*args, **options)
        except refused:
            return opaque(called)()

    return made


class _Restricted(pickle.Unpickler):
    def __init__(self, data: bytes, file: str, more: Mapping[str, Any], tolerant: bool) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self.file = file
        self.more = more
        self.tolerant = tolerant
        self.left = max(FEW_VALUES, MAX_SHARING * len(data))
        """Values and bytes that functions may still be given."""

    def spend(self, values: int) -> None:
        """Count what a function is given.

        Raises:
            ValueError: It is too much.
        """
        self.left -= values
        if self.left < 0:
            raise ValueError(f"its functions are given more than {MAX_SHARING} values for each of its bytes")

    def find_class(self, module: str, name: str) -> Any:
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        called = f"{module}.{name}"
        known = self.more.get(called, _NAMES.get(called))
        if known is not None:
            is_function = isinstance(known, types.FunctionType)
            if self.tolerant and called not in self.more and (known is _NumpyDType or is_function):
                return _Function(_or_opaque(known, called), self.spend)
            return _Function(known, self.spend) if is_function else known
        # `vars`, because an attribute that torch does not have yet may be a module that it imports on first use.
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if self.tolerant:
            return opaque(called)
        raise UntrustedObjectError(
            f"the file names {called}, which is neither a tensor nor a plain value; it was not loaded, and nothing ran",
            file=self.file,
            hint="Have the program that wrote it save tensors, plain values and containers only.",
        )

    def persistent_load(self, pid: Any) -> Storage | Opaque:
        match pid:
            case ("storage", StorageType(dtype), str(key), str(), int(count)) if count >= 0:
                return Storage(key, dtype, count)
            case ("storage", type() as kind, str(), str(), int()) if issubclass(kind, Opaque):
                return kind()  # of elements that this file knows nothing of: quantized numbers
        raise ValueError("a storage that torch.save did not write")


def loads(
    data: bytes, file: str, more: Mapping[str, Any] = types.MappingProxyType({}), *, tolerant: bool = False
) -> Any:
    """The value in a pickle, with a `TensorView` for each tensor and a `Reference` for each reference to one.

    Args:
        data: The pickle.
        file: Where it comes from, for errors.
        more: Further names that it may have, with what stands for each.
        tolerant: Make an `Opaque` of whatever it names besides, and of what cannot be described.

    Raises:
        UntrustedObjectError: It names anything but tensors, containers and plain values. Nothing of it has run.
        UnsupportedStateError: A tensor is of a kind that cannot be described.
        CorruptCheckpointError: It is no pickle.
    """
    with undisturbed():  # what a signal handler raises would be taken for damage
        try:
            check(data)
            return _Restricted(data, file, more, tolerant).load()
        except CheckpointError as error:
            raise error.at(file=file) from None
        except Exception as error:
            # Damaged pickles raise whatever the operation that they describe by accident raises.
            raise CorruptCheckpointError(f"a pickle is damaged: {error}"[:300], file=file) from error


MAX_PICKLE_DEPTH = 100
"""Containers inside of containers. A pickle may hold a list that contains itself, which a walk would never leave."""


def replaced(value: Any, leaf: Callable[[Any], Any], file: str, nbytes: int) -> Any:
    """The same containers, of the same classes, with ``leaf(value)`` in place of every `TensorView` and `Reference`.

    Args:
        value: What `loads` made.
        leaf: See above.
        file: Where it comes from, for errors.
        nbytes: Bytes of the pickle.

    Raises:
        CorruptCheckpointError: Containers are nested without end.
    """
    return _Walk(leaf, file, max(FEW_VALUES, MAX_SHARING * nbytes)).visit(value, 0)


class _Walk:
    def __init__(self, leaf: Callable[[Any], Any], file: str, most: int) -> None:
        self.leaf = leaf
        self.file = file
        self.most = most
        self.seen = 0

    def visit(self, value: Any, depth: int) -> Any:
        """The value, rebuilt; `depth` containers are around it."""
        if depth > MAX_PICKLE_DEPTH:
            raise CorruptCheckpointError(f"a pickle is nested deeper than {MAX_PICKLE_DEPTH}", file=self.file)
        self.count(1)
        kind = type(value)
        if kind is TensorView or kind is Reference:
            return self.leaf(value)
        if kind is _NumpyArray:
            if value.value is None:
                raise CorruptCheckpointError("a pickle names a numpy array that it does not describe", file=self.file)
            self.count(value.value.nbytes if isinstance(value.value, np.ndarray) else 1)
            return value.value.copy() if isinstance(value.value, np.ndarray) else value.value
        if isinstance(value, Attributes):
            return {"class": value.called.rpartition(".")[2], **self.mapping(vars(value), depth + 1)}
        if isinstance(value, Mapping):
            return self.mapping(value, depth + 1)
        if kind is _Buffer:
            self.count(len(value.data))
            buffer = io.BytesIO(value.data)
            buffer.seek(value.position)
            return buffer
        if kind is list or kind is tuple:
            return kind([self.visit(v, depth + 1) for v in value])
        if kind is collections.deque:
            return collections.deque([self.visit(v, depth + 1) for v in value], value.maxlen)
        if kind is _Namespace or kind is types.SimpleNamespace:
            members = {k: self.visit(v, depth + 1) for k, v in vars(value).items()}
            return argparse.Namespace(**members) if kind is _Namespace else types.SimpleNamespace(**members)
        return value

    def count(self, values: int) -> None:
        """Count some values; a byte of an array is one."""
        self.seen += values
        if self.seen > self.most:
            raise CorruptCheckpointError(f"a pickle stands for more than {self.most} values", file=self.file)

    def mapping(self, value: Mapping[Any, Any], depth: int) -> Any:
        """A mapping of the same class."""
        members = {k: self.visit(v, depth) for k, v in value.items()}
        if type(value) is dict:
            return members
        if type(value) is collections.defaultdict:
            return collections.defaultdict(value.default_factory, members)
        return type(value)(members)  # type: ignore[call-arg]
