"""What stands for each name that a pickle may have: a function of this file, or a stand-in for objects of a class."""

from __future__ import annotations

import collections
import datetime
import decimal
import inspect
import pathlib
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from xla_ckpt import dtypes
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.layouts.torch_save.stand_ins import (
    META,
    QUANTIZED,
    STORAGES,
    Buffer,
    Factory,
    Function,
    Namespace,
    NestedBuffer,
    NumpyArray,
    NumpyDType,
    Opaque,
    Reference,
    Storage,
    StorageType,
    TensorParts,
    TensorView,
    of_type,
    sizes_in,
)

Tensor = TensorView | TensorParts | NestedBuffer
"""What a function of this file makes of a tensor."""


def _view(storage: Any, offset: Any, size: Any, stride: Any, dtype: str | None) -> TensorView:
    shape, strides = sizes_in(size), sizes_in(stride)
    if not isinstance(storage, Storage) or dtype is None or len(shape) != len(strides):
        raise ValueError("a tensor without a storage, or of no type")
    dtypes.dtype(dtype)  # raises for a type that cannot be described
    return TensorView(storage=storage, dtype=dtype, offset=sizes_in([offset])[0], shape=shape, strides=strides)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *others: Any) -> Tensor:
    return _with_bits(_view(storage, offset, size, stride, getattr(storage, "dtype", None)), *others[2:3])


def _tensor_v3(storage: Any, offset: Any, size: Any, stride: Any, *others: Any) -> Tensor:
    dtype = str(of_type((torch.dtype, type, Opaque), others[2])).removeprefix("torch.")
    if dtype == "complex32" and not any(others[3:4]):  # two halves each, as `torch.view_as_real` has them
        start, shape, strides = sizes_in([offset])[0], sizes_in(size), sizes_in(stride)
        halves = _view(storage, 2 * start, (*shape, 2), (*(2 * step for step in strides), 1), "float16")
        return TensorParts("torch:complex32", {"parts": halves}, None)
    return _with_bits(_view(storage, offset, size, stride, dtype), *others[3:4])


def _with_bits(view: TensorView, bits: Any = None) -> Tensor:
    """A tensor with the bits that torch saves with it: its values are those that are stored, conjugated or negated."""
    names = {name for name, is_set in of_type((dict, type(None)), bits or {}).items() if is_set}
    if not names:
        return view
    if len(names) > 1 or not names <= {"conj", "neg"}:
        raise UnsupportedStateError(
            f"a tensor is stored lazily: {', '.join(sorted(map(str, names)))}",
            hint="Save what its resolve_conj() and resolve_neg() return.",
        )
    return TensorParts(f"torch:{names.pop()}", {"stored": view}, None)


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _of_device(data: Any, dtype: Any, *_: Any) -> Any:
    """A tensor of a device without storages, such as XLA's: what it was in host memory."""
    if isinstance(data, TensorView) and str(of_type(torch.dtype, dtype)).removeprefix("torch.") != data.dtype:
        raise UnsupportedStateError(
            f"a tensor is stored as {data.dtype}, and stands for one of {str(dtype).removeprefix('torch.')}",
            hint="Load it with torch.load, and save it anew.",
        )
    return data


def _jagged(members: Any) -> TensorParts:
    given = of_type(dict, members)
    tensors = {name: given[name] for name in ("values", "offsets", "lengths") if given.get(name) is not None}
    return _parts("torch:jagged", tensors, {"ragged": sizes_in([given["_ragged_idx"]])[0]})


def _with_attributes(make: Any, kind: Any, args: Any, *_: Any) -> Any:
    """A tensor that had attributes. They are left out."""
    make = inspect.unwrap(make.make) if isinstance(make, Function) else make
    if make not in _MAKING_TENSORS or not isinstance(kind, Factory):
        raise ValueError("a tensor of a class of its own")
    return make(*of_type(tuple, args))


def _parts(kind: str, members: Mapping[str, Any], about: Any) -> TensorParts:
    """A tensor that consists of several.

    Raises:
        UnsupportedStateError: One of them is no plain tensor.
    """
    if not all(isinstance(member, TensorView) for member in members.values()):
        raise UnsupportedStateError(f"a tensor of the kind {kind} consists of other than plain tensors")
    return TensorParts(kind, members, about)


_COMPRESSED = {
    "sparse_csr": ("crow_indices", "col_indices"),
    "sparse_csc": ("ccol_indices", "row_indices"),
    "sparse_bsr": ("crow_indices", "col_indices"),
    "sparse_bsc": ("ccol_indices", "row_indices"),
}


def _sparse(layout: Any, data: Any) -> TensorParts:
    name, data = of_type(str, layout).removeprefix("torch."), of_type(tuple, data)
    if name == "sparse_coo":
        indices, values, size, *coalesced = data
        about = {"size": [*sizes_in(size)], "coalesced": of_type(bool, coalesced[0]) if coalesced else False}
        return _parts("torch:sparse_coo", {"indices": indices, "values": values}, about)
    first, second = _COMPRESSED[name]
    compressed, plain, values, size = data
    return _parts(f"torch:{name}", {first: compressed, second: plain, "values": values}, {"size": [*sizes_in(size)]})


_INTEGERS = {"qint8": "int8", "quint8": "uint8", "qint32": "int32"}
"""Type of quantized numbers -> that of the integers which are stored."""


