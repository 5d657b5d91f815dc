"""Memory of the program that changes behind the back of a load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from xla_ckpt.state.load_plan import LoadPlan


def after_install(monkeypatch: pytest.MonkeyPatch, then: Callable[[Mapping[str, Any]], None]) -> None:
    """Have something happen when everything is installed; it is given the arrays by leaf path."""
    install = LoadPlan.install

    def broken(self: LoadPlan) -> Any:
        value = install(self)
        then(self.installed)
        return value

    monkeypatch.setattr(LoadPlan, "install", broken)


def broken_after(monkeypatch: pytest.MonkeyPatch, leaf: str, at: int) -> None:
    """Have an element of an array change when everything is installed."""

    def change(arrays: Mapping[str, Any]) -> None:
        array = arrays[leaf]
        flat = array.detach().reshape(-1) if isinstance(array, torch.Tensor) else array.reshape(-1)
        flat[at] += 1

    after_install(monkeypatch, change)
