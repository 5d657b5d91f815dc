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
    """A process, and the machine on which it runs."""

    token: str
    """Unlike that of any other process, except those that it forks later."""

    host: str
    """Unlike that of any other machine, and of this one before it was started: containers of a machine have one."""

    node: str
    """Name of the machine, for people."""

    pid: int
    started: int
    """When it was started, in the system's own units: process ids are used again. 0 if nobody says."""

    user: str
    program: str
    """What it runs."""


@functools.cache
def _get_token() -> str:
    # Made when it is first asked for: the processes of a program that forks after its imports are not one job.
    return uuid.uuid4().hex


def get_process_identity() -> ProcessIdentity:
    """The process that asks."""
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
    """Whether a process of this machine is an ancestor or a descendant of this one.

    >>> is_related(os.getppid(), _read_process_stat(os.getppid())[1])
    True
    """
    me = os.getpid()
    if not started or _read_process_stat(pid)[1] != started:
        return False  # it has ended, or cannot be seen from this container
    return pid in _iterate_ancestors(me) or me in _iterate_ancestors(pid)


def get_env(name: str) -> str:
    """What an environment variable says, or nothing."""
    return os.environ.get(name, "")


def _get_host() -> str:
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read(64).strip()
    except OSError:
        return platform.node()  # not Linux, or a sandbox that hides it


def _get_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())  # containers run under numbers that have no name


def _iterate_ancestors(pid: int) -> Iterator[int]:
    """The processes above one; those that cannot be seen from here end it."""
    while pid > 0:
        yield pid
        pid = _read_process_stat(pid)[0]


def _read_process_stat(pid: int) -> tuple[int, int]:
    """(id of the parent, time of the start) of a process; (0, 0) if there is none, or nobody says."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read(4096).rpartition(b")")[2].split()  # the name before it may contain anything
        return int(fields[1]), int(fields[19])
    except (OSError, IndexError, ValueError):
        return 0, 0


_MOUNTS = "/proc/self/mounts"

_OCTAL_ESCAPE = re.compile(r"\\(\d{3})")


def get_file_system_type(path: str) -> str | None:
    """``ext4`` or ``nfs4``, for instance; None where the system has no list of what is mounted.

    >>> get_file_system_type("/proc")
    'proc'
    """
    try:
        with open(_MOUNTS, "rb") as file:
            return _parse_file_system_type(os.fsdecode(file.read()), os.path.realpath(path))
    except FileNotFoundError:
        return None


def _parse_file_system_type(mounts: str, path: str) -> str | None:
    r"""The kind in a list of mounts (proc_pid_mounts(5)): of the longest place above a path, and of these the last.

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
