"""Arrays on their way into another floating-point type, rounded as torch rounds them: to the nearest, ties to even."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from xla_ckpt.dtypes import DType
from xla_ckpt.engine.numpy_types import numpy_dtype
from xla_ckpt.engine.target import ComposedTarget, Target
from xla_ckpt.snapshot.memory import Slabs

_AT_A_TIME = 1 << 20
"""Elements that are rounded in two steps at a time, through memory of their own."""


@dataclass(frozen=True, slots=True)
class Cast:
    """Makes elements of one floating-point type from elements of another."""

    stored: DType
    written: DType

    @property
    def memory(self) -> int:
        """Bytes in memory for each element, before and after."""
        return self.stored.itemsize + self.written.itemsize

    def stored_bytes(self, nbytes: int) -> int:
        """Bytes of the elements that make so many bytes."""
        return nbytes // self.written.itemsize * self.stored.itemsize

    def __call__(self, data: memoryview) -> memoryview:
        """The elements of the other type, as bytes."""
        source = np.frombuffer(data, numpy_dtype(self.stored))
        array = np.empty(source.size, numpy_dtype(self.written))
        # What is too large becomes infinite, as in torch. numpy would warn of it.
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            if self.stored.itemsize > 4 and self.written.itemsize < 4:
                # torch rounds a float64 to float32 first. That differs where the first step makes a tie.
                for at in range(0, source.size, _AT_A_TIME):
                    np.copyto(array[at : at + _AT_A_TIME], source[at : at + _AT_A_TIME].astype(np.float32), "unsafe")
            else:
                np.copyto(array, source, "unsafe")
        return array.view(np.uint8).data if array.nbytes else memoryview(b"")


def can_cast(stored: DType, wanted: DType) -> bool:
    """Whether values of a type are rounded to another one: floating-point numbers, both of them."""
    return stored.floating and wanted.floating


def cast(target: Target, stored: DType) -> Target:
    """The same target for values of another stored type; they are rounded when they are installed."""
    rounded = Cast(stored, target.dtype)
    pairs: list[tuple[memoryview, memoryview]] = []

    def memory(slabs: Slabs) -> list[memoryview]:
        for box, place in zip(target.boxes, target.memory(slabs), strict=True):
            pairs.append((np.empty(box.size * stored.itemsize, np.uint8).data, place))
        return [values for values, _ in pairs]

    def install() -> Any:
        for values, place in pairs:
            if len(place):
                place[:] = rounded(values)
        return target.install()

    return ComposedTarget(
        dtype=stored,
        local=target.local,
        live=False,
        fill=memory,
        finish=install,
        lies=target.over,
    )
