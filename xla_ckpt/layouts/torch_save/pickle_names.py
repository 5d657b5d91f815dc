"""What stands for each name that a pickle may have: a function of this file, or a stand-in for objects of a class."""

from __future__ import annotations

import collections
import datetime
import decimal
import pathlib
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from xla_ckpt import dtypes
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.layouts.torch_save.stand_ins import (
    STORAGES,
    Buffer,
    Factory,
    Function,
    Namespace,
    NumpyArray,
    NumpyDType,
    Opaque,
    Reference,
    Storage,
    StorageType,
    TensorView,
    of_type,
    sizes_in,
)


def _view(storage: Any, offset: Any, size: Any, stride: Any, dtype: str | None) -> TensorView:
    shape, strides = sizes_in(size), sizes_in(stride)
    if not isinstance(storage, Storage) or dtype is None or len(shape) != len(strides):
        raise ValueError("a tensor without a storage, or of no type")
    dtypes.dtype(dtype)  # raises for a type that cannot be described
    return TensorView(storage=storage, dtype=dtype, offset=sizes_in([offset])[0], shape=shape, strides=strides)


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *others: Any) -> TensorView:
    _check_bits(*others[2:3])
    return _view(storage, offset, size, stride, getattr(storage, "dtype", None))


def _tensor_v3(storage: Any, offset: Any, size: Any, stride: Any, *others: Any) -> TensorView:
    _check_bits(*others[3:4])
    return _view(
        storage, offset, size, stride, str(of_type((torch.dtype, type, Opaque), others[2])).removeprefix("torch.")
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
    return make(*of_type(tuple, args))


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
    "torch.Tensor": Factory(None),
    "torch.nn.parameter.Parameter": Factory(None),
    "torch_xla.utils.serialization.TensorReference": Reference,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.storage.UntypedStorage": StorageType(None),
    "torch.UntypedStorage": StorageType(None),
    **{f"torch.{name}": StorageType(dtype) for name, dtype in STORAGES.items()},
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
