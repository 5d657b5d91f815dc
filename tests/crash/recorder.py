"""The calls that change files below one directory, as a process makes them; and one of them made to fail.

`shim.c` stands between a process and its C library (LD_PRELOAD), so it sees what Python, ctypes and C++ do alike, in
all threads, in the order in which it happens. It is compiled when it is needed. `strace -e inject` could do the same,
but it counts calls thread by thread, and makes each of them slower.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")


class Kind(IntEnum):
    """What happens at a call; the numbers are those of shim.c."""

    NOTHING = 0
    KILL_BEFORE = 1
    KILL_AFTER = 2
    FAIL = 3
    SHORT = 4


@dataclass(frozen=True)
class Fault:
    """What happens at which call."""

    position: int = -1
    """Number of the call, over all threads of the process; -1 is none."""

    kind: Kind = Kind.NOTHING
    error: int = 0
    """errno of a call that fails."""

    stays: bool = False
    """Whether all later calls fail, too: the disk stays full, or is gone. (A full disk still lets files be removed.)"""


@dataclass(frozen=True)
class Record:
    """A call that a process made."""

    rank: int
    number: int
    """-1 for a mark, whose text is `path`."""

    call: str
    inode: int
    """Of the file or directory, after the call; 0 if there is none."""

    offset: int
    size: int
    """Bytes that were to be written, or the new size."""

    result: int
    error: int
    path: str
    other: str
    """The new name, of a rename or a link."""

    data: bytes
    """What was written."""


def why_not() -> str | None:
    """Why calls cannot be recorded here; None if they can."""
    if not sys.platform.startswith("linux"):
        return "the calls of a process are seen on Linux only"
    return None if shutil.which("cc") else "there is no C compiler (cc) for tests/crash/shim.c"


def compiled(folder: Path) -> Path:
    """The shim as a library, compiled into a folder."""
    library = folder / "shim.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(library), str(SOURCE)]
    subprocess.run([*command, "-ldl", "-lpthread"], check=True, capture_output=True, text=True)
    return library


def run_with_shim(module: str, arguments: Sequence[str], env: Mapping[str, str]) -> int:
    """Run a Python module in a process that has the shim; its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        library = compiled(Path(folder))
        return subprocess.run(
            [sys.executable, "-m", module, *arguments],
            env={**env, "LD_PRELOAD": str(library), "CRASH_FSYNC": "0"}, check=False,
        ).returncode  # fmt: skip


class Recorder:
    """This process's shim."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        if not hasattr(self._library, "crash_arm"):
            raise RuntimeError("this process was not started with the shim")

    def arm(self, root: Path, log: Path, rank: int, fault: Fault) -> None:
        """Record from now on what changes below `root`, and have the fault happen."""
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        self._library.crash_arm(
            os.fsencode(root), self._log, rank, fault.position, int(fault.kind), fault.error, int(fault.stays)
        )

    def mark(self, text: str) -> None:
        """Write down that the program has got so far."""
        self._library.crash_mark(text.encode())

    def disarm(self) -> bool:
        """Record no more; whether the fault has happened."""
        return bool(self._library.crash_disarm())


def read_log(log: Path) -> list[Record]:
    """What was recorded. The last line may be of a process that was killed while it wrote it."""
    records = []
    for line in log.read_text().split("\n")[:-1] if log.exists() else ():
        rank, number, call, inode, offset, size, result, error, path, other, data = line.split("\t")
        numbers = (int(inode), int(offset), int(size), int(result), int(error))
        records.append(Record(int(rank), int(number), call, *numbers, path, other, bytes.fromhex(data)))
    return records
