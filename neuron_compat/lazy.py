"""Packages whose names are loaded when they are first used (PEP 562), so that importing them costs nothing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

_instead: dict[str, str] = {}
"""Whole name of what is not there -> what to use instead."""


class _Absent(MetaPathFinder):
    """Is asked for modules that nobody else has found, and answers for those that are known not to be there."""

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        """Raise the error that says what to use instead; without one, nobody knows the module."""
        _refuse(fullname)
        return None


sys.meta_path.append(_Absent())


def _refuse(name: str) -> None:
    """Raise the error for a name that is known not to be there."""
    if name in _instead:
        from xla_ckpt import UsageError

        raise UsageError(f"{name} is not there", hint=_instead[name])


def lazily(
    package: str,
    homes: Mapping[str, Iterable[str]],
    submodules: Iterable[str] = (),
    missing: Mapping[str, str] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__``.

    Args:
        package: Its ``__name__``.
        homes: Module, relative to the package -> the names that the package has from it.
        submodules: Modules that are names of the package without having been imported.
        missing: Name of neuronx-distributed's that is not there, of a module also -> what to use instead. To ask for
            one, or to import it, is a `xla_ckpt.UsageError`. (The message of an AttributeError would be lost in ``from
            package import name``.)

    >>> load, names = lazily("neuron_compat.nxd", {"parallel_layers.groups": ["rank_groups"]}, ["trainer"])
    >>> load("rank_groups").__name__, "trainer" in names()
    ('rank_groups', True)
    """
    home_of = {name: home for home, names in homes.items() for name in names}
    known = {*home_of, *submodules}
    _instead.update({f"{package}.{name}": hint for name, hint in (missing or {}).items()})

    def load(name: str) -> Any:
        _refuse(f"{package}.{name}")
        if name not in known:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if name not in home_of:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(f"{package}.{home_of[name]}"), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *known})

    return load, names
