"""Where the time goes that a training loop on the CPU loses while a save runs beside it.

    PJRT_DEVICE=CPU python -m benchmarks.loop [--threads 1] [--gb 1] [--saves 5]

Saves take turns: from huge pages, as the library writes, and from ordinary ones, as on a kernel that has no others.
docs/measured/profiles.md says what the columns are. Other programs on the machine are in the numbers.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import xla_ckpt
from benchmarks.peers.states import State

SIDE = 384
"""Rows and columns of the matrices that the loop multiplies: a step takes about a millisecond on one core."""

PR_SET_THP_DISABLE = 41
libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Window:
    """Some steps of the loop, one after the other."""

    steps: int
    wall: float
    """Seconds on the clock."""
    ran: float
    """Seconds for which the loop's thread was on a core."""
    queued: float
    """Seconds for which it could have run, and others had the core."""


class Loop:
    """A loop that multiplies matrices."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self._factors = torch.rand(SIDE, SIDE), torch.rand(SIDE, SIDE)

    def run(self, is_over: Callable[[float], bool]) -> Window:
        """Make steps until `is_over(seconds)`."""
        began, (ran, queued), steps = time.perf_counter(), _turns(), 0
        while steps == 0 or not is_over(time.perf_counter() - began):
            torch.mm(*self._factors)
            steps += 1
        wall, (ran_until, queued_until) = time.perf_counter() - began, _turns()
        return Window(steps, wall, ran_until - ran, queued_until - queued)


def _turns() -> tuple[float, float]:
    """Seconds for which this thread has run, and waited for a core, so far."""
    ran, queued, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return int(ran) / 1e9, int(queued) / 1e9


def _requests(device: int) -> int:
    """Requests to write that a disk has done so far."""
    name = f" {os.major(device)} {os.minor(device)} "
    for line in Path("/proc/diskstats").read_text().splitlines():
        if name in f" {' '.join(line.split())} ":
            return int(line.split()[7])
    raise SystemExit("the scratch directory is on no disk that /proc/diskstats knows")


def _huge_pages(*, on: bool) -> None:
    """Have new memory of this process made of huge pages where it asks for them, or never."""
    if libc.prctl(PR_SET_THP_DISABLE, int(not on), 0, 0, 0):
        raise SystemExit("this kernel has no huge pages")


def measure(loop: Loop, state: State, folder: Path, length: float) -> dict[str, float]:
    """One save beside the loop, and one alone; seconds."""
    before = loop.run(lambda passed: passed > length)
    requests = _requests(folder.stat().st_dev)
    handle = xla_ckpt.save_checkpoint(folder / "beside", "a", state.module, async_save=True)
    during = loop.run(lambda _: handle.done())
    requests = _requests(folder.stat().st_dev) - requests
    after = loop.run(lambda passed: passed > length)
    used, began = time.process_time(), time.perf_counter()
    xla_ckpt.save_checkpoint(folder / "alone", "a", state.module, async_save=True).result()
    alone, used = time.perf_counter() - began, time.process_time() - used
    steps = before.steps + after.steps
    return {
        "a save beside it": during.wall,
        "the loop loses": during.wall - during.steps * (before.wall + after.wall) / steps,
        "queued": during.queued,
        "slower on the core": during.ran - during.steps * (before.ran + after.ran) / steps,
        "asleep": during.wall - during.ran - during.queued,
        "a save alone": alone,
        "its processor time": used,
        "requests": requests,
    }


def main() -> None:
    """Print the medians as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=1, help="of the loop")
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--scratch", type=Path, default=None, help="directory on the disk to measure")
    args = parser.parse_args()
    state, loop, length = State("xla", args.gb), Loop(args.threads), 0.5
    measured: dict[str, list[dict[str, float]]] = {"huge pages": [], "ordinary pages": []}
    for number in range(args.saves + 1):
        for pages, found in measured.items():
            _huge_pages(on=pages == "huge pages")
            with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
                window = measure(loop, state, Path(folder), length)
            length = window["a save beside it"]
            if number > 0:  # the first save of a process starts another one
                found.append(window)
    names = list(measured["huge pages"][0])
    print(f"| medians of {args.saves} | " + " | ".join(names) + " |\n|---|" + "---:|" * len(names))
    for pages, found in measured.items():
        values = [statistics.median(window[name] for window in found) for name in names]
        print(
            f"| {pages} | " + " | ".join(f"{value:.3f}" if value < 100 else f"{value:.0f}" for value in values) + " |"
        )


if __name__ == "__main__":
    main()
