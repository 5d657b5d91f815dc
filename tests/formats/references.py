"""torch_xla's references, which stand in a rank file for tensors in files of their own. torch_xla need not be there."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from tests.xla import HAS_XLA

HOME = "torch_xla.utils.serialization"


class _Reference:
    """Has what torch_xla's has."""

    def __init__(self, tid: int) -> None:
        self.tid = tid


_Reference.__module__, _Reference.__name__, _Reference.__qualname__ = HOME, "TensorReference", "TensorReference"


def tensor_reference() -> Any:
    """The class: torch_xla's own, where it is installed."""
    if not HAS_XLA:
        return _Reference
    from torch_xla.utils.serialization import TensorReference

    return TensorReference


def opened(file: Path) -> Any:
    """What torch loads; references to other files as they are."""
    with torch.serialization.safe_globals([(tensor_reference(), f"{HOME}.TensorReference")]):
        return torch.load(file, weights_only=True)


def whole(file: Path) -> Any:
    """A rank file with its tensors in it, by neuronx-distributed's rules; `torch_xla` does the same, more slowly."""

    def inner(value: Any) -> Any:
        if isinstance(value, tensor_reference()):
            return opened(file.with_name(file.name + ".tensors") / f"tensor_{value.tid}.pt")
        if isinstance(value, dict):
            return {k: inner(v) for k, v in value.items()}
        return [inner(v) for v in value] if isinstance(value, list) else value

    return inner(opened(file))


def save(value: Any, file: Path) -> None:
    """`torch.save` of a value with references: pickle looks for a class in the module that the class names."""
    modules: dict[str, ModuleType] = {}
    if not HAS_XLA:
        for name in ("torch_xla", "torch_xla.utils", HOME):
            modules[name] = ModuleType(name)
        vars(modules[HOME])["TensorReference"] = _Reference
    with mock.patch.dict(sys.modules, modules):
        torch.save(value, file)
