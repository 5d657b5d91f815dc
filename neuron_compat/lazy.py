"""Packages whose names are loaded when they are first used (PEP 562), so that importing them costs nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def lazily(
    package: str, homes: Mapping[str, Iterable[str]], submodules: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__``.

    Args:
        package: Its ``__name__``.
        homes: Module, relative to the package -> the names that the package has from it.
        submodules: Modules that are names of the package without having been imported.

    >>> load, names = lazily("neuron_compat.nxd", {"parallel_layers.groups": ["rank_groups"]}, ["trainer"])
    >>> load("rank_groups").__name__, "trainer" in names()
    ('rank_groups', True)
    """
    home_of = {name: home for home, names in homes.items() for name in names}
    known = {*home_of, *submodules}

    def load(name: str) -> Any:
        if name not in known:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if name not in home_of:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(f"{package}.{home_of[name]}"), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *known})

    return load, names
