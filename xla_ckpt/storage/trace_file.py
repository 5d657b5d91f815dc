"""Where to write a trace: the file or directory given by the caller or by `XLA_CKPT_TRACE`."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from dataclasses import dataclass

from xla_ckpt.errors import UsageError
from xla_ckpt.storage.resolve import PathLike, make_absolute

TRACE_VARIABLE = "XLA_CKPT_TRACE"
"""Environment variable that names a directory: each call of each rank that names no other place leaves a file there."""

MAX_TAG_CHARS = 100
"""Characters of a tag in the name of a file, at most: names of files end at 255 bytes."""


@dataclass(frozen=True, slots=True)
class TraceFile:
    """The place of the trace of one call."""

    path: str
    is_directory: bool
    """Whether it is a directory, in which each call has a file of its own."""

    def write(self, data: bytes, *, operation: str, tag: str | None, rank: int, world_size: int) -> str:
        """Write a trace; the path of the file.

        In a directory the name has what was done, the tag and the rank, and a number if there is such a file. A file of
        a rank of a job has the rank before its ending. A file that the caller named is replaced.

        Raises:
            OSError: The storage refused.
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
    """Where the trace of a call goes: what the caller gives, else what the environment says, else nowhere.

    Raises:
        UsageError: What the caller gives is no path.
        StorageError: It is relative, and the directory that the program works in was removed.
    """
    if trace is None:
        named = os.environ.get(TRACE_VARIABLE)
        return TraceFile(make_absolute(named), is_directory=True) if named else None
    named = os.fspath(trace) if isinstance(trace, str | os.PathLike) else None
    if not isinstance(named, str):
        raise UsageError("trace= is the path of a file or of a directory", found=repr(trace))
    return TraceFile(make_absolute(named), is_directory=named.endswith(os.sep) or os.path.isdir(named))


def _sanitize_tag(tag: str | None) -> str:
    """A tag as a part of a name: a tag that is refused may have any characters.

    >>> _sanitize_tag("step_10"), _sanitize_tag("../a b"), _sanitize_tag(None)
    ('step_10', '.._a_b', 'newest')
    """
    return "newest" if tag is None else re.sub(r"[^\w.+-]", "_", str(tag))[:MAX_TAG_CHARS]
