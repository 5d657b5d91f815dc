"""Who this process is, as others on the same storage can be told, and which processes descend from which."""

from __future__ import annotations

import functools
import getpass
import os
import platform
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
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
def _token() -> str:
    # Made when it is first asked for: the processes of a program that forks after its imports are not one job.
    return uuid.uuid4().hex


def this_process() -> Process:
    """The process that asks."""
    pid = os.getpid()
    return Process(
        token=_token(),
        host=_host(),
        node=platform.node(),
        pid=pid,
        started=_status(pid)[1],
        user=_user(),
        program=" ".join(sys.argv)[:200],
    )


def is_kin(pid: int, started: int) -> bool:
    """Whether a process of this machine is an ancestor or a descendant of this one.

    >>> is_kin(os.getppid(), _status(os.getppid())[1])
    True
    """
    me = os.getpid()
    if not started or _status(pid)[1] != started:
        return False  # it has ended, or cannot be seen from this container
    return pid in _ancestors(me) or me in _ancestors(pid)


def setting(name: str) -> str:
    """What an environment variable says, or nothing."""
    return os.environ.get(name, "")


def _host() -> str:
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read(64).strip()
    except OSError:
        return platform.node()  # not Linux, or a sandbox that hides it


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())  # containers run under numbers that have no name


def _ancestors(pid: int) -> Iterator[int]:
    """The processes above one; those that cannot be seen from here end it."""
    while pid > 0:
        yield pid
        pid = _status(pid)[0]


def _status(pid: int) -> tuple[int, int]:
    """(id of the parent, time of the start) of a process; (0, 0) if there is none, or nobody says."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read(4096).rpartition(b")")[2].split()  # the name before it may contain anything
        return int(fields[1]), int(fields[19])
    except (OSError, IndexError, ValueError):
        return 0, 0
