"""Saves beside a training loop on an accelerator, and loads onto it, beside torch's own ways.

    python -m benchmarks.accelerator [--gb 4] [--rounds 3] [--dir DIR] > docs/measured/accelerators.md

`benchmarks.peers` is for CPUs and XLA, this for CUDA and whatever else torch.accelerator names. What is printed says
what was measured.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

import xla_ckpt

WIDTH = 4096
BATCH = 4096


@dataclass(frozen=True)
class Sample:
    """One save."""

    call: float
    """Seconds until the call returned."""
    lost: float
    """Seconds that the loop was late by."""
    durable: float
    """Seconds until the save had ended."""
    memory: int
    """Bytes of the device beyond what the loop takes."""


class Training:
    """A loop whose steps are waited for, so that each has a time."""

    def __init__(self, gb: float) -> None:
        device = torch.accelerator.current_accelerator(check_available=True)
        if device is None:
            raise SystemExit("torch sees no accelerator here; benchmarks.peers measures on CPUs and XLA")
        self.device = device
        layers = max(1, round(gb * 1e9 / (3 * 4 * WIDTH * (WIDTH + 1))))
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers))).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.batch = torch.rand(BATCH, WIDTH, device=self.device)

    def step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model(self.batch).float().square().mean()
        loss.backward()
        self.optimizer.step()
        torch.accelerator.synchronize()

    def pace(self, steps: int = 20) -> float:
        """Seconds of a step without a save."""
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        return (time.perf_counter() - began) / steps


Save = Callable[[Training, Path], Callable[[], bool]]
"""Begins a save of a loop in a new directory; what it returns says whether it has ended."""


def ours(mode: Any, budget: int = 1 << 30) -> Save:
    def save(training: Training, path: Path) -> Callable[[], bool]:
        options = xla_ckpt.SaveOptions(snapshot=mode, snapshot_budget=budget)
        handle = xla_ckpt.save_checkpoint(
            path, "a", training.model, training.optimizer, async_save=True, options=options
        )
        return handle.done

    return save


def dcp_async(training: Training, path: Path) -> Callable[[], bool]:
    model, optimizer = get_state_dict(training.model, training.optimizer)
    future: Any = async_save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    return lambda: bool(future.done())


def torch_save(training: Training, path: Path) -> Callable[[], bool]:
    path.mkdir()
    with open(path / "a.pt", "wb") as file:
        torch.save({"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    return lambda: True


def measure(training: Training, save: Save, path: Path) -> Sample:
    """Save, and train beside it."""
    pace = training.pace()
    torch.accelerator.synchronize()
    usual = torch.accelerator.max_memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    steps, durable, began = 0, 0.0, time.perf_counter()
    has_ended = save(training, path)
    call = time.perf_counter() - began
    while not durable or time.perf_counter() - began < durable + 1:
        training.step()
        steps += 1
        durable = durable or (has_ended() and time.perf_counter() - began)
    lost = time.perf_counter() - began - steps * pace
    more = torch.accelerator.max_memory_allocated() - usual
    return Sample(call, lost, durable, max(more, 0))


def load_ours(training: Training, path: Path) -> None:
    xla_ckpt.load_checkpoint(path, "a", training.model, training.optimizer)


def load_dcp(training: Training, path: Path) -> None:
    model, optimizer = get_state_dict(training.model, training.optimizer)
    load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    set_state_dict(training.model, training.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def load_torch(training: Training, path: Path, *, mmap: bool) -> None:
    state = torch.load(path / "a.pt", map_location="cpu" if mmap else training.device, mmap=mmap)
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])


SAVES: dict[str, Save] = {
    '`snapshot="host"`': ours("host"),
    '`snapshot="device"`': ours("device"),
    '`snapshot="overlap"`, budget of 1 GiB': ours("overlap"),
    '`snapshot="overlap"`, budget of the state': ours("overlap", 1 << 50),
    "`dcp.async_save`": dcp_async,
    "`torch.save`, then fsync": torch_save,
}

LOADS: dict[str, tuple[Save, Callable[[Training, Path], None]]] = {
    "`load_checkpoint`": (ours("host"), load_ours),
    "`dcp.load`": (dcp_async, load_dcp),
    "`torch.load(map_location=device)`": (torch_save, functools.partial(load_torch, mmap=False)),
    "`torch.load(mmap=True)`, then a copy": (torch_save, functools.partial(load_torch, mmap=True)),
}


def measured_saves(training: Training, rounds: int, where: Path) -> dict[str, list[Sample]]:
    """All ways to save, in turns."""
    samples = {name: list[Sample]() for name in SAVES}
    for number in range(rounds + 1):
        for name, save in SAVES.items():
            path = where / f"save-{number}-{len(samples[name])}"
            samples[name].append(measure(training, save, path))
            shutil.rmtree(path)
    return samples


def measured_loads(training: Training, rounds: int, where: Path) -> dict[str, list[float]]:
    """Seconds of all ways to load, in turns. The files are in the page cache: each was read just before."""
    for number, (save, _) in enumerate(LOADS.values()):
        has_ended = save(training, where / f"load-{number}")
        while not has_ended():
            training.step()
    seconds = {name: list[float]() for name in LOADS}
    for _ in range(rounds + 1):
        for number, (name, (_, load_it)) in enumerate(LOADS.items()):
            path = where / f"load-{number}"
            for file in path.rglob("*"):
                if file.is_file():
                    file.read_bytes()
            began = time.perf_counter()
            load_it(training, path)
            torch.accelerator.synchronize()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4, help="GB of the state (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count (default: %(default)s)")
    parser.add_argument("--dir", help="where is saved; by default in a temporary directory")
    args = parser.parse_args()
    training = Training(args.gb)
    nbytes = 3 * sum(parameter.nbytes for parameter in training.model.parameters())
    training.pace()
    usual = training.pace()
    where = Path(tempfile.mkdtemp(dir=args.dir))
    try:
        saves = measured_saves(training, args.rounds, where)
        loads = measured_loads(training, args.rounds, where)
    finally:
        shutil.rmtree(where, ignore_errors=True)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else str(training.device)
    print(
        f"# Accelerators\n\nMade by `python -m benchmarks.accelerator --gb {args.gb:g} --rounds {args.rounds}` on "
        f"{name}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}, torch "
        f"{torch.__version__}. A stack of linear layers is trained with a fused AdamW: parameters and moments are "
        f"{nbytes / 1e9:.1f} GB, and a step takes {usual * 1e3:.1f} ms. The ways take turns; a number is the median of "
        f"all rounds but the first, here of {args.rounds}. Compare within this page only.\n\n"
        "## Saves\n\nThe loop goes on beside each save until it is durable, and a second longer. *Lost* is how much "
        "later it was than without the save, the call included. In the first save of a process, and the first that "
        "is larger, host memory is pinned.\n\n"
        "| | the call | the first call | the loop lost | durable after | more memory of the device |\n"
        "|---|---:|---:|---:|---:|---:|"
    )
    for name, (first, *others) in saves.items():
        call, lost, durable, memory = (
            statistics.median(getattr(sample, field) for sample in others)
            for field in ("call", "lost", "durable", "memory")
        )
        print(
            f"| {name} | {call * 1e3:.1f} ms | {first.call * 1e3:.1f} ms | {lost * 1e3:.0f} ms | {durable:.2f} s | "
            f"{memory / 1e6:.0f} MB |"
        )
    print(
        "\n## Loads\n\nInto the live model and its optimizer, from files in the page cache.\n\n"
        "| | seconds | GB/s |\n|---|---:|---:|"
    )
    for name, (_, *rest) in loads.items():
        took = statistics.median(rest)
        print(f"| {name} | {took:.2f} | {nbytes / took / 1e9:.2f} |")


if __name__ == "__main__":
    main()
