"""Lazy exports of packages (PEP 562): names are loaded on first use, so that importing a package is cheap."""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import Any, NoReturn

from xla_ckpt.extras import wrap_missing_packages

LIBPYTHON_NOTE = (
    "torch_xla needs Python as a shared library. Debian and Ubuntu have it in the package libpython3.X, for instance "
    "`apt install libpython3.13`. Any other Python has it if it was built with --enable-shared."
)


def import_module(module: str) -> Any:
    """Import a module. If torch_xla fails because Python's shared library is missing, add a note to the error.

    Raises:
        xla_ckpt.MissingPackageError: It needs torch or torch_xla, which is not installed.

    >>> import_module("json.decoder").__name__
    'json.decoder'
    """
    try:
        with wrap_missing_packages(module):
            return importlib.import_module(module)
    except ImportError as error:
        if "libpython" in str(error):
            error.add_note(LIBPYTHON_NOTE)
        raise


def raise_unsupported(name: str, hint: str) -> NoReturn:
    """Raise the `xla_ckpt.UsageError` for an unsupported module or name of another library.

    Raises:
        xla_ckpt.UsageError: Always.
    """
    from xla_ckpt import UsageError

    raise UsageError(f"{name} is not there", hint=hint)


@dataclass(frozen=True)
class FallbackFinder(importlib.abc.MetaPathFinder):
    """Import finder for modules of some packages, by full name, that no other finder has found."""

    packages: tuple[str, ...]
    make_spec: Callable[[str], ModuleSpec | None]

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return self.make_spec(fullname) if f"{fullname}.".startswith(tuple(f"{p}." for p in self.packages)) else None

    def install(self) -> None:
        """Append the finder to `sys.meta_path`. Further calls have no effect."""
        if self not in sys.meta_path:
            sys.meta_path.append(self)


def select_missing_names(package: str, module: str, missing: Mapping[str, str]) -> dict[str, str]:
    """Return the unsupported names of a package that belong to one of its modules, relative to that module.

    >>> select_missing_names("a", "a.b", {"b.c": "do this", "b.d.e": "do that"})
    {'c': 'do this'}
    >>> select_missing_names("a", "a", {"f": "no"})
    {'f': 'no'}
    """
    own = f"{module}.".removeprefix(f"{package}.")
    names = {name.removeprefix(own): advice for name, advice in missing.items() if name.startswith(own)}
    return {name: advice for name, advice in names.items() if "." not in name}


def attach_lazy_names(
    package: str,
    exports: Mapping[str, str],
    submodules: Iterable[str] = (),
    missing: Mapping[str, str] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a package with lazy exports.

    Args:
        package: Its ``__name__``.
        exports: Module, in full or relative to the package -> the names that the package exports from it, separated by
            spaces.
        submodules: Modules that are importable as attributes of the package.
        missing: Unsupported name of neuronx-distributed -> what to use instead. Access to it raises
            `xla_ckpt.UsageError`. (``from package import name`` would hide the message of an AttributeError.)

    >>> exports = {"neuron_compat.groups": "find_rank_group list_rank_groups"}
    >>> load, names = attach_lazy_names("neuron_compat.nxd", exports, ["trainer"])
    >>> load("list_rank_groups").__name__, "trainer" in names()
    ('list_rank_groups', True)
    """
    home_of = {name: home for home, names in exports.items() for name in names.split()}
    known = {*home_of, *submodules}
    instead = missing or {}

    def load(name: str) -> Any:
        if name in instead:
            raise_unsupported(f"{package}.{name}", instead[name])
        if name not in known:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if name not in home_of:
            return import_module(f"{package}.{name}")
        home = home_of[name]
        return getattr(import_module(home if home.startswith("neuron_compat.") else f"{package}.{home}"), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *known})

    return load, names
