"""Element types as numpy has them."""

from __future__ import annotations

from typing import Any

import numpy as np

from xla_ckpt.dtypes import DType
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.extras import how_to_install


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Numpy's type of this name, from ml_dtypes for those that numpy does not know itself.

    Raises:
        UnsupportedStateError: It is a packed type, for which neither has one.
    """
    if dtype.packed:
        hint = f"torch has one. {how_to_install('torch')}"
        raise UnsupportedStateError("numpy has no type for such elements", found=dtype.name, hint=hint)
    try:
        return np.dtype(dtype.name)
    except TypeError:
        import ml_dtypes

        extension_type: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype.name))
        return extension_type
