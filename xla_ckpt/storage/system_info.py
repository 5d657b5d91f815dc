"""Identity of this process and machine, process ancestry, environment variables and file system type."""

from __future__ import annotations

import functools
import getpass
import os
import platform
import re
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """A process and its machine."""

    token: str
    """Unique id of the process, inherited by processes that it forks later."""

    host: str
    """Boot id of the machine, shared by its containers."""

    node: str
    """Host name, for display."""

    pid: int
    started: int
    """Start time in clock ticks since boot, because process ids are reused; 0 if unknown."""

    user: str
    program: str
    """Command line of the process."""


@functools.cache
def _get_token() -> str:
    # Created on first use: processes that a program forks after importing this module are not one job.
    return uuid.uuid4().hex


def get_process_identity() -> ProcessIdentity:
    """Return the identity of this process."""
    pid = os.getpid()
    return ProcessIdentity(
        token=_get_token(),
        host=_get_host(),
        node=platform.node(),
        pid=pid,
        started=_read_process_stat(pid)[1],
        user=_get_user(),
        program=" ".join(sys.argv)[:200],
    )


def is_related(pid: int, started: int) -> bool:
    """Return True if a process of this machine is an ancestor or a descendant of this one.

    >>> is_related(os.getppid(), _read_process_stat(os.getppid())[1])
    True
    """
    me = os.getpid()
    if not started or _read_process_stat(pid)[1] != started:
        return False  # it has exited, or is not visible in this container
    return pid in _iterate_ancestors(me) or me in _iterate_ancestors(pid)


def get_env(name: str) -> str:
    """Return the value of an environment variable, or an empty string."""
    return os.environ.get(name, "")


def _get_host() -> str:
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read(64).strip()
    except OSError:
        return platform.node()  # not Linux, or a sandbox that hides the file


def _get_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())  # containers run as user ids without a name


def _iterate_ancestors(pid: int) -> Iterator[int]:
    """Yield a process id and the ids of its visible ancestors."""
    while pid > 0:
        yield pid
        pid = _read_process_stat(pid)[0]


def _read_process_stat(pid: int) -> tuple[int, int]:
    """Return (parent id, start time) of a process, or (0, 0) if it does not exist or is not visible."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read(4096).rpartition(b")")[2].split()  # the name may contain anything
        return int(fields[1]), int(fields[19])
    except (OSError, IndexError, ValueError):
        return 0, 0


_MOUNTS = "/proc/self/mounts"

_OCTAL_ESCAPE = re.compile(r"\\(\d{3})")


def get_file_system_type(path: str) -> str | None:
    """Return the type of a file system, such as ``ext4`` or ``nfs4``, or None if the system has no list of mounts.

    >>> get_file_system_type("/proc")
    'proc'
    """
    try:
        with open(_MOUNTS, "rb") as file:
            return _parse_file_system_type(os.fsdecode(file.read()), os.path.realpath(path))
    except FileNotFoundError:
        return None


def _parse_file_system_type(mounts: str, path: str) -> str | None:
    r"""Return the type of the last mount with the longest mount point above a path (format: proc_pid_mounts(5)).

    >>> mounts = "a / ext4 rw 0 0\nb /mnt/my\\040disk nfs4 rw 0 0\nc /mnt tmpfs rw 0 0\n"
    >>> _parse_file_system_type(mounts, "/mnt/my disk/runs")
    'nfs4'
    """
    kind, length = None, 0
    for line in mounts.splitlines():
        _, place, its_kind, *_ = line.split(" ")
        place = _OCTAL_ESCAPE.sub(lambda octal: chr(int(octal[1], 8)), place).rstrip("/") + "/"
        if f"{path}/".startswith(place) and len(place) >= length:
            kind, length = its_kind, len(place)
    return kind
