"""Packages that are installed with extras of this library, and the error where one is needed and is not there."""

from __future__ import annotations

import contextlib
import importlib.util
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
        MissingPackageError: It is not installed.
    """
    if not is_installed(package):
        raise _missing(package, what)


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
