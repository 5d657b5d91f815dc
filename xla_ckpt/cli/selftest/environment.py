"""Description of the machine, storage and package versions that a selftest ran with."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from urllib.parse import urlsplit

from xla_ckpt import __version__
from xla_ckpt.rendering.formatting import format_bytes
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.system_info import get_file_system_type

PACKAGES = ("torch", "torch_xla", "libneuronxla", "libtpu", "jax", "jaxlib", "orbax-checkpoint", "obstore", "numpy")
"""Packages that affect the results of a selftest, by their names on PyPI."""


def describe_environment(store: Store) -> dict[str, str]:
    """Return the machine, the storage, the package versions and the date, as text.

    The only address in it is the name of the S3 server in the environment, if one is set.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "machine": f"{os.cpu_count()} cores, {format_bytes(memory)} of memory, {platform.machine()}, "
        f"{platform.system()} {platform.release()}",
        "storage": _describe_storage(store),
        "versions": ", ".join([f"xla-ckpt {__version__}", f"Python {platform.python_version()}", *_list_versions()]),
    }


def _describe_storage(store: Store) -> str:
    if store.object_store is None:
        return get_file_system_type(store.path) or "a file system"
    place = store.object_store.locate_in_bucket("")
    return f"{place.scheme}://" + (f" at {urlsplit(place.endpoint).hostname}" if place.endpoint else "")


def _list_versions() -> list[str]:
    versions = []
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions.append(f"{package} {version(package)}")
    return versions
