"""Arrays of which a checkpoint holds the values in another type: master weights that stand for weights, or a cast."""

from __future__ import annotations

from typing import Any

import numpy as np

from xla_ckpt.arrays.numpy_array import bytes_of_array
from xla_ckpt.dtypes import DType
from xla_ckpt.engine.numpy_types import numpy_dtype
from xla_ckpt.engine.target import ComposedTarget, Target
from xla_ckpt.snapshot.memory import Slabs


def can_cast(stored: DType, wanted: DType) -> bool:
    """Whether values of a type are rounded to another one: floating-point numbers, both of them."""
    return stored.floating and wanted.floating


def cast(target: Target, stored: DType) -> Target:
    """The same target for values of another stored type; they are rounded when they are installed."""
    source, into = numpy_dtype(stored), numpy_dtype(target.dtype)
    pairs: list[tuple[Any, memoryview]] = []

    def memory(slabs: Slabs) -> list[memoryview]:
        for box, place in zip(target.boxes, target.memory(slabs), strict=True):
            pairs.append((np.empty(box.size, source), place))
        return [bytes_of_array(values) for values, _ in pairs]

    def install() -> Any:
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):  # what is too large becomes infinite
            for values, place in pairs:
                if len(place):
                    place[:] = bytes_of_array(values.astype(into))
        return target.install()

    return ComposedTarget(
        dtype=stored,
        local=target.local,
        live=False,
        fill=memory,
        finish=install,
        lies=target.over,
    )
