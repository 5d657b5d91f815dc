"""Arrays of which a checkpoint holds the values in another type: master weights that stand for weights, or a cast."""

from __future__ import annotations

from typing import Any

import torch

from xla_ckpt.arrays.torch_host import bytes_of, torch_dtype
from xla_ckpt.dtypes import DType
from xla_ckpt.engine.target import ComposedTarget, Target
from xla_ckpt.snapshot.memory import Slabs


def can_cast(stored: DType, wanted: DType) -> bool:
    """Whether values of a type are rounded to another one: floating-point numbers that torch knows, both of them."""
    return stored.floating and wanted.floating and None not in (torch_dtype(stored), torch_dtype(wanted))


def cast(target: Target, stored: DType) -> Target:
    """The same target for values of another stored type; they are rounded when they are installed."""
    source, into = torch_dtype(stored), torch_dtype(target.dtype)
    if source is None or into is None:
        return target
    pairs: list[tuple[torch.Tensor, memoryview]] = []

    def memory(slabs: Slabs) -> list[memoryview]:
        for box, place in zip(target.boxes, target.memory(slabs), strict=True):
            pairs.append((torch.empty(box.size, dtype=source), place))
        return [bytes_of(values) for values, _ in pairs]

    def install() -> Any:
        for values, place in pairs:
            rounded = values.to(into)  # `bytes_of` does not keep it alive
            if len(place):
                place[:] = bytes_of(rounded)
        return target.install()

    return ComposedTarget(
        dtype=stored,
        local=target.local,
        live=False,
        fill=memory,
        finish=install,
        lies=target.over,
    )
