"""What this machine allows a load and a save: fresh pages, reads from page cache and disk, copies out of devices.

    python benchmarks/limits.py [--gb 1] [--rounds 3] [--scratch DIRECTORY]

docs/measured/profiles.md says what follows from it. Nothing here uses the library: these are the floors under it.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

Bytes = npt.NDArray[np.uint8]
HUGE = 2 << 20
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, for which python 3.11 has no name
CHUNK = 8 << 20
PIECE = 1 << 20
"""Bytes that are digested while they are in the processor's cache."""

libc = ctypes.CDLL(None, use_errno=True)
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def fresh(nbytes: int, *, huge: bool) -> Bytes:
    """Memory that nobody has touched."""
    mapping = mmap.mmap(-1, nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    whole = np.frombuffer(mapping, np.uint8)
    skip = -whole.ctypes.data % HUGE
    return whole[skip : skip + nbytes]


def in_threads(count: int, nbytes: int, work: Callable[[int, int], None], chunk: int = CHUNK) -> float:
    """Seconds in which some threads do a piece of work for each chunk."""
    todo, lock = iter(range(0, nbytes, chunk)), threading.Lock()

    def run() -> None:
        while True:
            with lock:
                at = next(todo, None)
            if at is None:
                return
            work(at, min(at + chunk, nbytes))

    threads = [threading.Thread(target=run) for _ in range(count)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def populate(memory: Bytes, low: int, high: int) -> None:
    """Have pages backed without touching each of them."""
    if libc.madvise(memory[low:high].ctypes.data, high - low, POPULATE_WRITE):
        raise OSError(ctypes.get_errno(), "madvise")


def read(fd: int, into: Bytes, low: int, high: int, offset: int | None = None) -> None:
    """Fill a piece of memory from a place of a file, by default from the same one."""
    shift = 0 if offset is None else offset - low
    while low < high:
        low += os.preadv(fd, [into[low:high]], low + shift)


def in_place(fd: int, memory: Bytes) -> dict[str, float]:
    """Seconds in which two threads overwrite warm memory from the page cache, so that damage is found before."""
    nbytes, buffers = len(memory), threading.local()

    def check(low: int, high: int) -> None:
        if not hasattr(buffers, "piece"):
            buffers.piece = fresh(PIECE, huge=False)
        for at in range(low, high, PIECE):
            read(fd, buffers.piece, 0, PIECE, at)
            xxhash.xxh3_64_intdigest(buffers.piece)

    def fill(into: Bytes, low: int, high: int) -> None:
        for at in range(low, high, PIECE):
            read(fd, into, at, at + PIECE)
            xxhash.xxh3_64_intdigest(into[at : at + PIECE])

    def copy(into: Bytes, source: Bytes) -> float:
        return in_threads(2, nbytes, lambda low, high: np.copyto(into[low:high], source[low:high]))

    def again(low: int, high: int) -> None:
        fill(memory, low, high)

    took = {"in place: digested, then read again": in_threads(2, nbytes, check) + in_threads(2, nbytes, again)}
    for pages, huge in (("4 KiB pages", False), ("huge pages", True)):
        other = fresh(nbytes, huge=huge)
        once = in_threads(2, nbytes, lambda low, high, other=other: fill(other, low, high))  # type: ignore[misc]
        took[f"in place: read once into fresh memory, {pages}, then copied"] = once + copy(memory, other)
        other = fresh(nbytes, huge=huge)
        took[f"in place: old contents kept in fresh memory, {pages}, then overwritten"] = copy(
            other, memory
        ) + in_threads(2, nbytes, again)
    return took


def evict(path: Path) -> None:
    """Drop a file from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(path: Path, nbytes: int) -> dict[str, float]:
    """Seconds of each row, once."""
    found: dict[str, float] = {}
    for pages, huge in (("4 KiB pages", False), ("huge pages", True)):
        for threads in (1, 2):
            memory = fresh(nbytes, huge=huge)
            took = in_threads(threads, nbytes, lambda low, high, memory=memory: populate(memory, low, high))  # type: ignore[misc]
            found[f"fresh memory, {pages}, {threads} threads"] = took
            del memory
    warm = fresh(nbytes, huge=False)
    warm[::4096] = 1
    large = fresh(nbytes, huge=True)
    large[::4096] = 1
    for kind, direct, into in (
        ("page cache", 0, warm),
        ("disk, through the page cache", 0, warm),
        ("disk, O_DIRECT", os.O_DIRECT, warm),
        ("disk, O_DIRECT, huge pages", os.O_DIRECT, large),
    ):
        for threads in (2, 8):
            if kind != "page cache":
                evict(path)
            fd = os.open(path, os.O_RDONLY | direct)
            if kind == "page cache":
                for at in range(0, nbytes, CHUNK):
                    read(fd, warm, at, min(at + CHUNK, nbytes))
            chunk = HUGE if direct else CHUNK
            took = in_threads(threads, nbytes, lambda low, high, fd=fd, into=into: read(fd, into, low, high), chunk)  # type: ignore[misc]
            found[f"read into warm memory: {kind}, {threads} threads"] = took
            if kind == "page cache" and threads == 2:
                found |= in_place(fd, warm)
            os.close(fd)
    return found


def of_devices(nbytes: int) -> Callable[[], dict[str, float]]:
    """How long torch_xla takes to copy that many bytes out of eight SPMD devices, all at once and tensor by tensor."""
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}
    import torch
    import torch_xla
    import torch_xla.distributed.spmd as spmd
    import torch_xla.runtime

    torch_xla.runtime.use_spmd()
    mesh = spmd.Mesh(np.arange(8), (8,), ("x",))
    tensors = [torch.rand(4096, 4096).to(torch_xla.device()) for _ in range(nbytes >> 26)]
    for tensor in tensors:
        spmd.mark_sharding(tensor, mesh, ("x", None))
    torch_xla.sync(wait=True)
    copy = torch_xla._XLAC._get_local_shards

    def all_at_once() -> None:
        copy(tensors)

    def one_by_one() -> None:
        for tensor in tensors:
            copy([tensor])

    def measure() -> dict[str, float]:
        found = {}
        for how, work in (("all at once", all_at_once), ("tensor by tensor", one_by_one)):
            began, cpu = time.perf_counter(), time.process_time()
            work()
            found[f"out of eight SPMD devices, {how}"] = time.perf_counter() - began
            found[f"out of eight SPMD devices, {how}: processor time"] = time.process_time() - cpu
        return found

    return measure


def main() -> None:
    """Print the rows as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scratch", type=Path, default=None, help="directory for the file that is read")
    args = parser.parse_args()
    nbytes = round(args.gb * 1e9) // CHUNK * CHUNK
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        path = Path(folder, "file")
        with path.open("wb") as file:
            for _ in range(nbytes // CHUNK):
                file.write(os.urandom(CHUNK))
        from_devices = of_devices(nbytes)
        rounds = [measure(path, nbytes) | from_devices() for _ in range(args.rounds)]
    print(f"| {nbytes / 1e9:.2f} GB, {args.rounds} rounds | median | least | GB/s of the least |\n|---|---:|---:|---:|")
    for name in rounds[0]:
        seconds = [found[name] for found in rounds]
        least = min(seconds)
        print(f"| {name} | {statistics.median(seconds):.2f} s | {least:.2f} s | {nbytes / least / 1e9:.1f} |")


if __name__ == "__main__":
    main()
