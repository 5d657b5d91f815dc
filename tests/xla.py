"""torch_xla in the tests: whether it is there, and its device for the tests that run with and without it.

A test, a parameter or a module that needs it has the marker `xla`; conftest.py skips these where it is not installed.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

HAS_XLA = importlib.util.find_spec("torch_xla") is not None

MARKED = re.compile(r"^pytestmark = pytest\.mark\.xla$", re.MULTILINE)
IMPORTS = re.compile(r"^(import|from) torch_xla\b", re.MULTILINE)

DEVICES = ["cpu", pytest.param("xla", marks=pytest.mark.xla)]
"""The devices, as parameters of a test."""


def all_of_it_needs_xla(module: Path) -> bool:
    """Whether a test module says so; others, which have doctests at most, need it if they import it at their top."""
    needs = MARKED if module.name.startswith("test_") else IMPORTS
    return bool(needs.search(module.read_text()))


def begin() -> None:
    """Open the device, if there is one, before the first backward pass: autograd counts the devices only once."""
    if HAS_XLA:
        device()


def device() -> Any:
    """torch_xla's device."""
    import torch_xla

    return torch_xla.device()


def present() -> list[Any]:
    """The devices that a test does everything on: the CPU, and XLA's where it is."""
    return ["cpu", *([device()] if HAS_XLA else [])]


def sync() -> None:
    """End a step, on XLA's device; elsewhere it has ended."""
    if HAS_XLA:
        import torch_xla

        torch_xla.sync()
