"""Resolve a path or address to a store: local directory, ``file://``, ``memory://`` or bucket."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote

from xla_ckpt.errors import UsageError, wrap_os_errors
from xla_ckpt.storage.base import Store
from xla_ckpt.storage.local import LocalStore
from xla_ckpt.storage.local_file import check_encodable
from xla_ckpt.storage.schemes import SCHEMES

PathLike = str | os.PathLike[str]

_COLLAPSED_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/[^/]")
"""Pattern of an address such as ``s3://bucket`` after pathlib has collapsed its slashes."""


def _open_object_store(path: str) -> Store:
    from xla_ckpt.storage.remote import RemoteStore  # deferred, because obstore is only needed for buckets

    if not path.startswith("memory:"):
        return RemoteStore(path)
    from xla_ckpt.storage.memory import MEMORY_FILES

    return RemoteStore(path, MEMORY_FILES)


def _is_known_scheme(scheme: str) -> bool:
    """Return True if there is a store for addresses ``scheme://...``. A path without a scheme is a local path."""
    return scheme in SCHEMES or scheme == "memory"


def open_store(path: PathLike) -> Store:
    """Return the store for a local path or an address such as ``s3://bucket/runs``.

    Raises:
        UsageError: The address has an unsupported scheme. (Without this check, a local directory with that name would
            be created.)

    >>> open_store("memory://a").path
    'memory://a'
    """
    text = normalize_path(path)
    return _open_object_store(text) if "://" in text else LocalStore(text)


def normalize_path(path: PathLike) -> str:
    """Return the absolute form of a path or address. Equal roots have equal results.

    Raises:
        UsageError: As `open_store`.
        StorageError: The path is relative and the working directory was removed.
    """
    try:
        text = os.fspath(path)
    except TypeError as error:
        raise UsageError(
            "this is no path of a directory",
            expected="a str or os.PathLike",
            found=type(path).__name__,
            hint="The order of the arguments is path, tag, and then what is saved or loaded.",
        ) from error
    if not isinstance(text, str):
        raise UsageError("a path is a str, not bytes", found=repr(text))
    if not text:
        raise UsageError(
            "the path of a directory is empty, which would be the directory that the program works in",
            expected="the path of a directory",
            found=repr(path),
            hint='To mean that directory, write ".".',
        )
    lost = _COLLAPSED_SCHEME.match(text)
    if lost and (isinstance(path, os.PathLike) or _is_known_scheme(lost.group(1))):
        raise UsageError(
            "pathlib makes one slash of the two in an address, so that this is a directory beside the program",
            expected=f"the address as a str, {text.replace(':/', '://', 1)!r}",
            found=repr(path),
            hint=f"A directory that has this name is {'./' + text!r}, as a str.",
        )
    if text.split("/")[0] == "~":
        # Otherwise a directory named "~" would be created in the working directory, and not be found from another one.
        raise UsageError(
            "only a shell takes ~ for the home directory",
            expected="the full path of a directory",
            found=text,
            hint=f"Give os.path.expanduser({text!r}); a directory that has this name is ./~.",
        )
    scheme, separator, location = text.partition("://")
    if not (separator and scheme.isalnum()):
        return make_absolute(text)
    if scheme == "file":
        return make_absolute(_parse_file_url(text, location))
    if not _is_known_scheme(scheme):
        raise UsageError(
            "no storage of this library has such an address",
            expected=f"the path of a directory, or {' or '.join(known.example for known in SCHEMES.values())}",
            found=text,
            hint="S3 stands for all servers that speak as it does: AWS_ENDPOINT_URL names theirs.",
        )
    if location.startswith("/") and scheme != "memory":  # otherwise the name of a folder would become the bucket
        raise UsageError("the address names no bucket", expected=SCHEMES[scheme].example, found=text)
    return f"{scheme}://{'/'.join(part for part in location.split('/') if part not in ('', '.'))}"


def make_absolute(path: str) -> str:
    """Return the absolute path of a file or directory.

    Raises:
        StorageError: The path is relative and the working directory was removed.
        UsageError: The path contains NUL, or characters that the file system encoding does not support.
    """
    check_encodable(path)
    with wrap_os_errors("asking which directory the program works in", path=path):
        return os.path.abspath(path)


def _parse_file_url(text: str, location: str) -> str:
    """Return the local path of a ``file://`` address."""
    if not location.startswith("/"):
        raise UsageError("a path behind file:// is that of this machine", expected="file:///path", found=text)
    return unquote(location)


def open_parent(path: PathLike) -> tuple[Store, str]:
    """Return the store that contains a directory or a file, and its name in that store.

    A path that is a symbolic link to a directory stands for its target, because replacing the directory must not
    replace the link. A link to a file stands for itself, since the name determines the contents of the file.

    Raises:
        UsageError: As `open_store`, or the path has no parent.
    """
    full = normalize_path(path)
    if "://" not in full and os.path.islink(full) and not os.path.isfile(full):
        full = os.path.realpath(full)
    parent, _, name = full.rpartition("/")
    if not name:
        raise UsageError("the path names all of a storage, not a directory in it", found=os.fspath(path))
    return open_store(f"{parent}/" if parent.endswith(":/") else parent or "/"), name


def open_working_directory() -> LocalStore | None:
    """Return the store of the working directory, or None if it was removed."""
    try:
        return LocalStore(os.getcwd())
    except FileNotFoundError:
        return None


def is_working_directory(path: PathLike) -> bool:
    """Return True if a path is the working directory of this process, which would not follow an exchange of names."""
    here, full = open_working_directory(), normalize_path(path)
    return here is not None and "://" not in full and os.path.realpath(full) == here.resolve_address("")


def is_same_directory(one: Store, name: str, other: Store, its_name: str) -> bool:
    """Return True if two names in two stores refer to the same directory, after resolving links."""
    return one.resolve_address(name) == other.resolve_address(its_name)
