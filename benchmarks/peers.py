"""Our saves and loads beside the peers', on XLA tensors, in one interleaved run.

    python benchmarks/peers.py [--gb 1] [--rounds 5] [--write]        # or: make bench

Every measurement is a fresh process; the contenders take turns, so that a noisy minute hits all of them. Saves are
durable: the clock stops when every file has been fsync'ed. Loads end when every value has been read once on the device;
for cold ones the files are evicted from the page cache first. ``--write`` puts the table into docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MIB = 1 << 20


def shapes(gb: float) -> list[tuple[int, ...]]:
    """A state like a small language model with AdamW: mostly large matrices, some middling, many small."""
    large = max(1, round(gb * 1e9 / (64 * MIB) * 0.83))
    middling = max(1, round(gb * 1e9 / (4 * MIB) * 0.16))
    return [(4096, 4096)] * large + [(1024, 1024)] * middling + [(1024,)] * 30


def make(gb: float) -> Any:
    """A module on the XLA device, with everything computed."""
    import torch
    import torch_xla

    device = torch_xla.device()
    module = torch.nn.ParameterList(
        torch.nn.Parameter(torch.rand(s, device=device), requires_grad=False) for s in shapes(gb)
    )
    torch_xla.sync(wait=True)
    torch_xla._XLAC._xla_wait_device_ops([])
    return module


def sync_files(directory: Path) -> None:
    """fsync everything below: what makes a peer's save durable."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)


def evict(directory: Path) -> None:
    """Drop the files from the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def install(module: Any, values: Any) -> None:
    """Put host values into the live module, the way that costs a peer least: one batched transfer."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    host = [values[k] for k in module.state_dict()]
    for parameter, moved in zip(module.parameters(), xm.send_cpu_data_to_device(host, torch_xla.device()), strict=True):
        parameter.data = moved
    torch_xla._XLAC._xla_wait_device_ops([])


def touch(module: Any) -> None:
    """Read every value once: a loader that only maps a file has not loaded it."""
    import torch
    from torch_xla.utils.dlpack import to_dlpack

    for parameter in module.parameters():
        torch.utils.dlpack.from_dlpack(to_dlpack(parameter.detach())).sum()


# Savers: module, directory -> seconds that the caller waits. Durable when they return, or after sync_files.


def save_ours(module: Any, directory: Path) -> float:
    import orbax.checkpoint  # noqa: F401  # loaded once a process: its seconds are not those of a save

    import xla_ckpt

    began = time.perf_counter()
    xla_ckpt.save_checkpoint(directory, "a", model=module)
    return time.perf_counter() - began


def save_ours_async(module: Any, directory: Path) -> float:
    import orbax.checkpoint  # noqa: F401

    import xla_ckpt

    began = time.perf_counter()
    handle = xla_ckpt.save_checkpoint(directory, "a", model=module, async_save=True)
    stall = time.perf_counter() - began
    handle.result()
    return stall


def save_xm(module: Any, directory: Path) -> float:
    import torch_xla.core.xla_model as xm

    began = time.perf_counter()
    xm.save(module.state_dict(), str(directory / "f.pt"))
    return time.perf_counter() - began


def save_xser(module: Any, directory: Path) -> float:
    import torch_xla.utils.serialization as xser

    began = time.perf_counter()
    xser.save(module.state_dict(), str(directory / "f.pt"))
    return time.perf_counter() - began


def save_dcp(module: Any, directory: Path) -> float:
    import torch.distributed.checkpoint as dcp

    began = time.perf_counter()
    dcp.save(module.state_dict(), checkpoint_id=str(directory / "d"), no_dist=True)
    return time.perf_counter() - began


def save_nxd_async(module: Any, directory: Path) -> float:
    """neuronx-distributed's way: transfer everything, then write in a thread."""
    import threading

    import torch
    import torch_xla.core.xla_model as xm

    began = time.perf_counter()
    host = xm._maybe_convert_to_cpu(module.state_dict())
    thread = threading.Thread(target=torch.save, args=(host, directory / "f.pt"))
    thread.start()
    stall = time.perf_counter() - began
    thread.join()
    return stall


