"""Element types by name, their sizes and safetensors codes, and the NumPy dtypes for them.

Names are those of torch (``bfloat16``, ``float8_e4m3fn``); JAX and NumPy use the same names wherever they have the
type. No framework is imported; NumPy dtypes that NumPy lacks come from ml_dtypes, which is imported when one is
needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.extras import get_install_hint


@dataclass(frozen=True, slots=True)
class DType:
    """One element type."""

    name: str
    """Its name, as torch spells it."""

    itemsize: int
    """Bytes of one element."""

    safetensors: str | None
    """Its code in a safetensors header; None where the format has none. Native payloads have raw ``U8`` then, and for
    codes that came later than the native layout (see `xla_ckpt.core.files.safetensors`)."""

    packed: bool = False
    """Whether an element is a byte with two values in it, for which numpy has no type."""

    @property
    def is_floating(self) -> bool:
        """Whether its values are floating-point numbers, one in each element."""
        return self.name.startswith(("float", "bfloat")) and not self.packed

    @property
    def is_integer(self) -> bool:
        """Whether its values are integers."""
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
        # JAX's (ml_dtypes) without a torch twin; sub-byte ones take a byte each in host memory.
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
"""The names of all of them."""

_BY_CODE = {d.safetensors: d for d in _DTYPES.values() if d.safetensors is not None}


def get_dtype(name: str) -> DType:
    """The element type called `name`.

    Raises:
        UnsupportedStateError: There is no such type here.

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
    """Whether `get_dtype(name)` would succeed."""
    return name in _DTYPES


def from_safetensors_code(code: str) -> DType | None:
    """The element type that safetensors calls `code`; None if it is not known here.

    >>> from_safetensors_code("BF16").name
    'bfloat16'
    """
    return _BY_CODE.get(code)


def to_numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Numpy's type of this name, from ml_dtypes for those that numpy does not know itself.

    Raises:
        UnsupportedStateError: It is a packed type, for which neither has one.
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
