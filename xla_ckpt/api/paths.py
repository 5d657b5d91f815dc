"""Paths that callers give."""

from __future__ import annotations

import os

from xla_ckpt.errors import UsageError

PathLike = str | os.PathLike[str]


def directory_at(path: PathLike) -> str:
    """The absolute path of a directory on a file system.

    Raises:
        UsageError: It is the address of an object store, of which a local directory of that name would be made.
    """
    text = os.fspath(path)
    scheme, separator, _ = text.partition("://")
    if separator and scheme.isalnum():
        raise UsageError(
            "checkpoints are read from and written to file systems", expected="the path of a directory", found=text,
            hint="Mount the bucket, or copy the directory from and to it.",
        )  # fmt: skip
    return os.path.abspath(text)
