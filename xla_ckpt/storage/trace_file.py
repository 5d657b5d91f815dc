"""Path at which a trace is written: the file or directory given by the caller or by `XLA_CKPT_TRACE`."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from dataclasses import dataclass

from xla_ckpt.errors import UsageError
from xla_ckpt.storage.resolve import PathLike, make_absolute

TRACE_VARIABLE = "XLA_CKPT_TRACE"
"""Environment variable with a directory to which each call of each rank writes a trace, unless the caller gives a
path.
"""

MAX_TAG_CHARS = 100
"""Maximum number of characters of a tag in a file name, because file names are limited to 255 bytes."""


@dataclass(frozen=True, slots=True)
class TraceFile:
    """Path of the trace of one call."""

    path: str
    is_directory: bool
    """True if `path` is a directory, in which each call creates a file."""

    def write(self, data: bytes, *, operation: str, tag: str | None, rank: int, world_size: int) -> str:
        """Write a trace and return the path of the file.

        In a directory, the file name contains the operation, the tag and the rank, and a number if the file exists. For
        a file path, the rank is inserted before the suffix if the job has several ranks, and an existing file is
        replaced.

        Raises:
            OSError: The storage failed.
        """
        if self.is_directory:
            return self._write_new(data, f"{operation}-{_sanitize_tag(tag)}-rank{rank}")
        root, ending = os.path.splitext(self.path)
        path = self.path if world_size == 1 else f"{root}-rank{rank}{ending}"
        partial = f"{path}.partial"
        with open(partial, "wb") as file:
            file.write(data)
        os.replace(partial, path)
        return path

    def _write_new(self, data: bytes, name: str) -> str:
        os.makedirs(self.path, exist_ok=True)
        for number in itertools.count():
            path = os.path.join(self.path, f"{name}-{number}.json" if number else f"{name}.json")
            with contextlib.suppress(FileExistsError), open(path, "xb") as file:
                file.write(data)
                return path
        raise AssertionError("numbers do not end")


def resolve_trace_file(trace: PathLike | None) -> TraceFile | None:
    """Return the path of the trace of a call: from the caller, otherwise from the environment, otherwise None.

    Raises:
        UsageError: `trace` is not a path.
        StorageError: The path is relative and the working directory was removed.
    """
    if trace is None:
        named = os.environ.get(TRACE_VARIABLE)
        return TraceFile(make_absolute(named), is_directory=True) if named else None
    named = os.fspath(trace) if isinstance(trace, str | os.PathLike) else None
    if not isinstance(named, str):
        raise UsageError("trace= is the path of a file or of a directory", found=repr(trace))
    return TraceFile(make_absolute(named), is_directory=named.endswith(os.sep) or os.path.isdir(named))


def _sanitize_tag(tag: str | None) -> str:
    """Return a tag as part of a file name, replacing other characters, because an invalid tag may contain any.

    >>> _sanitize_tag("step_10"), _sanitize_tag("../a b"), _sanitize_tag(None)
    ('step_10', '.._a_b', 'newest')
    """
    return "newest" if tag is None else re.sub(r"[^\w.+-]", "_", str(tag))[:MAX_TAG_CHARS]
