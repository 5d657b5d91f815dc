"""Of which kind the file system is in which a directory lies, as Linux tells it."""

from __future__ import annotations

import os
import re

_MOUNTS = "/proc/self/mounts"

_ESCAPED = re.compile(r"\\(\d{3})")


def kind_of_file_system(path: str) -> str | None:
    """``ext4`` or ``nfs4``, for instance; None where the system has no list of what is mounted.

    >>> kind_of_file_system("/proc")
    'proc'
    """
    try:
        with open(_MOUNTS, "rb") as file:
            return _kind(os.fsdecode(file.read()), os.path.realpath(path))
    except FileNotFoundError:
        return None


def _kind(mounts: str, path: str) -> str | None:
    r"""The kind in a list of mounts (proc_pid_mounts(5)): of the longest place above a path, and of these the last.

    >>> _kind("a / ext4 rw 0 0\nb /mnt/my\\040disk nfs4 rw 0 0\nc /mnt tmpfs rw 0 0\n", "/mnt/my disk/runs")
    'nfs4'
    """
    kind, length = None, 0
    for line in mounts.splitlines():
        _, place, its_kind, *_ = line.split(" ")
        place = _ESCAPED.sub(lambda octal: chr(int(octal[1], 8)), place).rstrip("/") + "/"
        if f"{path}/".startswith(place) and len(place) >= length:
            kind, length = its_kind, len(place)
    return kind
