"""Our saves and loads beside the peers', on XLA tensors, in one interleaved run.

    python benchmarks/peers.py [--gb 1] [--dcp-gb 0.512] [--rounds 5] [--only dcp-save,dcp-warm] [--write]
    make bench                                                      # the same with --write

Every measurement is a fresh process; the contenders take turns, so that a noisy minute hits all of them. Saves are
durable: the clock stops when every file has been fsync'ed. Loads end when every value has been read once on the device;
for cold ones the files are evicted from the page cache first. ``--write`` puts the table into docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import math
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


# torch.distributed.checkpoint: stock's calls, ours in their place, and stock's with our storage.


def dcp_save(module: Any, directory: Path) -> float:
    """Stock, which syncs each file before it returns."""
    import torch.distributed.checkpoint as dcp

    began = time.perf_counter()
    writer = dcp.FileSystemWriter(directory / "d", sync_files=True)
    dcp.save(module.state_dict(), storage_writer=writer, no_dist=True)
    return time.perf_counter() - began


def dcp_save_ours(module: Any, directory: Path) -> float:
    import xla_ckpt.dcp as dcp

    began = time.perf_counter()
    dcp.save(module.state_dict(), checkpoint_id=directory / "d", no_dist=True)
    return time.perf_counter() - began


def dcp_save_writer(module: Any, directory: Path) -> float:
    import torch.distributed.checkpoint as dcp

    from xla_ckpt.dcp import StorageWriter

    began = time.perf_counter()
    dcp.save(module.state_dict(), storage_writer=StorageWriter(directory / "d"), no_dist=True)
    return time.perf_counter() - began


def dcp_save_tag(module: Any, directory: Path) -> float:
    import orbax.checkpoint  # noqa: F401

    import xla_ckpt

    began = time.perf_counter()
    xla_ckpt.save_checkpoint(directory, "d", model=module, layout="dcp")
    return time.perf_counter() - began


def dcp_stall_ours(module: Any, directory: Path) -> float:
    import xla_ckpt.dcp as dcp

    began = time.perf_counter()
    future = dcp.async_save(module.state_dict(), checkpoint_id=directory / "d", no_dist=True)
    stall = time.perf_counter() - began
    future.result()
    return stall


def dcp_stall_stager(module: Any, directory: Path) -> float:
    import torch.distributed.checkpoint as dcp

    from xla_ckpt.dcp import AsyncStager, StorageWriter

    began = time.perf_counter()
    future = dcp.async_save(
        module.state_dict(), storage_writer=StorageWriter(directory / "d"), async_stager=AsyncStager(), no_dist=True
    )
    stall = time.perf_counter() - began
    future.result()
    return stall


def dcp_stall_tag(module: Any, directory: Path) -> float:
    import orbax.checkpoint  # noqa: F401

    import xla_ckpt

    began = time.perf_counter()
    handle = xla_ckpt.save_checkpoint(directory, "d", model=module, layout="dcp", async_save=True)
    stall = time.perf_counter() - began
    handle.result()
    return stall


def dcp_load_ours(module: Any, directory: Path) -> None:
    import xla_ckpt.dcp as dcp

    dcp.load(module.state_dict(), checkpoint_id=directory / "d", no_dist=True)


def dcp_load_reader(module: Any, directory: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from xla_ckpt.dcp import StorageReader

    dcp.load(module.state_dict(), storage_reader=StorageReader(directory / "d"), no_dist=True)


def dcp_load_tag(module: Any, directory: Path) -> None:
    import xla_ckpt

    xla_ckpt.load_checkpoint(directory, "d", model=module)


SAVE: dict[str, Callable[[Any, Path], float]] = {
    "xla_ckpt": save_ours, "raw limit": save_raw, "xser.save": save_xser, "xm.save": save_xm, "dcp.save": save_dcp,
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
DCP_SAVE = {
    "`xla_ckpt.dcp.save`": dcp_save_ours,
    "stock `dcp.save`, our `StorageWriter`": dcp_save_writer,
    '`save_checkpoint(layout="dcp")`': dcp_save_tag,
    "stock `dcp.save`": dcp_save,
}
DCP_STALL = {
    "`xla_ckpt.dcp.async_save`": dcp_stall_ours,
    "stock `dcp.async_save`, our `StorageWriter` and `AsyncStager`": dcp_stall_stager,
    '`save_checkpoint(layout="dcp", async_save=True)`': dcp_stall_tag,
}
DCP_LOAD = {
    "`xla_ckpt.dcp.load`": (dcp_save_ours, dcp_load_ours),
    "`xla_ckpt.dcp.load` of what stock saved": (dcp_save, dcp_load_ours),
    "stock `dcp.load`, our `StorageReader`": (dcp_save_ours, dcp_load_reader),
    '`load_checkpoint` of `layout="dcp"`': (dcp_save_tag, dcp_load_tag),
    "stock `dcp.load`": (dcp_save, load_dcp),
    "stock `dcp.load` of what we saved": (dcp_save_ours, load_dcp),
}
CONTENDERS: dict[str, Any] = {
    "save": SAVE, "stall": STALL, "cold": LOAD, "warm": LOAD,
    "dcp-save": DCP_SAVE, "dcp-stall": DCP_STALL, "dcp-cold": DCP_LOAD, "dcp-warm": DCP_LOAD,
}  # fmt: skip
"""By what is measured. The first one of each is ours, with which the others are compared."""
LOADS = ("cold", "warm", "dcp-cold", "dcp-warm")


def measure(kind: str, name: str, gb: float, directory: Path) -> dict[str, float]:
    """One measurement; runs in a process of its own."""
    import psutil

    process = psutil.Process()
    module = make(gb)
    import torch.distributed.checkpoint

    import xla_ckpt.dcp

    # Modules are loaded, ours as the peers'.
    assert torch.distributed.checkpoint.load
    assert xla_ckpt.load_checkpoint
    assert xla_ckpt.dcp.load
    if kind in LOADS:
        began = time.perf_counter()
        CONTENDERS[kind][name][1](module, directory)
        touch(module)
        return {"seconds": time.perf_counter() - began}
    if kind.startswith("prepare "):
        CONTENDERS[kind.removeprefix("prepare ")][name][0](module, directory)
        sync_files(directory)
        return {"seconds": 0.0}
    if kind in ("stall", "dcp-stall"):
        seconds = []
        for i in range(3):  # the first one loads code; the later ones are what training feels
            (directory / str(i)).mkdir()
            seconds.append(CONTENDERS[kind][name](module, directory / str(i)))
            shutil.rmtree(directory / str(i))
        return {"seconds": statistics.median(seconds[1:]), "first": seconds[0]}
    before = process.memory_info().rss
    seconds_ = CONTENDERS[kind][name](module, directory)
    began = time.perf_counter()
    sync_files(directory)
    seconds_ += time.perf_counter() - began
    return {"seconds": seconds_, "rss": process.memory_info().rss - before}


def run(kind: str, name: str, gb: float, scratch: Path) -> dict[str, float]:
    """One measurement in a fresh process."""
    directory = scratch / "files"
    if kind in LOADS:
        group = "dcp" if kind.startswith("dcp-") else "all"
        directory = scratch / group / str(list(CONTENDERS[kind]).index(name))
        if not directory.exists():
            directory.mkdir(parents=True)
            call(f"prepare {kind}", name, gb, directory)
        if kind.endswith("cold"):
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


def size_of(gb: float) -> int:
    """Bytes of the state."""
    return sum(4 * math.prod(s) for s in shapes(gb))


def table(results: dict[str, dict[str, list[dict[str, float]]]], gb: float, dcp_gb: float) -> str:
    """The results as Markdown."""
    lines: list[str] = []

    def section(title: str, kind: str, speed: bool) -> None:
        if kind not in results:
            return
        nbytes = size_of(dcp_gb if kind.startswith("dcp-") else gb)
        ours = statistics.median(r["seconds"] for r in results[kind][next(iter(CONTENDERS[kind]))])
        lines.extend(["", f"## {title}", "", "| | median | range | " + ("GB/s | " if speed else "") + "times ours |",
                      "|---|---:|---:|" + ("---:|" if speed else "") + "---:|"])  # fmt: skip
        for name, runs in sorted(results[kind].items(), key=lambda kv: statistics.median(r["seconds"] for r in kv[1])):
            seconds = [r["seconds"] for r in runs]
            mid = statistics.median(seconds)
            unit = (lambda s: f"{1000 * s:.1f} ms") if kind.endswith("stall") else (lambda s: f"{s:.2f} s")
            rate = f"{nbytes / mid / 1e9:.2f} | " if speed else ""
            lines.append(
                f"| {name} | {unit(mid)} | {unit(min(seconds))} to {unit(max(seconds))} | {rate}{mid / ours:.2f} |"
            )

    section(f"Durable save of {size_of(gb) / 1e9:.2f} GB of XLA tensors", "save", True)
    section("Stall of the caller in an asynchronous save (the second and third in a process)", "stall", False)
    section("Load into a live module on the device, from a cold page cache", "cold", True)
    section("The same from a warm page cache", "warm", True)
    of_dcp = f"{size_of(dcp_gb) / 1e6:.0f} MB of XLA tensors"
    section(f"torch.distributed.checkpoint: durable save of {of_dcp}", "dcp-save", True)
    section(f"torch.distributed.checkpoint: stall of the caller, {of_dcp} (the second and third)", "dcp-stall", False)
    section("torch.distributed.checkpoint: load in place, from a cold page cache", "dcp-cold", True)
    section("torch.distributed.checkpoint: the same from a warm page cache", "dcp-warm", True)
    return "\n".join(lines)


def versions() -> str:
    """What was measured with."""
    from importlib.metadata import version

    names = ("torch", "torch_xla", "orbax-checkpoint", "jax", "numpy")
    return ", ".join(f"{n} {version(n)}" for n in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--dcp-gb", type=float, default=0.512, help="size for torch.distributed.checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(CONTENDERS), help="what is measured")
    parser.add_argument("--scratch", type=Path, default=ROOT / "bench_run")
    parser.add_argument(
        "--write", type=Path, nargs="?", const=ROOT / "docs/performance.md", help="write the tables, to this file"
    )
    parser.add_argument("--measure", nargs=2, metavar=("KIND", "NAME"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(*args.measure, args.gb, args.scratch)))
        return
    results: dict[str, dict[str, list[dict[str, float]]]] = {kind: {} for kind in args.only.split(",")}
    shutil.rmtree(args.scratch, ignore_errors=True)
    for number in range(args.rounds):
        for kind, found in results.items():
            names = list(CONTENDERS[kind])
            for i in range(len(names)):
                name = names[(i + number) % len(names)]
                gb = args.dcp_gb if kind.startswith("dcp-") else args.gb
                found.setdefault(name, []).append(run(kind, name, gb, args.scratch))
                print(f"round {number + 1}: {kind:9} {name:62} {found[name][-1]['seconds']:.4f} s", flush=True)
    shutil.rmtree(args.scratch, ignore_errors=True)
    text = table(results, args.gb, args.dcp_gb)
    print(text)
    if args.write:
        machine = f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}, CPU PJRT; {versions()}"
        asked = "make bench" if set(results) == set(CONTENDERS) else f"python benchmarks/peers.py --only {args.only}"
        args.write.write_text(
            "# Performance\n\n"
            f"Made by `{asked}` ({args.rounds} interleaved rounds, fresh processes) on {machine}.\n"
            "The machine is small and noisy: compare within this run only, and trust ratios rather than seconds.\n"
            "Nothing was measured on a TPU or a Trainium chip.\n" + text + "\n\n"
            "*Raw limit*: the same bytes from zero-copy views through O_DIRECT by three threads, without names or\n"
            "digests. *Transfer, then a thread* is what neuronx-distributed's asynchronous save does. Ours includes\n"
            "digests of every byte, fsync of files and directories, the manifest, and the commit through orbax\n"
            "(already imported: the first save of a process loads it in the background, which takes 2 to 4 seconds).\n"
            "*Stock `dcp.save`* is that of `FileSystemWriter(sync_files=True)`. Stock `dcp.async_save` without our\n"
            "stager fails on XLA tensors, and so has no row.\n"
        )


if __name__ == "__main__":
    main()
