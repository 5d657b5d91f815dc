"""Hypothesis strategies for the values of the pure core."""

from __future__ import annotations

import datetime
import math
from typing import Any

from hypothesis import strategies as st

from xla_ckpt.core import dtypes
from xla_ckpt.core.sharding.box import Box

shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
full_shapes = st.lists(st.integers(1, 9), max_size=4).map(tuple)
some_dtypes = st.sampled_from(
    ["bool", "uint8", "int16", "bfloat16", "float32", "int64", "complex128", "float8_e4m3fn"]
).map(dtypes.get_dtype)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...], empty: bool = False) -> Box:
    """A box inside of a whole of `shape`."""
    start, stop = [], []
    for n in shape:
        low = draw(st.integers(0, n if empty else max(n - 1, 0)))
        high = draw(st.integers(low if empty else min(low + 1, n), n))
        start.append(low)
        stop.append(high)
    return Box(tuple(start), tuple(stop))


@st.composite
def cuts_of(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Cut positions that make a grid of a whole of `shape` (every dim at least 1 long)."""
    cuts = []
    for n in shape:
        inner = draw(st.sets(st.integers(1, n - 1), max_size=4)) if n > 1 else set()
        cuts.append((0, *sorted(inner), n))
    return tuple(cuts)


plain_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary(max_size=20),
    st.binary(max_size=20).map(bytearray),
    st.dates(),
    st.datetimes(timezones=st.sampled_from([None, datetime.UTC])),
    st.timedeltas(),
    st.decimals(),
    st.fractions(),
    st.uuids(),
    st.just(...),
    st.builds(range, st.integers(-5, 5), st.integers(-5, 5), st.integers(1, 3)),
)
keys = st.one_of(
    st.text(max_size=6),
    st.integers(-3, 3),
    st.booleans(),
    st.none(),
    st.tuples(st.text(max_size=2), st.integers(0, 3)),
    st.sampled_from(["$array", "~", "/", "a/b", "~e", ""]),
)


class FakeArray:
    """Something that is an array because the tests say so."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"FakeArray({self.number})"


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(st.text(max_size=4), inner, max_size=4),
        st.sets(st.integers(), max_size=3),
        st.frozensets(st.text(max_size=3), max_size=3),
    )


trees = st.recursive(st.one_of(plain_scalars, st.integers(0, 99).map(FakeArray)), _containers, max_leaves=20)


def same(a: Any, b: Any) -> bool:
    """Equality of type and content, with NaN equal to itself and -0.0 different from 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(ka, kb) and same(va, vb) for (ka, va), (kb, vb) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if hasattr(a, "is_nan") and a.is_nan():
        return str(a) == str(b)
    return bool(a == b)
