"""Unpickle without running code: an allowlist of names, each replaced by a function or a stub of this library.

Containers and plain values are created. A tensor becomes a `TensorView`, which describes it. Any other name in the
pickle is refused before anything of it is imported or called, or replaced by an `OpaqueStub`, which does nothing.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import inspect
import io
import pathlib
import pickle
import types
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING  # the mapping that pickle applies to names of old protocols
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, wraps
from typing import Any

import numpy as np
import torch

from xla_ckpt.core import dtypes
from xla_ckpt.core.files.pickle_limits import MAX_VALUES_PER_BYTE, MIN_VALUE_LIMIT, check_pickle
from xla_ckpt.core.tree.state_dict import copy_module_metadata
from xla_ckpt.errors import CheckpointError, CorruptCheckpointError, UnsupportedStateError, UntrustedObjectError
from xla_ckpt.formats.torch_save.pickle_stubs import (
    META_TENSOR_KIND,
    QUANTIZED_STORAGE_DTYPES,
    STORAGE_DTYPES,
    AttributesStub,
    BytesIOStub,
    CompositeTensor,
    FunctionStub,
    NamespaceStub,
    NestedTensorStub,
    NumpyArrayStub,
    NumpyDTypeStub,
    OpaqueStub,
    StorageStub,
    StorageTypeStub,
    TensorReferenceStub,
    TensorView,
    TypeStub,
    parse_sizes,
    require_type,
)
from xla_ckpt.loading.tag_reader import DAMAGED_FILE_HINT
from xla_ckpt.storage.signals import defer_signals

RebuiltTensor = TensorView | CompositeTensor | NestedTensorStub
"""Result of the rebuild functions in this file."""


def _make_view(storage: Any, offset: Any, size: Any, stride: Any, dtype: str | None) -> TensorView:
    shape, strides = parse_sizes(size), parse_sizes(stride)
    if not isinstance(storage, StorageStub) or dtype is None or len(shape) != len(strides):
        raise ValueError("a tensor without a storage, or of no type")
    dtypes.get_dtype(dtype)  # raises for an unsupported dtype
    return TensorView(storage=storage, dtype=dtype, offset=parse_sizes([offset])[0], shape=shape, strides=strides)


def _rebuild_tensor(storage: Any, offset: Any, size: Any, stride: Any, *others: Any) -> RebuiltTensor:
    return _apply_bits(_make_view(storage, offset, size, stride, getattr(storage, "dtype", None)), *others[2:3])


def _rebuild_tensor_v3(storage: Any, offset: Any, size: Any, stride: Any, *others: Any) -> RebuiltTensor:
    dtype = str(require_type((torch.dtype, type, OpaqueStub), others[2])).removeprefix("torch.")
    if dtype == "complex32" and not any(others[3:4]):  # two halves each, as in `torch.view_as_real`
        start, shape, strides = parse_sizes([offset])[0], parse_sizes(size), parse_sizes(stride)
        halves = _make_view(storage, 2 * start, (*shape, 2), (*(2 * step for step in strides), 1), "float16")
        return CompositeTensor("torch:complex32", {"parts": halves}, None)
    return _apply_bits(_make_view(storage, offset, size, stride, dtype), *others[3:4])


def _apply_bits(view: TensorView, bits: Any = None) -> RebuiltTensor:
    """Apply the bits that torch saves with a tensor: its values are the stored values, conjugated or negated.

    Raises:
        UnsupportedStateError: Another bit or several bits are set.
    """
    names = {name for name, is_set in require_type((dict, type(None)), bits or {}).items() if is_set}
    if not names:
        return view
    if len(names) > 1 or not names <= {"conj", "neg"}:
        raise UnsupportedStateError(
            f"a tensor is stored lazily: {', '.join(sorted(map(str, names)))}",
            hint="Save what its resolve_conj() and resolve_neg() return.",
        )
    return CompositeTensor(f"torch:{names.pop()}", {"stored": view}, None)


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data


def _rebuild_device_tensor(data: Any, dtype: Any, *_: Any) -> Any:
    """Rebuild a tensor of a device without storages, such as XLA, as its copy in host memory.

    Raises:
        UnsupportedStateError: The dtypes differ.
    """
    if isinstance(data, TensorView) and str(require_type(torch.dtype, dtype)).removeprefix("torch.") != data.dtype:
        raise UnsupportedStateError(
            f"a tensor is stored as {data.dtype}, and stands for one of {str(dtype).removeprefix('torch.')}",
            hint="Load it with torch.load, and save it anew.",
        )
    return data


def _rebuild_jagged(members: Any) -> CompositeTensor:
    given = require_type(dict, members)
    tensors = {name: given[name] for name in ("values", "offsets", "lengths") if given.get(name) is not None}
    return _make_composite("torch:jagged", tensors, {"ragged": parse_sizes([given["_ragged_idx"]])[0]})


def _rebuild_with_attributes(make: Any, kind: Any, args: Any, *_: Any) -> Any:
    """Rebuild a tensor that has attributes. The attributes are dropped."""
    make = inspect.unwrap(make.function) if isinstance(make, FunctionStub) else make
    if make not in _REBUILD_FUNCTIONS or not isinstance(kind, TypeStub):
        raise ValueError("a tensor of a class of its own")
    return make(*require_type(tuple, args))


def _make_composite(kind: str, members: Mapping[str, Any], about: Any) -> CompositeTensor:
    """Return a tensor that consists of several tensors.

    Raises:
        UnsupportedStateError: One of them is not a plain tensor.
    """
    if not all(isinstance(member, TensorView) for member in members.values()):
        raise UnsupportedStateError(f"a tensor of the kind {kind} consists of other than plain tensors")
    return CompositeTensor(kind, members, about)


_COMPRESSED_INDICES = {
    "sparse_csr": ("crow_indices", "col_indices"),
    "sparse_csc": ("ccol_indices", "row_indices"),
    "sparse_bsr": ("crow_indices", "col_indices"),
    "sparse_bsc": ("ccol_indices", "row_indices"),
}


def _rebuild_sparse(layout: Any, data: Any) -> CompositeTensor:
    name, data = require_type(str, layout).removeprefix("torch."), require_type(tuple, data)
    if name == "sparse_coo":
        indices, values, size, *coalesced = data
        about = {"size": [*parse_sizes(size)], "coalesced": require_type(bool, coalesced[0]) if coalesced else False}
        return _make_composite("torch:sparse_coo", {"indices": indices, "values": values}, about)
    first, second = _COMPRESSED_INDICES[name]
    compressed, plain, values, size = data
    return _make_composite(
        f"torch:{name}", {first: compressed, second: plain, "values": values}, {"size": [*parse_sizes(size)]}
    )


_QUANTIZED_DTYPES = {"qint8": "int8", "quint8": "uint8", "qint32": "int32"}
"""Quantized dtype -> dtype of the stored integers."""


def _rebuild_quantized(storage: Any, offset: Any, size: Any, stride: Any, how: Any, *_: Any) -> CompositeTensor:
    if isinstance(storage, OpaqueStub) or getattr(storage, "dtype", None) not in _QUANTIZED_DTYPES:
        raise UnsupportedStateError("a tensor is quantized to numbers of less than a byte, or of no known type")
    scheme, *parameters = require_type(tuple, how)
    values = _make_view(storage, offset, size, stride, _QUANTIZED_DTYPES[storage.dtype])
    about = {"dtype": getattr(torch, storage.dtype)}
    if require_type(TypeStub, scheme).kind is torch.per_tensor_affine:
        scale, zero_point = parameters
        about |= {"scale": require_type((float, int), scale), "zero_point": require_type(int, zero_point)}
        return _make_composite("torch:per_tensor", {"values": values}, about)
    scales, zero_points, axis = parameters
    if getattr(zero_points, "dtype", "int64") != "int64":
        raise UnsupportedStateError("a tensor is quantized with zero points that are no integers")
    members = {"values": values, "scales": scales, "zero_points": zero_points}
    return _make_composite("torch:per_channel", members, {**about, "axis": parse_sizes([axis])[0]})


def _rebuild_nested(*views: Any) -> NestedTensorStub:
    buffer, sizes, strides, offsets = views
    if not all(isinstance(view, TensorView) for view in views):
        raise UnsupportedStateError("a nested tensor consists of other than plain tensors")
    return NestedTensorStub(buffer, sizes, strides, offsets)


def _rebuild_meta(dtype: Any, size: Any, stride: Any, *_: Any) -> CompositeTensor:
    about = {"dtype": require_type(torch.dtype, dtype), "size": parse_sizes(size), "stride": parse_sizes(stride)}
    return CompositeTensor(META_TENSOR_KIND, {}, about)


_REBUILD_FUNCTIONS = (
    _rebuild_tensor,
    _rebuild_tensor_v3,
    _rebuild_parameter,
    _rebuild_device_tensor,
    _rebuild_jagged,
    _rebuild_sparse,
    _rebuild_quantized,
    _rebuild_nested,
    _rebuild_meta,
)


def _make_size(values: Any = ()) -> torch.Size:
    return torch.Size(parse_sizes(values))


def _make_device(kind: Any, index: Any = None) -> torch.device:
    require_type(str, kind)
    return torch.device(f"{kind}:{require_type(int, index)}" if index is not None else kind)


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ValueError("bytes in an encoding that pickle does not use")
    return bytes(require_type(str, text), "latin1")


def _make_bytearray(data: Any = b"", encoding: Any = "latin1") -> bytearray:
    return bytearray(_encode(data, encoding) if isinstance(data, str) else require_type(bytes, data))


def _make_defaultdict(factory: Any = None, *_: Any) -> Any:
    return collections.defaultdict(factory.kind if isinstance(factory, TypeStub) else require_type(type(None), factory))


def _make_scalar(dtype: Any, data: Any) -> Any:
    return np.frombuffer(require_type(bytes, data), np.dtype(require_type(NumpyDTypeStub, dtype).text))[0]


_LIST_TYPES = (list, tuple)

ALLOWED_NAMES: dict[str, Any] = {
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._tensor._rebuild_from_type_v2": _rebuild_with_attributes,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _rebuild_device_tensor,
    "torch._utils._rebuild_sparse_tensor": _rebuild_sparse,
    "torch.serialization._get_layout": lambda name: require_type(str, name),
    "torch._utils._rebuild_qtensor": _rebuild_quantized,
    "torch.per_tensor_affine": TypeStub(torch.per_tensor_affine),
    "torch.per_channel_affine": TypeStub(torch.per_channel_affine),
    "torch._utils._rebuild_nested_tensor": _rebuild_nested,
    "torch.nested._internal.nested_tensor._rebuild_njt": _rebuild_jagged,
    "torch.nested._internal.nested_tensor.NestedTensor": TypeStub(None),
    "torch._utils._rebuild_meta_tensor_no_storage": _rebuild_meta,
    "torch.Tensor": TypeStub(None),
    "torch.nn.parameter.Parameter": TypeStub(None),
    "torch_xla.utils.serialization.TensorReference": TensorReferenceStub,
    "torch.Size": _make_size,
    "torch.device": _make_device,
    "torch.storage.UntypedStorage": StorageTypeStub(None),
    "torch.UntypedStorage": StorageTypeStub(None),
    **{f"torch.{name}": StorageTypeStub(dtype) for name, dtype in (STORAGE_DTYPES | QUANTIZED_STORAGE_DTYPES).items()},
    "collections.OrderedDict": lambda items=(): collections.OrderedDict(require_type((*_LIST_TYPES, dict), items)),
    "collections.defaultdict": _make_defaultdict,
    "collections.Counter": lambda held=(): collections.Counter(require_type(dict, held or {})),
    "collections.deque": lambda items=(), maxlen=None: collections.deque(require_type(_LIST_TYPES, items), maxlen),
    "_codecs.encode": _encode,
    "_io.BytesIO": BytesIOStub,
    "builtins.set": lambda items=(): set(require_type(_LIST_TYPES, items)),
    "builtins.frozenset": lambda items=(): frozenset(require_type(_LIST_TYPES, items)),
    "builtins.bytearray": _make_bytearray,
    "builtins.bytes": lambda data=b"": bytes(require_type((bytes, *_LIST_TYPES), data)),
    "builtins.complex": complex,
    "builtins.slice": slice,
    **{f"builtins.{t.__name__}": TypeStub(t) for t in (int, float, str, bool, list, dict, tuple)},
    "datetime.datetime": datetime.datetime,
    "datetime.date": datetime.date,
    "datetime.time": datetime.time,
    "datetime.timedelta": datetime.timedelta,
    "datetime.timezone": datetime.timezone,
    "decimal.Decimal": lambda text: decimal.Decimal(require_type(str, text)),
    "argparse.Namespace": NamespaceStub,
    "types.SimpleNamespace": types.SimpleNamespace,
    "pathlib.PosixPath": lambda *parts: pathlib.Path(*(require_type(str, p) for p in parts)),
    "pathlib._local.PosixPath": lambda *parts: pathlib.Path(*(require_type(str, p) for p in parts)),
    "numpy.dtype": NumpyDTypeStub,
    "numpy.ndarray": TypeStub(None),
    "numpy.core.multiarray.scalar": _make_scalar,
    "numpy._core.multiarray.scalar": _make_scalar,
    "numpy.core.multiarray._reconstruct": NumpyArrayStub,
    "numpy._core.multiarray._reconstruct": NumpyArrayStub,
}
"""Name in a pickle -> its replacement. No other name in a pickle is ever looked up."""


_CLASS_ARGUMENT_FUNCTIONS = frozenset(
    ALLOWED_NAMES[name] for name in ("torch._tensor._rebuild_from_type_v2", "collections.defaultdict")
)
"""Functions whose argument may be a class that this file does not know."""


def _make_tolerant(make: Callable[..., Any], called: str) -> Callable[..., Any]:
    """Wrap a function of this file to return an `OpaqueStub` for arguments that it would refuse."""
    refused = (CheckpointError, ValueError) if make in _CLASS_ARGUMENT_FUNCTIONS else CheckpointError

    @wraps(make)
    def made(*args: Any, **options: Any) -> Any:
        try:
            return make(*args, **options)
        except refused:
            return OpaqueStub.for_name(called)()

    return made


class _RestrictedUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, file: str, extra_names: Mapping[str, Any], tolerant: bool) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self.file = file
        self.extra_names = extra_names
        self.tolerant = tolerant
        self.budget = max(MIN_VALUE_LIMIT, MAX_VALUES_PER_BYTE * len(data))
        """Number of values and bytes that may still be passed to functions."""

    def consume_budget(self, values: int) -> None:
        """Count the arguments of a function.

        Raises:
            ValueError: The budget is exceeded.
        """
        self.budget -= values
        if self.budget < 0:
            raise ValueError(f"its functions are given more than {MAX_VALUES_PER_BYTE} values for each of its bytes")

    def find_class(self, module: str, name: str) -> Any:
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        called = f"{module}.{name}"
        known = self.extra_names.get(called, ALLOWED_NAMES.get(called))
        if known is not None:
            is_function = isinstance(known, types.FunctionType)
            if self.tolerant and called not in self.extra_names and (known is NumpyDTypeStub or is_function):
                return FunctionStub(_make_tolerant(known, called), self.consume_budget)
            return FunctionStub(known, self.consume_budget) if is_function else known
        # `vars`, because getattr may import a module that torch loads lazily.
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if self.tolerant:
            return OpaqueStub.for_name(called)
        raise UntrustedObjectError(
            f"the file names {called}, which is neither a tensor nor a plain value; it was not loaded, and nothing ran",
            file=self.file,
            hint="Have the program that wrote it save tensors, plain values and containers only.",
        )

    def persistent_load(self, pid: Any) -> StorageStub | OpaqueStub:
        match pid:
            case ("storage", StorageTypeStub(dtype), str(key), str(), int(count)) if count >= 0:
                return StorageStub(key, dtype, count)
            case ("storage", type() as kind, str(), str(), int()) if issubclass(kind, OpaqueStub):
                return kind()  # a storage of unknown elements: quantized numbers
        raise ValueError("a storage that torch.save did not write")


def load_pickle(
    data: bytes, file: str, extra_names: Mapping[str, Any] = types.MappingProxyType({}), *, tolerant: bool = False
) -> Any:
    """Load a pickle, with a `TensorView` for each tensor and a `TensorReferenceStub` for each reference to a tensor.

    Args:
        file: File that contains the pickle, for errors.
        extra_names: Additional names that the pickle may contain, with the replacement of each.
        tolerant: Return an `OpaqueStub` for other names, and for unsupported values.

    Raises:
        UntrustedObjectError: It names classes other than tensors, containers and plain values. No code was run.
        UnsupportedStateError: A tensor is of an unsupported kind.
        CorruptCheckpointError: It is not a valid pickle.
    """
    with defer_signals():  # otherwise an exception of a signal handler would be reported as a corrupt pickle
        try:
            check_pickle(data)
            return _RestrictedUnpickler(data, file, extra_names, tolerant).load()
        except CheckpointError as error:
            raise error.at(file=file) from None
        except Exception as error:
            # A corrupt pickle may perform any operation, and raise any exception.
            raise CorruptCheckpointError(
                f"a pickle is damaged: {error}"[:300], file=file, hint=DAMAGED_FILE_HINT
            ) from error


def load_single_tensor(data: bytes) -> TensorView | None:
    """Return the tensor in a pickle that contains only a tensor; None if it contains more, or is corrupt.

    torch_xla's `serialization.save` writes a file for each tensor. All tensors of one shape have the same pickle there,
    which is parsed once.
    """
    return _load_single_tensor(data) if len(data) < _SMALL_PICKLE_BYTES else None


_SMALL_PICKLE_BYTES = 1024
"""Size (bytes) below which a pickle may contain a single tensor."""


@lru_cache(maxsize=1024)
def _load_single_tensor(data: bytes) -> TensorView | None:
    try:
        value = load_pickle(data, "")
    except CheckpointError:
        return None  # `load_pickle` raises the error with the name of the file
    return value if isinstance(value, TensorView) else None


MAX_PICKLE_DEPTH = 100
"""Maximum depth of nested containers. A pickle may contain a list that contains itself, which would never end."""


def replace_tensors(value: Any, replace_leaf: Callable[[Any], Any], file: str, nbytes: int) -> Any:
    """Rebuild containers, with each `TensorView` and `TensorReferenceStub` replaced by ``replace_leaf``.

    Containers keep their classes. Each `CompositeTensor`, after its members, and each `NestedTensorStub` are also
    replaced.

    Args:
        file: File that contains the value, for errors.
        nbytes: Size of the pickle, which limits the number of values.

    Raises:
        CorruptCheckpointError: Containers are nested too deeply, or there are too many values.
    """
    return _TreeReplacer(replace_leaf, file, max(MIN_VALUE_LIMIT, MAX_VALUES_PER_BYTE * nbytes)).visit(value, 0)


class _TreeReplacer:
    def __init__(self, leaf: Callable[[Any], Any], file: str, most: int) -> None:
        self.replace_leaf = leaf
        self.file = file
        self.max_values = most
        self.value_count = 0

    def visit(self, value: Any, depth: int) -> Any:
        """Rebuild a value; `depth` is the number of containers around it."""
        if depth > MAX_PICKLE_DEPTH:
            raise CorruptCheckpointError(f"a pickle is nested deeper than {MAX_PICKLE_DEPTH}", file=self.file)
        self.count_values(1)
        kind = type(value)
        if kind is TensorView or kind is TensorReferenceStub or kind is NestedTensorStub:
            return self.replace_leaf(value)
        if kind is CompositeTensor:
            return self.replace_leaf(
                replace(value, members={k: self.visit(v, depth + 1) for k, v in value.members.items()})
            )
        if kind is NumpyArrayStub:
            if value.value is None:
                raise CorruptCheckpointError("a pickle names a numpy array that it does not describe", file=self.file)
            self.count_values(value.value.nbytes if isinstance(value.value, np.ndarray) else 1)
            return value.value.copy() if isinstance(value.value, np.ndarray) else value.value
        if isinstance(value, AttributesStub):
            return {"class": value.called.rpartition(".")[2], **self.replace_mapping(vars(value), depth + 1)}
        if isinstance(value, Mapping):
            return self.replace_mapping(value, depth + 1)
        if kind is BytesIOStub:
            self.count_values(len(value.data))
            buffer = io.BytesIO(value.data)
            buffer.seek(value.position)
            return buffer
        if kind is list or kind is tuple:
            return kind([self.visit(v, depth + 1) for v in value])
        if kind is collections.deque:
            return collections.deque([self.visit(v, depth + 1) for v in value], value.maxlen)
        if kind is NamespaceStub or kind is types.SimpleNamespace:
            members = {k: self.visit(v, depth + 1) for k, v in vars(value).items()}
            return argparse.Namespace(**members) if kind is NamespaceStub else types.SimpleNamespace(**members)
        return value

    def count_values(self, values: int) -> None:
        """Count values; each byte of an array counts as one.

        Raises:
            CorruptCheckpointError: There are too many values.
        """
        self.value_count += values
        if self.value_count > self.max_values:
            raise CorruptCheckpointError(f"a pickle stands for more than {self.max_values} values", file=self.file)

    def replace_mapping(self, value: Mapping[Any, Any], depth: int) -> Any:
        """Rebuild a mapping of the same class."""
        members = {k: self.visit(v, depth) for k, v in value.items()}
        if type(value) is dict:
            return members
        if type(value) is collections.defaultdict:
            return collections.defaultdict(value.default_factory, members)
        same: Any = type(value)
        return copy_module_metadata(value, same(members))
