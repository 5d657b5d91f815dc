"""Dtypes by name, with their sizes, safetensors codes and NumPy dtypes.

Names follow torch (``bfloat16``, ``float8_e4m3fn``). JAX and NumPy use the same names for the dtypes that they have. No
framework is imported. Dtypes that NumPy lacks come from ml_dtypes, which is imported on first use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.extras import get_install_hint


@dataclass(frozen=True, slots=True)
class DType:
    """One dtype."""

    name: str
    """Name, as in torch."""

    itemsize: int
    """Number of bytes per element."""

    safetensors: str | None
    """Code in a safetensors header, or None if the format has none. Native payloads use raw ``U8`` for these dtypes,
    and for codes that are newer than the native layout (see `xla_ckpt.core.files.safetensors`)."""

    packed: bool = False
    """True if an element is a byte that contains two values, which NumPy does not support."""

    @property
    def is_floating(self) -> bool:
        """True if each element is one floating-point number."""
        return self.name.startswith(("float", "bfloat")) and not self.packed

    @property
    def is_integer(self) -> bool:
        """True if the elements are integers."""
        return self.name.startswith(("int", "uint"))


_DTYPES = {
    d.name: d
    for d in (
        DType("bool", 1, "BOOL"),
        DType("uint8", 1, "U8"),
        DType("uint16", 2, "U16"),
        DType("uint32", 4, "U32"),
        DType("uint64", 8, "U64"),
        DType("int8", 1, "I8"),
        DType("int16", 2, "I16"),
        DType("int32", 4, "I32"),
        DType("int64", 8, "I64"),
        DType("float16", 2, "F16"),
        DType("bfloat16", 2, "BF16"),
        DType("float32", 4, "F32"),
        DType("float64", 8, "F64"),
        DType("complex64", 8, "C64"),
        DType("complex128", 16, None),
        DType("float8_e4m3fn", 1, "F8_E4M3"),
        DType("float8_e5m2", 1, "F8_E5M2"),
        DType("float8_e4m3fnuz", 1, "F8_E4M3FNUZ"),
        DType("float8_e5m2fnuz", 1, "F8_E5M2FNUZ"),
        DType("float8_e8m0fnu", 1, "F8_E8M0"),
        # Only in JAX (ml_dtypes), not in torch. Sub-byte dtypes use one byte per element in host memory.
        DType("float8_e4m3", 1, None),
        DType("float8_e3m4", 1, None),
        DType("float8_e4m3b11fnuz", 1, None),
        DType("float6_e2m3fn", 1, None),
        DType("float6_e3m2fn", 1, None),
        DType("float4_e2m1fn", 1, None),
        DType("int4", 1, None),
        DType("uint4", 1, None),
        DType("int2", 1, None),
        DType("uint2", 1, None),
        DType("float4_e2m1fn_x2", 1, "F4", packed=True),
    )
}

DTYPE_NAMES = tuple(_DTYPES)
"""Names of all dtypes."""

_BY_CODE = {d.safetensors: d for d in _DTYPES.values() if d.safetensors is not None}


def get_dtype(name: str) -> DType:
    """Return the dtype with this name.

    Raises:
        UnsupportedStateError: The name is unknown.

    >>> get_dtype("bfloat16").itemsize
    2
    """
    try:
        return _DTYPES[name]
    except KeyError:
        raise UnsupportedStateError(
            f"dtype {name!r} cannot be stored", hint=f"Known dtypes: {', '.join(sorted(_DTYPES))}."
        ) from None


def is_known_dtype(name: str) -> bool:
    """Return True if `get_dtype(name)` would succeed."""
    return name in _DTYPES


def from_safetensors_code(code: str) -> DType | None:
    """Return the dtype with this safetensors code, or None if it is unknown.

    >>> from_safetensors_code("BF16").name
    'bfloat16'
    """
    return _BY_CODE.get(code)


def to_numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the NumPy dtype, from ml_dtypes if NumPy does not have it.

    Raises:
        UnsupportedStateError: The dtype is packed, which neither supports.
    """
    if dtype.packed:
        hint = f"torch has one. {get_install_hint('torch')}"
        raise UnsupportedStateError("numpy has no type for such elements", found=dtype.name, hint=hint)
    try:
        return np.dtype(dtype.name)
    except TypeError:
        import ml_dtypes

        extension_type: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype.name))
        return extension_type
