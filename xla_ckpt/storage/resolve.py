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
"""What pathlib makes of the beginning of an address such as ``s3://bucket``."""


def _open_object_store(path: str) -> Store:
    from xla_ckpt.storage.remote import RemoteStore  # who has no bucket needs no obstore

    if not path.startswith("memory:"):
        return RemoteStore(path)
    from xla_ckpt.storage.memory import MEMORY_FILES

    return RemoteStore(path, MEMORY_FILES)


def _is_known_scheme(scheme: str) -> bool:
    """Whether there is a store for addresses ``scheme://...``; a path without a scheme is one of a file system."""
    return scheme in SCHEMES or scheme == "memory"


def open_store(path: PathLike) -> Store:
    """The root that a caller names: a path of a file system, or an address such as ``s3://bucket/runs``.

    Raises:
        UsageError: No storage of this library answers to such an address. (Without this check a local directory of
            that name would be made.)

    >>> open_store("memory://a").path
    'memory://a'
    """
    text = normalize_path(path)
    return _open_object_store(text) if "://" in text else LocalStore(text)


def normalize_path(path: PathLike) -> str:
    """The path of a root directory in its full form: two callers who mean the same one have equal strings.

    Raises:
        UsageError: As `open_store`.
        StorageError: The path is relative, and the directory that the program works in was removed.
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
        # Checkpoints in a directory of that name, wherever the program ran, are not found again.
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
    if location.startswith("/") and scheme != "memory":  # else the name of a folder would be that of the bucket
        raise UsageError("the address names no bucket", expected=SCHEMES[scheme].example, found=text)
    return f"{scheme}://{'/'.join(part for part in location.split('/') if part not in ('', '.'))}"


def make_absolute(path: str) -> str:
    """Return the full path of a file or directory.

    Raises:
        StorageError: The path is relative, and the directory that the program works in was removed.
        UsageError: The path has characters that the encoding of the file system lacks, or the character NUL.
    """
    check_encodable(path)
    with wrap_os_errors("asking which directory the program works in", path=path):
        return os.path.abspath(path)


def _parse_file_url(text: str, location: str) -> str:
    """The path that ``file://`` stands before."""
    if not location.startswith("/"):
        raise UsageError("a path behind file:// is that of this machine", expected="file:///path", found=text)
    return unquote(location)


def open_parent(path: PathLike) -> tuple[Store, str]:
    """The store in which a directory or a file lies, and its name there.

    A path that is a link stands for the directory that it leads to: who replaces that must not replace the link. A link
    to a file stands for itself, since the name says what is in the file.

    Raises:
        UsageError: As `open_store`.
    """
    full = normalize_path(path)
    if "://" not in full and os.path.islink(full) and not os.path.isfile(full):
        full = os.path.realpath(full)
    parent, _, name = full.rpartition("/")
    if not name:
        raise UsageError("the path names all of a storage, not a directory in it", found=os.fspath(path))
    return open_store(f"{parent}/" if parent.endswith(":/") else parent or "/"), name


def open_working_directory() -> LocalStore | None:
    """Return the directory in which this process works, or None if it was removed."""
    try:
        return LocalStore(os.getcwd())
    except FileNotFoundError:
        return None


def is_working_directory(path: PathLike) -> bool:
    """Whether a path is that of the directory in which this process works, which would not follow an exchange."""
    here, full = open_working_directory(), normalize_path(path)
    return here is not None and "://" not in full and os.path.realpath(full) == here.resolve_address("")


def is_same_directory(one: Store, name: str, other: Store, its_name: str) -> bool:
    """Whether two names in two stores are the same directory, links followed."""
    return one.resolve_address(name) == other.resolve_address(its_name)
