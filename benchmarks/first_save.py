"""What the start of the process in which orbax commits costs the program beside it, and the first commit after it.

    PJRT_DEVICE=CPU python benchmarks/first_save.py [--tensors 800]

One program: the stall of asynchronous saves, how late a thread that sleeps 1 ms gets its turn in the first save, and
that save's time, beside those of later ones; the memory of the program, and of the process.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Iterable

import psutil
import torch

import xla_ckpt

LATE = 0.005
"""Seconds by which a turn is late that counts as such."""


def save(root: str, tag: str, state: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Seconds for which the caller of an asynchronous save waits, and until it is committed."""
    began = time.perf_counter()
    handle = xla_ckpt.save_checkpoint(root, tag, state, async_save=True, options=xla_ckpt.SaveOptions(stale="ignore"))
    waited = time.perf_counter() - began
    handle.result()
    return waited, time.perf_counter() - began


def said(what: str, seconds: Iterable[float]) -> str:
    ms = sorted(1e3 * s for s in seconds)
    return f"{what}: median {statistics.median(ms):.1f} ms, longest {ms[-1]:.1f} ms, of {len(ms)}"


class Beat:
    """A thread that wants a turn each millisecond."""

    def __init__(self) -> None:
        self.late: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beats)

    def __enter__(self) -> Beat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _beats(self) -> None:
        last = time.perf_counter()
        while not self._ended.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            if now - last - 0.001 > LATE:
                self.late.append(now - last - 0.001)
            last = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=60, help="tensors of 16 KiB (default: %(default)s)")
    args = parser.parse_args()
    state = {f"layers.{i}.weight": torch.ones(64, 64) for i in range(args.tensors)}
    save("memory://first", "a", state)  # our own first imports
    with tempfile.TemporaryDirectory() as root:
        with Beat() as beat:
            stall, whole = save(root, "first", state)
        print(f"first save: {whole:.2f} s, of which the caller waited {1e3 * stall:.1f} ms")
        print(f"turns late by more than {1e3 * LATE:.0f} ms: {len(beat.late)}, in sum {sum(beat.late):.2f} s")
        later = [save(root, str(number), state) for number in range(20)]
        print(said("stall of later saves", (stall for stall, _ in later)))
        print(said("later saves", (whole for _, whole in later)))
        process = psutil.Process()
        for one in (process, *process.children()):
            print(f"memory of process {one.pid}: {one.memory_info().rss / 1e6:.0f} MB")
        xla_ckpt.finalize_checkpoint()


if __name__ == "__main__":
    main()
