"""Numbers about the values of an array, of bytes that lie in memory in some pieces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xla_ckpt.dtypes import DType
from xla_ckpt.engine.numpy_types import numpy_dtype

BINS = 40
"""Bars of a histogram."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """Numbers about some values. Those of NaNs and infinities are counted alone; of complex values it is the size."""

    elements: int = 0
    nans: int = 0
    infinities: int = 0
    zeros: int = 0
    low: float = 0.0
    """The smallest finite value."""

    high: float = 0.0
    """The largest finite value."""

    mean: float = 0.0
    deviation: float = 0.0
    """Standard deviation."""

    norm: float = 0.0
    """L2 norm of the finite values."""

    counts: tuple[int, ...] = ()
    """How many finite values lie in each of as many equal parts of what lies between `low` and `high`."""


def statistics_of(pieces: Sequence[memoryview], dtype: DType) -> Statistics | None:
    """Numbers about the values in some pieces of memory, each of which is looked at twice; None if they are packed.

    >>> import numpy as np
    >>> values = np.array([0, 1, 3, np.nan], np.float32)
    >>> some = statistics_of([memoryview(values).cast("B")], DType("float32", 4, "F32"))
    >>> some.elements, some.nans, some.zeros, some.high, some.counts[0], some.counts[-1]
    (4, 1, 1, 3.0, 1, 1)
    """
    if dtype.packed:
        return None
    kind = numpy_dtype(dtype)
    elements = nans = infinities = zeros = count = 0
    low, high, total, squares = math.inf, -math.inf, 0.0, 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for piece in pieces:
            values = _values(piece, kind)
            finite = values[np.isfinite(values)]
            elements, count = elements + values.size, count + finite.size
            nans += int(np.isnan(values).sum())
            infinities += int(np.isinf(values).sum())
            zeros += int((finite == 0).sum())
            if finite.size:
                low, high = min(low, float(finite.min())), max(high, float(finite.max()))
                total, squares = total + float(finite.sum()), squares + float(np.square(finite).sum())
    if not count:
        return Statistics(elements=elements, nans=nans, infinities=infinities)
    counts = np.zeros(BINS, np.int64)
    for piece in pieces:
        values = _values(piece, kind)
        finite = values[np.isfinite(values)]
        # Halves, as the difference of two values that are finite may be infinite.
        width = high / 2 - low / 2
        places = (finite / 2 - low / 2) / width * BINS if width > 0 else np.zeros(finite.size)
        counts += np.bincount(np.clip(places.astype(np.int64), 0, BINS - 1), minlength=BINS)
    mean = total / count
    spread = squares / count - mean * mean
    return Statistics(
        elements=elements,
        nans=nans,
        infinities=infinities,
        zeros=zeros,
        low=low,
        high=high,
        mean=mean,
        deviation=math.sqrt(spread) if spread > 0 else 0.0,
        norm=math.sqrt(squares) if squares >= 0 else math.inf,
        counts=tuple(counts.tolist()),
    )


def _values(piece: memoryview, kind: np.dtype[Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    values = np.frombuffer(piece, kind)
    return np.abs(values).astype(np.float64) if kind.kind == "c" else values.astype(np.float64)
