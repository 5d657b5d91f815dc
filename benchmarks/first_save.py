"""What orbax's import in the background costs the program that it runs in, and the first commit after it.

    PJRT_DEVICE=CPU python benchmarks/first_save.py [--tensors 800]

One process: the stall of asynchronous saves before, during and after the import, the import's time and memory, and the
commit of the first save of a process.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import psutil
import torch

import xla_ckpt
from xla_ckpt.tags.orbax_import import ORBAX


def stall(state: dict[str, torch.Tensor]) -> float:
    """Seconds for which the caller of an asynchronous save waits; the save goes to memory, and needs no orbax."""
    began = time.perf_counter()
    handle = xla_ckpt.save_checkpoint("memory://stall", "a", state, async_save=True)
    waited = time.perf_counter() - began
    handle.result()
    return waited


def said(what: str, stalls: list[float]) -> str:
    ms = sorted(1e3 * s for s in stalls)
    return f"stall {what}: median {statistics.median(ms):.1f} ms, longest {ms[-1]:.1f} ms, of {len(ms)} saves"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=60, help="tensors of 16 KiB (default: %(default)s)")
    args = parser.parse_args()
    state = {f"layers.{i}.weight": torch.ones(64, 64) for i in range(args.tensors)}
    process = psutil.Process()
    stall(state)  # our own first imports
    print(said("before the import", [stall(state) for _ in range(20)]))
    with tempfile.TemporaryDirectory() as root:
        before = process.memory_info().rss
        xla_ckpt.has_checkpoint(root)  # begins the import
        stalls = []
        while ORBAX.span is None:
            stalls.append(stall(state))
        print(said("during it", stalls))
        print(
            f"import: {ORBAX.span.ended - ORBAX.span.began:.2f} s, {(process.memory_info().rss - before) / 1e6:.0f} MB"
        )
        print(said("after it", [stall(state) for _ in range(20)]))
        for which in ("first", "second"):
            phases = xla_ckpt.save_checkpoint(root, which, state, async_save=True).result().phases
            print(f"{which} save: commit {phases['commit'].seconds:.3f} s, retention {phases['retain'].seconds:.3f} s")


if __name__ == "__main__":
    main()
