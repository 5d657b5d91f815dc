"""The machine: its disk and caches, whether it is quiet, and how much memory a process took."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

import numpy as np

from benchmarks.peers.installed import PACKAGES, PEERS
from tests.runs import ROOT

_QUIET_DIRTY = 32 << 20
_POLL = 0.05


def files_below(directory: Path) -> list[Path]:
    """All files of a directory and its subdirectories."""
    return [path for path in directory.rglob("*") if path.is_file()]


def sync_files(directory: Path) -> None:
    """Have everything below on the disk: what makes a peer's save durable."""
    for path in [*files_below(directory), *(p for p in directory.rglob("*") if p.is_dir()), directory]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def evict(directory: Path) -> None:
    """Drop the files from the page cache."""
    for path in files_below(directory):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def warm(directory: Path) -> None:
    """Have the files in the page cache."""
    buffer = bytearray(8 << 20)
    for path in files_below(directory):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def stored_bytes(directory: Path) -> int:
    """How many bytes the files below have."""
    return sum(path.stat().st_size for path in files_below(directory))


class Peak:
    """How far the resident memory of this process rises above what it is now (bytes)."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
        self._before = _status("VmRSS")

    def rise(self) -> int:
        return max(0, _status("VmHWM") - self._before)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise ValueError(f"/proc/self/status has no {field}")


def settle(limit: float) -> bool:
    """Wait until the disk has nothing left to write and no other process runs; whether that came within `limit` s."""
    os.sync()
    over = time.monotonic() + limit
    still = 0
    while still < 3:
        if time.monotonic() > over:
            return False
        still = still + 1 if _is_quiet() else 0
        time.sleep(_POLL)  # between two looks at the condition
    return True


def _is_quiet() -> bool:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    waiting = sum(int(fields[name].split()[0]) << 10 for name in ("Dirty", "Writeback"))
    running = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("procs_running"))
    return waiting < _QUIET_DIRTY and int(running.split()[1]) <= 1  # this process is the one


def load_average() -> float:
    """The load of the last minute."""
    return os.getloadavg()[0]


def speed() -> str:
    """How fast it is now, by three things that take longer on a slow day; nothing else may run meanwhile."""
    began = time.perf_counter()
    for _ in range(1_000_000):
        pass
    loop, half = time.perf_counter() - began, 50 * 10**6
    began = time.perf_counter()
    fresh = np.zeros(2 * half, np.uint8)  # none of its pages is there yet
    fresh[:] = 1
    touched = (time.perf_counter() - began) * 1e9 / len(fresh)
    began = time.perf_counter()
    fresh[:half] = fresh[half:]
    copied = (time.perf_counter() - began) * 1e9 / half
    return (
        f"a million turns of an empty loop took {1e3 * loop:.0f} ms, filling fresh memory {touched:.2f} s a GB, "
        f"and copying into memory that is there {copied:.2f} s a GB"
    )


def description() -> str:
    """The machine and the packages that were measured."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    latest = [str(path) for path in (ROOT / ".venv-latest").glob("lib/python*/site-packages")]
    names = ("torch", "torch_xla", "orbax-checkpoint", "jax", "safetensors", "numpy")
    return (
        f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.machine()}, Linux {platform.release()}, CPU PJRT, "
        f"Python {platform.python_version()}; {_versions(names, sys.path)}; peers from the registry: "
        f"{_versions(PACKAGES, [str(PEERS)])}; the newest torch: {_versions(('torch',), latest)}"
    )


def _versions(names: Sequence[str], path: list[str]) -> str:
    installed = {name: next(iter(distributions(name=name, path=path)), None) for name in names}
    return ", ".join(f"{name} {found.version if found else 'missing'}" for name, found in installed.items())