def _quantized(storage: Any, offset: Any, size: Any, stride: Any, how: Any, *_: Any) -> TensorParts:
    if isinstance(storage, Opaque) or getattr(storage, "dtype", None) not in _INTEGERS:
        raise UnsupportedStateError("a tensor is quantized to numbers of less than a byte, or of no known type")
    scheme, *parameters = of_type(tuple, how)
    values = _view(storage, offset, size, stride, _INTEGERS[storage.dtype])
    about = {"dtype": getattr(torch, storage.dtype)}
    if of_type(Factory, scheme).kind is torch.per_tensor_affine:
        scale, zero_point = parameters
        about |= {"scale": of_type((float, int), scale), "zero_point": of_type(int, zero_point)}
        return _parts("torch:per_tensor", {"values": values}, about)
    scales, zero_points, axis = parameters
    if getattr(zero_points, "dtype", "int64") != "int64":
        raise UnsupportedStateError("a tensor is quantized with zero points that are no integers")
    members = {"values": values, "scales": scales, "zero_points": zero_points}
    return _parts("torch:per_channel", members, {**about, "axis": sizes_in([axis])[0]})


def _nested(*views: Any) -> NestedBuffer:
    buffer, sizes, strides, offsets = views
    if not all(isinstance(view, TensorView) for view in views):
        raise UnsupportedStateError("a nested tensor consists of other than plain tensors")
    return NestedBuffer(buffer, sizes, strides, offsets)


def _meta(dtype: Any, size: Any, stride: Any, *_: Any) -> TensorParts:
    about = {"dtype": of_type(torch.dtype, dtype), "size": sizes_in(size), "stride": sizes_in(stride)}
    return TensorParts(META, {}, about)


_MAKING_TENSORS = (_tensor, _tensor_v3, _parameter, _of_device, _jagged, _sparse, _quantized, _nested, _meta)


def _size(values: Any = ()) -> torch.Size:
    return torch.Size(sizes_in(values))


def _device(kind: Any, index: Any = None) -> torch.device:
    of_type(str, kind)
    return torch.device(f"{kind}:{of_type(int, index)}" if index is not None else kind)


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ValueError("bytes in an encoding that pickle does not use")
    return bytes(of_type(str, text), "latin1")


def _bytearray(data: Any = b"", encoding: Any = "latin1") -> bytearray:
    return bytearray(_encode(data, encoding) if isinstance(data, str) else of_type(bytes, data))


def _defaultdict(factory: Any = None, *_: Any) -> Any:
    return collections.defaultdict(factory.kind if isinstance(factory, Factory) else of_type(type(None), factory))


def _scalar(dtype: Any, data: Any) -> Any:
    return np.frombuffer(of_type(bytes, data), np.dtype(of_type(NumpyDType, dtype).text))[0]


_LIST = (list, tuple)

NAMES_IN_PICKLES: dict[str, Any] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _with_attributes,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _of_device,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch.serialization._get_layout": lambda name: of_type(str, name),
    "torch._utils._rebuild_qtensor": _quantized,
    "torch.per_tensor_affine": Factory(torch.per_tensor_affine),
    "torch.per_channel_affine": Factory(torch.per_channel_affine),
    "torch._utils._rebuild_nested_tensor": _nested,
    "torch.nested._internal.nested_tensor._rebuild_njt": _jagged,
    "torch.nested._internal.nested_tensor.NestedTensor": Factory(None),
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch.Tensor": Factory(None),
    "torch.nn.parameter.Parameter": Factory(None),
    "torch_xla.utils.serialization.TensorReference": Reference,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.storage.UntypedStorage": StorageType(None),
    "torch.UntypedStorage": StorageType(None),
    **{f"torch.{name}": StorageType(dtype) for name, dtype in (STORAGES | QUANTIZED).items()},
    "collections.OrderedDict": lambda items=(): collections.OrderedDict(of_type((*_LIST, dict), items)),
    "collections.defaultdict": _defaultdict,
    "collections.Counter": lambda held=(): collections.Counter(of_type(dict, held or {})),
    "collections.deque": lambda items=(), maxlen=None: collections.deque(of_type(_LIST, items), maxlen),
    "_codecs.encode": _encode,
    "_io.BytesIO": Buffer,
    "builtins.set": lambda items=(): set(of_type(_LIST, items)),
    "builtins.frozenset": lambda items=(): frozenset(of_type(_LIST, items)),
    "builtins.bytearray": _bytearray,
    "builtins.bytes": lambda data=b"": bytes(of_type((bytes, *_LIST), data)),
    "builtins.complex": complex,
    "builtins.slice": slice,
    **{f"builtins.{t.__name__}": Factory(t) for t in (int, float, str, bool, list, dict, tuple)},
    "datetime.datetime": datetime.datetime,
    "datetime.date": datetime.date,
    "datetime.time": datetime.time,
    "datetime.timedelta": datetime.timedelta,
    "datetime.timezone": datetime.timezone,
    "decimal.Decimal": lambda text: decimal.Decimal(of_type(str, text)),
    "argparse.Namespace": Namespace,
    "types.SimpleNamespace": types.SimpleNamespace,
    "pathlib.PosixPath": lambda *parts: pathlib.Path(*(of_type(str, p) for p in parts)),
    "pathlib._local.PosixPath": lambda *parts: pathlib.Path(*(of_type(str, p) for p in parts)),
    "numpy.dtype": NumpyDType,
    "numpy.ndarray": Factory(None),
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy.core.multiarray._reconstruct": NumpyArray,
    "numpy._core.multiarray._reconstruct": NumpyArray,
}
"""Name in a pickle -> what stands for it here. Nothing else that a pickle names is ever looked up."""
