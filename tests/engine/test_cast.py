"""Rounding to another floating-point type, against torch."""

from __future__ import annotations

import itertools

import pytest
import torch

from xla_ckpt.core.dtypes import get_dtype
from xla_ckpt.loading.target import Cast

TYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def values(kind: torch.dtype) -> torch.Tensor:
    """All bit patterns of 16 bits; of wider types many, with the ties of narrower ones among them."""
    if kind.itemsize == 2:
        return torch.arange(-(2**15), 2**15).to(torch.int16).view(kind)
    torch.manual_seed(0)
    narrow = [values(k).to(kind) for k in (torch.float16, torch.bfloat16)]
    ties = [(v[:-1] + v[1:]) / 2 for v in narrow]
    near = [torch.nextafter(t, torch.full_like(t, s * torch.inf)) for t in ties for s in (1, -1)]
    drawn = torch.randint(-(2**31), 2**31, (1 << 16,)).to(torch.int32).view(torch.float32).to(kind)
    odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65519.0, 65520.0, 1e-8, 3.4e38], dtype=kind)
    return torch.cat([*narrow, *ties, *near, drawn, odd])


@pytest.mark.parametrize(("source", "target"), [p for p in itertools.product(TYPES, TYPES) if p[0] != p[1]])
def test_as_torch_rounds(source: torch.dtype, target: torch.dtype) -> None:
    held = values(source)
    cast = Cast(*(get_dtype(str(kind).removeprefix("torch.")) for kind in (source, target)))
    data = held.view(torch.uint8).numpy().tobytes()
    made = cast(memoryview(data))
    assert (len(made), cast.compute_stored_bytes(len(made))) == (held.numel() * target.itemsize, len(data))
    found, wanted = torch.frombuffer(bytearray(made), dtype=target), held.to(target)
    numbers = ~wanted.isnan()
    assert torch.equal(found.isnan(), wanted.isnan())  # which NaN it is differs
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[target.itemsize]
    assert torch.equal(found[numbers].view(integers), wanted[numbers].view(integers))
    assert not len(cast(memoryview(b"")))