def save_raw(module: Any, directory: Path) -> float:
    """The limit: zero-copy views, written through O_DIRECT by three threads, no names, no digests."""
    import mmap
    import threading

    import numpy as np
    import torch
    from torch_xla.utils.dlpack import to_dlpack

    began = time.perf_counter()
    views = [torch.utils.dlpack.from_dlpack(to_dlpack(p.detach())).view(-1).view(torch.uint8).numpy()
             for p in module.parameters()]  # fmt: skip
    step = 8 * MIB
    pieces, at = [], 0
    for view in views:
        for i in range(0, len(view), step):
            pieces.append((view[i : i + step], at))
            at += -(-len(view[i : i + step]) // 4096) * 4096
    fd = os.open(directory / "raw", os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
    os.posix_fallocate(fd, 0, at)
    todo, lock = iter(pieces), threading.Lock()

    def write() -> None:
        buffer = mmap.mmap(-1, step)
        target = np.frombuffer(buffer, np.uint8)
        while True:
            with lock:
                piece = next(todo, None)
            if piece is None:
                return
            np.copyto(target[: len(piece[0])], piece[0])
            os.pwrite(fd, memoryview(buffer)[: -(-len(piece[0]) // 4096) * 4096], piece[1])

    threads = [threading.Thread(target=write) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    os.fsync(fd)
    os.close(fd)
    return time.perf_counter() - began


# Loaders: into a live module on the device, from what the saver of the same name left.


def load_ours(module: Any, directory: Path) -> None:
    import xla_ckpt

    xla_ckpt.load_checkpoint(directory, "a", model=module)


def load_xm(module: Any, directory: Path) -> None:
    import torch

    install(module, torch.load(directory / "f.pt"))


def load_xm_mapped(module: Any, directory: Path) -> None:
    import torch

    install(module, torch.load(directory / "f.pt", mmap=True))


def load_xser(module: Any, directory: Path) -> None:
    import torch_xla.utils.serialization as xser

    install(module, xser.load(str(directory / "f.pt")))


def load_dcp(module: Any, directory: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.load(module.state_dict(), checkpoint_id=str(directory / "d"), no_dist=True)


SAVE: dict[str, Callable[[Any, Path], float]] = {
    "raw limit": save_raw, "xla_ckpt": save_ours, "xser.save": save_xser, "xm.save": save_xm, "dcp.save": save_dcp,
}  # fmt: skip
STALL: dict[str, Callable[[Any, Path], float]] = {
    "xla_ckpt": save_ours_async,
    "transfer, then a thread": save_nxd_async,
}
LOAD: dict[str, tuple[Callable[[Any, Path], float], Callable[[Any, Path], None]]] = {
    "xla_ckpt": (save_ours, load_ours), "torch.load": (save_xm, load_xm),
    "torch.load (mmap=True)": (save_xm, load_xm_mapped), "xser.load": (save_xser, load_xser),
    "dcp.load": (save_dcp, load_dcp),
}  # fmt: skip


def measure(kind: str, name: str, gb: float, directory: Path) -> dict[str, float]:
    """One measurement; runs in a process of its own."""
    import psutil

    process = psutil.Process()
    module = make(gb)
    if kind in ("cold", "warm"):
        if name == "xla_ckpt":
            import xla_ckpt

            assert xla_ckpt.load_checkpoint  # its modules are loaded, as the peers' are
        began = time.perf_counter()
        LOAD[name][1](module, directory)
        touch(module)
        return {"seconds": time.perf_counter() - began}
    if kind == "prepare":
        LOAD[name][0](module, directory)
        sync_files(directory)
        return {"seconds": 0.0}
    if kind == "stall":
        seconds = []
        for i in range(3):  # the first one loads code; the later ones are what training feels
            (directory / str(i)).mkdir()
            seconds.append(STALL[name](module, directory / str(i)))
            shutil.rmtree(directory / str(i))
        return {"seconds": statistics.median(seconds[1:]), "first": seconds[0]}
    before = process.memory_info().rss
    seconds_ = SAVE[name](module, directory)
    began = time.perf_counter()
    sync_files(directory)
    seconds_ += time.perf_counter() - began
    return {"seconds": seconds_, "rss": process.memory_info().rss - before}


def run(kind: str, name: str, gb: float, scratch: Path) -> dict[str, float]:
    """One measurement in a fresh process."""
    directory = scratch / "files"
    if kind in ("cold", "warm"):
        directory = scratch / name
        if not directory.exists():
            directory.mkdir(parents=True)
            call("prepare", name, gb, directory)
        if kind == "cold":
            evict(directory)
        return call(kind, name, gb, directory)
    directory.mkdir(parents=True)
    try:
        return call(kind, name, gb, directory)
    finally:
        shutil.rmtree(directory)


def call(kind: str, name: str, gb: float, directory: Path) -> dict[str, float]:
    """Run `measure` in a fresh process."""
    done = subprocess.run(
        [sys.executable, __file__, "--measure", kind, name, "--gb", str(gb), "--scratch", str(directory)],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PJRT_DEVICE": "CPU", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{kind} {name} failed:\n{done.stderr[-3000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def table(results: dict[str, dict[str, list[dict[str, float]]]], gb: float) -> str:
    """The results as Markdown."""
    nbytes = sum(4 * __import__("math").prod(s) for s in shapes(gb))
    lines = []

    def section(title: str, kind: str, speed: bool) -> None:
        ours = statistics.median(r["seconds"] for r in results[kind]["xla_ckpt"])
        lines.extend(["", f"## {title}", "", "| | median | range | " + ("GB/s | " if speed else "") + "times ours |",
                      "|---|---:|---:|" + ("---:|" if speed else "") + "---:|"])  # fmt: skip
        for name, runs in sorted(results[kind].items(), key=lambda kv: statistics.median(r["seconds"] for r in kv[1])):
            seconds = [r["seconds"] for r in runs]
            mid = statistics.median(seconds)
            unit = (lambda s: f"{1000 * s:.1f} ms") if kind == "stall" else (lambda s: f"{s:.2f} s")
            rate = f"{nbytes / mid / 1e9:.2f} | " if speed else ""
            lines.append(
                f"| {name} | {unit(mid)} | {unit(min(seconds))} to {unit(max(seconds))} | {rate}{mid / ours:.2f} |"
            )

    section(f"Durable save of {nbytes / 1e9:.2f} GB of XLA tensors", "save", True)
    section("Stall of the caller in an asynchronous save (the second and third in a process)", "stall", False)
    section("Load into a live module on the device, from a cold page cache", "cold", True)
    section("The same from a warm page cache", "warm", True)
    return "\n".join(lines)


def versions() -> str:
    """What was measured with."""
    from importlib.metadata import version

    names = ("torch", "torch_xla", "orbax-checkpoint", "jax", "numpy")
    return ", ".join(f"{n} {version(n)}" for n in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scratch", type=Path, default=ROOT / "bench_run")
    parser.add_argument("--write", action="store_true", help="write docs/performance.md")
    parser.add_argument("--measure", nargs=2, metavar=("KIND", "NAME"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(*args.measure, args.gb, args.scratch)))
        return
    results: dict[str, dict[str, list[dict[str, float]]]] = {"save": {}, "stall": {}, "cold": {}, "warm": {}}
    contenders = {"save": list(SAVE), "stall": list(STALL), "cold": list(LOAD), "warm": list(LOAD)}
    shutil.rmtree(args.scratch, ignore_errors=True)
    for number in range(args.rounds):
        for kind, names in contenders.items():
            for i in range(len(names)):
                name = names[(i + number) % len(names)]
                results[kind].setdefault(name, []).append(run(kind, name, args.gb, args.scratch))
                print(f"round {number + 1}: {kind:5} {name:24} {results[kind][name][-1]['seconds']:.4f} s", flush=True)
    shutil.rmtree(args.scratch, ignore_errors=True)
    text = table(results, args.gb)
    print(text)
    if args.write:
        machine = f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}, CPU PJRT; {versions()}"
        (ROOT / "docs/performance.md").write_text(
            "# Performance\n\n"
            f"Made by `make bench` ({args.rounds} interleaved rounds, fresh processes) on {machine}.\n"
            "The machine is small and noisy: compare within this run only, and trust ratios rather than seconds.\n"
            "Nothing was measured on a TPU or a Trainium chip.\n" + text + "\n\n"
            "*Raw limit*: the same bytes from zero-copy views through O_DIRECT by three threads, without names or\n"
            "digests. *Transfer, then a thread* is what neuronx-distributed's asynchronous save does. Ours includes\n"
            "digests of every byte, fsync of files and directories, the manifest, and the commit through orbax\n"
            "(already imported: the first save of a process loads it in the background, which takes 2 to 4 seconds).\n"
        )


if __name__ == "__main__":
    main()
