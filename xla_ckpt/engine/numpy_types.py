"""Element types as numpy has them."""

from __future__ import annotations

from typing import Any

import numpy as np

from xla_ckpt.dtypes import DType


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Numpy's type of this name, from ml_dtypes for those that numpy does not know itself.

    Raises:
        TypeError: Neither knows it.
    """
    try:
        return np.dtype(dtype.name)
    except TypeError:
        import ml_dtypes

        extension_type: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype.name))
        return extension_type
