"""Optional packages: check if they are installed, and raise an error that names the extra to install."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterator

from xla_ckpt.errors import MissingPackageError

PACKAGE_EXTRAS = {
    "torch": "torch",
    "torch_xla": "xla",
    "jax": "jax",
    "orbax": "orbax",
    "tensorstore": "orbax",
    "obstore": "objects",
}
"""Package -> extra that installs it."""

MIN_VERSIONS = {"orbax": ("orbax-checkpoint", "0.12.5")}
"""Package -> its distribution and the oldest version that works.

pip enforces this, but an image may contain an older version and a clone of this library.
"""

_INSTALLED: set[str] = set()
"""Packages that can be imported. Looking up a package takes 0.1 ms, and each save does so while its caller waits."""


def get_install_hint(package: str) -> str:
    """Return the hint for a package that is not installed.

    >>> get_install_hint("obstore")
    "Install it: pip install 'xla-ckpt[objects]'."
    """
    return f"Install it: pip install 'xla-ckpt[{PACKAGE_EXTRAS[package]}]'."


def is_installed(package: str) -> bool:
    """Return True if a package can be imported, without importing it."""
    if package in sys.modules:
        return sys.modules[package] is not None
    if package not in _INSTALLED and importlib.util.find_spec(package) is not None:
        _INSTALLED.add(package)
    return package in _INSTALLED


def check_installed(package: str, feature: str) -> None:
    """Raise an error if a package that a feature needs is not installed.

    Raises:
        MissingPackageError: The package is not installed, or is too old.
    """
    if not is_installed(package):
        raise _make_missing_error(package, feature)
    if version := _find_outdated_version(package):
        distribution, oldest = MIN_VERSIONS[package]
        problem = f"{feature} needs {distribution} {oldest} or newer, and {version} is installed"
        raise MissingPackageError(problem, hint=get_install_hint(package))


@functools.cache
def _find_outdated_version(package: str) -> str | None:
    """Return the version of an installed package if it is too old; otherwise None."""
    if package not in MIN_VERSIONS:
        return None
    distribution, oldest = MIN_VERSIONS[package]
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:  # a copy that was not installed as a distribution
        return None
    return version if _parse_version(version) < _parse_version(oldest) else None


def _parse_version(version: str) -> list[int]:
    """Return the numbers of a version, which compare in version order.

    >>> _parse_version("0.12.5rc1") < _parse_version("0.13")
    True
    """
    return [int(number) for number in re.findall(r"\d+", version)]


@contextlib.contextmanager
def wrap_missing_packages(feature: str) -> Iterator[None]:
    """Raise a failed import of an optional package as an error that names the extra to install.

    Raises:
        MissingPackageError: A package that the block imports is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        # A missing module of an installed package is another problem.
        if package not in PACKAGE_EXTRAS or is_installed(package):
            raise
        raise _make_missing_error(package, feature) from error


def _make_missing_error(package: str, feature: str) -> MissingPackageError:
    return MissingPackageError(
        f"{feature} needs the package {package}, which is not installed", hint=get_install_hint(package)
    )
