"""Codecs for plain torch values: dtypes, devices, sizes, CPU generators, scheduler functions. Imports torch."""

from __future__ import annotations

import base64
import types
from typing import Any

import torch
from torch.optim.swa_utils import SWALR

from xla_ckpt.core.tree.values import Json, ValueKind
from xla_ckpt.errors import FormatError


def _create_constant_kind(kind: type) -> ValueKind:
    """Create a kind for values that are attributes of torch, by name: torch.float32, torch.strided, ..."""

    def decode(json: Json) -> Any:
        constant = getattr(torch, json)
        if type(constant) is not kind:
            raise FormatError(f"torch.{json} is no {kind.__name__}")
        return constant

    return ValueKind(kind.__name__, kind, lambda v: str(v).removeprefix("torch."), decode)


def _encode_generator(value: torch.Generator) -> Json:
    """Encode a CPU generator. A device generator is not portable."""
    if value.device.type != "cpu":
        return NotImplemented
    return base64.b64encode(value.get_state().numpy().tobytes()).decode()


def _decode_generator(json: Json) -> torch.Generator:
    state = bytearray(base64.b64decode(json, validate=True))
    generator = torch.Generator()
    generator.set_state(torch.frombuffer(state, dtype=torch.uint8))
    return generator


_FUNCTIONS = {
    f"{kind.__module__}.{kind.__qualname__}.{name}": function
    for kind, name in ((SWALR, "_cosine_anneal"), (SWALR, "_linear_anneal"))
    if (function := getattr(kind, name, None)) is not None
}
"""Functions of torch that schedulers have in their state. A file can only name these."""


def _encode_function(value: Any) -> Json:
    return next((name for name, function in _FUNCTIONS.items() if function is value), NotImplemented)


TORCH_KINDS: tuple[ValueKind, ...] = (
    *(_create_constant_kind(kind) for kind in (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)),
    ValueKind("function", types.FunctionType, _encode_function, _FUNCTIONS.__getitem__),
    ValueKind("torch.device", torch.device, str, torch.device),
    ValueKind("torch.Size", torch.Size, list, torch.Size),
    ValueKind("torch.Generator", torch.Generator, _encode_generator, _decode_generator),
)
