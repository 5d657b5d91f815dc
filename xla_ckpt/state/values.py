"""Codecs for plain values of numpy, the standard library, torch and jax in a state.

The pure core encodes Python's own values; this module adds the kinds that belong to a framework or to the operating
system, and values that are split into several arrays.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import datetime
import enum
import importlib
import io
import pathlib
import re
import sys
import types
import zoneinfo
from typing import Any

import ml_dtypes
import numpy as np

from xla_ckpt import pickled_objects
from xla_ckpt.arrays import plain_object, pytree
from xla_ckpt.arrays.torch_objects import is_torch_installed, is_torch_loaded, is_torch_tensor
from xla_ckpt.core.tree import schema
from xla_ckpt.core.tree.flatten import NAMESPACE_CLASSES, ResolveClass
from xla_ckpt.core.tree.nested import to_dicts_and_lists
from xla_ckpt.core.tree.skeleton import SplitValue
from xla_ckpt.core.tree.values import Composite, Json, ValueCodec, ValueKind, find_scalar_base
from xla_ckpt.errors import FormatError, IncompatibleCheckpointError, UntrustedObjectError
from xla_ckpt.extras import get_install_hint


def _create_numpy_scalar_kind(kind: type) -> ValueKind:
    name = f"numpy.{np.dtype(kind).name}"
    return ValueKind(name, kind, lambda v: v.tobytes().hex(), lambda j: np.frombuffer(bytes.fromhex(j), kind)[0])


def _encode_dtype(value: np.dtype[Any]) -> Json:
    """Encode a dtype as ``<f4``, or by name if that string would mean another dtype (ml_dtypes)."""
    try:
        return value.str if np.dtype(value.str) == value else value.name
    except TypeError:
        return value.name


def _encode_sized_scalar(value: Any) -> Json:
    """Encode numpy strings, bytes and times: scalars whose dtype has parameters."""
    return [value.dtype.str, value.tobytes().hex()]


def _decode_sized_scalar(json: Json) -> Any:
    dtype = np.dtype(json[0])
    data = bytes.fromhex(json[1])
    return np.frombuffer(data, dtype)[0] if dtype.itemsize else np.zeros(1, dtype)[0]


def _encode_array(value: Any) -> Json:
    """Encode numpy arrays that are not array leaves: strings, times, records, foreign byte order. Not objects."""
    if value.dtype.hasobject:
        return NotImplemented
    description = value.dtype.str if value.dtype.names is None else np.lib.format.dtype_to_descr(value.dtype)
    return [to_dicts_and_lists(description), list(value.shape), base64.b64encode(value.tobytes()).decode()]


def _convert_to_tuples(description: Json) -> Any:
    """Convert the description of a record dtype to a list of tuples, whose last item may be a shape or a
    description.
    """
    if not isinstance(description, list):
        return description
    return [
        tuple(
            _convert_to_tuples(p) if i == 1 else (tuple(p) if isinstance(p, list) else p) for i, p in enumerate(field)
        )
        for field in description
    ]


def _decode_array(json: Json) -> Any:
    dtype = np.lib.format.descr_to_dtype(
        _convert_to_tuples(json[0])
    )  # np.dtype would name the padding between two fields
    if dtype.hasobject:
        raise FormatError("an array of objects cannot be stored like this")
    data = base64.b64decode(json[2], validate=True)
    return np.frombuffer(bytearray(data), dtype).reshape(json[1]) if dtype.itemsize else np.zeros(json[1], dtype)


def _encode_record(value: Any) -> Json:
    """Encode a void scalar: raw bytes, or a record with fields."""
    return _encode_array(np.asarray(value))


def _decode_records(json: Json) -> Any:
    return _decode_array(json).view(np.recarray)


_ZONE_NAME = re.compile(r"[A-Za-z0-9_+-]{1,32}(/[A-Za-z0-9_+-]{1,32}){0,3}")
"""Names of time zones. Other names could be paths of other files."""


def _encode_zone(value: zoneinfo.ZoneInfo) -> Json:
    return value.key if value.key is not None and _ZONE_NAME.fullmatch(value.key) else NotImplemented


def _decode_zone(name: Json) -> zoneinfo.ZoneInfo:
    if not _ZONE_NAME.fullmatch(name):
        raise FormatError("this is no name of a time zone")
    try:
        return zoneinfo.ZoneInfo(name)
    except zoneinfo.ZoneInfoNotFoundError as error:
        raise IncompatibleCheckpointError(
            f"the checkpoint holds a time in the zone {name}, which this machine does not know",
            hint="Install the system's tzdata, or the package of this name.",
        ) from error


def _encode_zoned_time(value: Any) -> Json:
    """Encode a datetime or time with a named zone as the naive time and the name."""
    zone = _encode_zone(value.tzinfo) if type(value.tzinfo) is zoneinfo.ZoneInfo else NotImplemented
    return zone if zone is NotImplemented else [value.replace(tzinfo=None).isoformat(), value.fold, zone]


def _create_zoned_time_kind(kind: Any) -> ValueKind:
    return ValueKind(
        f"{kind.__name__}_in_zone",
        kind,
        _encode_zoned_time,
        lambda j: kind.fromisoformat(j[0]).replace(fold=j[1], tzinfo=_decode_zone(j[2])),
    )


def _encode_buffer(value: io.BytesIO) -> Json:
    """Encode an in-memory file as its bytes and its position. Not a closed one."""
    return NotImplemented if value.closed else [base64.b64encode(value.getbuffer()).decode(), value.tell()]


def _decode_buffer(json: Json) -> io.BytesIO:
    data, position = json
    buffer = io.BytesIO(base64.b64decode(data, validate=True))
    buffer.seek(position)
    return buffer


_SCALARS = (
    np.bool_,
    np.int8,
    np.int16,
    np.int32,
    np.int64,
    np.uint8,
    np.uint16,
    np.uint32,
    np.uint64,
    np.float16,
    np.float32,
    np.float64,
    np.complex64,
    np.complex128,
    np.longdouble,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
)

_DTYPE_CLASSES = {type(np.dtype(s)) for s in (*_SCALARS, np.str_, np.bytes_, np.datetime64, np.timedelta64)}

BASE_KINDS: tuple[ValueKind, ...] = (
    ValueKind("BytesIO", io.BytesIO, _encode_buffer, _decode_buffer),
    *(ValueKind(k.__name__, k, str, k) for k in (pathlib.PurePosixPath, pathlib.PureWindowsPath)),
    ValueKind("Path", type(pathlib.Path()), str, pathlib.Path),
    *(_create_numpy_scalar_kind(kind) for kind in _SCALARS),
    *(
        ValueKind(f"numpy.{k.__name__}", k, _encode_sized_scalar, _decode_sized_scalar)
        for k in (np.str_, np.bytes_, np.datetime64, np.timedelta64)
    ),
    *(ValueKind("numpy.dtype", k, _encode_dtype, np.dtype) for k in _DTYPE_CLASSES),
    ValueKind("numpy.ndarray", np.ndarray, _encode_array, _decode_array),
    ValueKind("numpy.void", np.void, _encode_record, lambda j: _decode_array(j)[()]),
    ValueKind("numpy.record", np.record, _encode_record, lambda j: _decode_records(j)[()]),
    ValueKind("numpy.recarray", np.recarray, _encode_array, _decode_records),
    ValueKind("ZoneInfo", zoneinfo.ZoneInfo, _encode_zone, _decode_zone),
    *(_create_zoned_time_kind(kind) for kind in (datetime.datetime, datetime.time)),
)

_TORCH_KIND_NAMES = (
    "dtype",
    "layout",
    "memory_format",
    "qscheme",
    "function",
    "torch.device",
    "torch.Size",
    "torch.Generator",
)
"""Names of the kinds of torch values, which are in a module that imports torch."""


def _load_torch_kinds(name: str | None) -> tuple[ValueKind, ...]:
    """Load the kinds of torch values; none if the program has not imported torch and no file needs them.

    Raises:
        IncompatibleCheckpointError: If a file needs them, and torch is not installed.
    """
    if name in _TORCH_KIND_NAMES:
        _check_torch_installed(f"a value of torch's ({name})")
    elif not is_torch_loaded():
        return ()
    from xla_ckpt.state.torch_values import TORCH_KINDS

    return TORCH_KINDS


def _check_torch_installed(description: str) -> None:
    if not is_torch_installed():
        raise IncompatibleCheckpointError(
            f"the checkpoint holds {description}, and torch is not installed here",
            hint=f"{get_install_hint('torch')} Or name what is wanted of the checkpoint: only that is read.",
        )


_PLAIN_CODEC = ValueCodec(BASE_KINDS, pytree.split_treedef, load_more_kinds=_load_torch_kinds)


def _split_value(value: Any) -> Composite | None:
    if is_torch_tensor(value):
        from xla_ckpt.arrays import composite_tensor

        return composite_tensor.split_value(value)
    return pytree.split_value(value, _PLAIN_CODEC)


def _find_composite_module(parts: Composite) -> Any:
    """Return the module that splits and composes values of a kind.

    Raises:
        IncompatibleCheckpointError: If they are tensors, and torch is not installed.
    """
    for kind in (pytree, plain_object):
        if kind.is_composite_name(parts.name):
            return kind
    _check_torch_installed(f"a tensor that consists of several ({parts.name})")
    from xla_ckpt.arrays import composite_tensor

    return composite_tensor


def _compose(parts: Composite, resolve: ResolveClass) -> Any:
    return _find_composite_module(parts).compose(parts, resolve)


def split_pattern(pattern: Any, stored: Json) -> SplitValue | None:
    """Split a pattern that jax splits (see `pytree.split_pattern`); None for any other.

    Raises:
        IncompatibleCheckpointError: If it does not fit the stored value.
    """
    return pytree.split_pattern(pattern, stored, CODEC, _PLAIN_CODEC)


def get_checked_members(parts: Composite, resolve: ResolveClass) -> Any:
    """Return the members of a value, after checking that its class is available to compose it.

    Raises:
        IncompatibleCheckpointError: If the class is missing.
        UntrustedObjectError: If its module is not imported.
    """
    _find_composite_module(parts).resolve_composite_class(parts, resolve)
    return parts.members


CODEC = ValueCodec(BASE_KINDS, _split_value, _compose, load_more_kinds=_load_torch_kinds)
"""Codec for the plain values of a PyTorch program, its composite tensors, and values that jax splits."""

_OBJECT_CODEC = ValueCodec(
    BASE_KINDS, _split_value, _compose, lambda value, _: plain_object.split_attributes(value), _load_torch_kinds
)


def _split_object(value: Any, path: str) -> Composite | None:
    return (
        plain_object.split_value(value, _OBJECT_CODEC)
        if schema.parse_leaf_path(path).role is schema.LeafRole.STATE
        else None
    )


OBJECT_SPLITTING_CODEC = ValueCodec(BASE_KINDS, _split_value, _compose, _split_object, _load_torch_kinds)
"""Like `CODEC`, with objects of plain classes in the state of an optimizer. Other objects are pickled, because no
other program can read them."""


def create_class_resolver(trust: bool) -> Any:
    """Return a function that finds the namedtuple, dataclass, enum or tensor class that a skeleton names.

    Without `trust`, only classes of modules that the program has imported itself are found, because importing a module
    that a file names would run code. No constructor is called in either case, except `__tensor_unflatten__` of tensors.

    The function raises IncompatibleCheckpointError for a missing class. It is not treated as corruption, because a load
    would fall back to an older tag, with older weights.
    """

    def resolve(name: str, base: type) -> Any:
        module, _, path = name.partition(":")
        if name in NAMESPACE_CLASSES:
            return {"argparse:Namespace": argparse.Namespace, "types:SimpleNamespace": types.SimpleNamespace}[name]
        if module not in sys.modules:
            if not trust:
                raise UntrustedObjectError(
                    f"the checkpoint holds a value of the class {path} of the module {module}, which is not imported",
                    hint=f"Import {module} before loading, or pass trust_pickle=True (--trust-pickle).",
                )
            with pickled_objects.wrap_missing_classes():
                importlib.import_module(module)
        value = plain_object.find_imported(module, path)
        if not (isinstance(value, type) and _is_expected_class(value, base)):
            raise IncompatibleCheckpointError(
                f"the checkpoint holds a value of the class {path} of {module}, which has changed or is gone",
                expected=_EXPECTED_CLASSES.get(base, "a subclass of torch.Tensor with __tensor_unflatten__"),
                found="nothing of this name" if value is None else str(value),
                hint=_suggest_class_fix(module, path),
            )
        return value

    return resolve


def _suggest_class_fix(module: str, path: str) -> str:
    """Suggest a fix for a class that a module does not have."""
    if module == "__main__":
        return (
            f"The script that saved is another one. Define {path} in this one, too; or define it in a module that both "
            "import, before the save."
        )
    return f"Give {module} a class of this name and kind again, before the load."


_EXPECTED_CLASSES = {
    tuple: "a namedtuple",
    int: "an enum",
    float: "a class that extends a plain type",
    object: "a dataclass",
    type: "a class",
}


def _is_expected_class(kind: type, base: type) -> bool:
    if base is tuple:
        return issubclass(kind, tuple) and hasattr(kind, "_fields")
    if base not in _EXPECTED_CLASSES:  # a tensor
        return issubclass(kind, base) and hasattr(kind, "__tensor_unflatten__")
    if base is type:  # registered with jax, which is asked
        return True
    if base is float:
        return find_scalar_base(kind) is not None
    return issubclass(kind, enum.Enum) if base is int else dataclasses.is_dataclass(kind)
