"""Packages that are installed with extras of this library, and the error where one is needed and is not there."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterator

from xla_ckpt.errors import MissingPackageError

EXTRA_OF = {
    "torch": "torch",
    "torch_xla": "xla",
    "jax": "jax",
    "orbax": "orbax",
    "tensorstore": "orbax",
    "obstore": "objects",
}
"""Package -> the extra that installs it."""

OLDEST = {"orbax": ("orbax-checkpoint", "0.12.5")}
"""Package -> the name under which it is installed, and the oldest version that works.

pip sees to that, but a machine's image may have an older one, and the library be a clone beside it.
"""

_SEEN: set[str] = set()
"""Packages that can be imported. To look for one takes 0.1 ms, and each save asks while its caller waits."""


def how_to_install(package: str) -> str:
    """What to do where a package is needed, and is not there.

    >>> how_to_install("obstore")
    "Install it: pip install 'xla-ckpt[objects]'."
    """
    return f"Install it: pip install 'xla-ckpt[{EXTRA_OF[package]}]'."


def is_installed(package: str) -> bool:
    """Whether a package can be imported; it is not imported to find that out."""
    if package in sys.modules:
        return sys.modules[package] is not None
    if package not in _SEEN and importlib.util.find_spec(package) is not None:
        _SEEN.add(package)
    return package in _SEEN


def check_installed(package: str, what: str) -> None:
    """Refuse what cannot be done without a package.

    Raises:
        MissingPackageError: It is not installed, or is too old.
    """
    if not is_installed(package):
        raise _missing(package, what)
    if version := _too_old(package):
        distribution, oldest = OLDEST[package]
        problem = f"{what} needs {distribution} {oldest} or newer, and {version} is installed"
        raise MissingPackageError(problem, hint=how_to_install(package))


@functools.cache
def _too_old(package: str) -> str | None:
    """The version of an installed package, if it is older than those that work."""
    if package not in OLDEST:
        return None
    distribution, oldest = OLDEST[package]
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:  # a copy that nobody has installed
        return None
    return version if _numbers(version) < _numbers(oldest) else None


def _numbers(version: str) -> list[int]:
    """The numbers of a version, which are in the order of versions.

    >>> _numbers("0.12.5rc1") < _numbers("0.13")
    True
    """
    return [int(number) for number in re.findall(r"\d+", version)]


@contextlib.contextmanager
def naming_extras(what: str) -> Iterator[None]:
    """Around what imports packages of extras.

    Raises:
        MissingPackageError: One of them is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA_OF or is_installed(package):  # a module of its own that it lacks is another problem
            raise
        raise _missing(package, what) from error


def _missing(package: str, what: str) -> MissingPackageError:
    return MissingPackageError(
        f"{what} needs the package {package}, which is not installed", hint=how_to_install(package)
    )
