"""What a measuring process does: one function for each kind of measurement. Each returns figures by name.

The figure "seconds" is what the contenders of a group are compared by, whatever its unit is. The clock of a save stops
when every file has been fsync'ed; "returned" is when the call came back. That of a load stops when a byte of every page
has been read on the device.
"""

from __future__ import annotations

import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peers import loads, saves
from benchmarks.peers.installed import ready
from benchmarks.peers.machine import Peak, stored_bytes, sync_files, warm
from benchmarks.peers.states import State, wait_for_device

Figures = dict[str, float]
LOADED_SEED = 1
"""The state that a load fills begins with other values than those that were saved."""


class WrongError(Exception):
    """A contender did not do what its time is measured for."""


def save(name: str, device: str, gb: float, count: int, directory: str) -> Figures:
    """A durable save: seconds until it is on the disk, and until the call returned; bytes of memory and disk."""
    folder = Path(directory)
    state, contender = fresh_state(device, gb, count), ready(getattr(saves, name))
    peak = Peak()
    began = time.perf_counter()
    contender(state, folder)
    returned = time.perf_counter() - began
    sync_files(folder)
    seconds = time.perf_counter() - began
    rise, stored = peak.rise(), stored_bytes(folder)
    if stored < state.nbytes / 2:
        raise WrongError(f"{stored} bytes were saved of a state of {state.nbytes}")
    return {"seconds": seconds, "returned": returned, "rss": rise, "stored": stored, "nbytes": state.nbytes}


def stall(name: str, device: str, gb: float, count: int, times: int, directory: str) -> Figures:
    """The caller's wait in an asynchronous save: the first one in a process, and the median of those after it.

    "processor" is the median of the caller's processor time meanwhile: what other programs add to a wait of a few
    milliseconds is more than what most changes of the code do.
    """
    state, contender = fresh_state(device, gb, count), ready(getattr(saves, name))
    stalls, processor, totals, rises = [], [], [], []
    for number in range(times):
        folder = Path(directory) / str(number)
        folder.mkdir()
        peak = Peak()
        began, worked = time.perf_counter(), time.thread_time()
        wait = contender(state, folder)
        stalls.append(time.perf_counter() - began)
        processor.append(time.thread_time() - worked)
        wait()
        sync_files(folder)
        totals.append(time.perf_counter() - began)
        rises.append(peak.rise())
        shutil.rmtree(folder)
    return {
        "seconds": statistics.median(stalls[1:]), "processor": statistics.median(processor[1:]), "first": stalls[0],
        "total": statistics.median(totals[1:]), "rss": max(rises), "nbytes": state.nbytes,
    }  # fmt: skip


def prepare(name: str, device: str, gb: float, count: int, directory: str) -> str:
    """Save what loads will read; returns the digest that they must find."""
    state = fresh_state(device, gb, count)
    ready(getattr(saves, name))(state, Path(directory))
    os.sync()  # what is not on the disk yet cannot be evicted from the page cache
    return state.digest()


def load(name: str, device: str, gb: float, count: int, digest: str, is_warm: bool, directory: str) -> Figures:
    """A load into a live state; seconds until a byte of every page has been read, and the rise of memory meanwhile.

    A second look at the same pages, which are there by then, takes what the first one took by itself: it is taken off.

    The digest of all values is compared after that.
    """
    folder = Path(directory)
    state, contender = fresh_state(device, gb, count, LOADED_SEED), ready(getattr(loads, name))
    if is_warm:
        warm(folder)
    peak = Peak()
    began = time.perf_counter()
    contender(state, folder)
    wait_for_device(device)
    state.touch()
    ended = time.perf_counter()
    state.touch()  # what the look itself takes is no part of a load
    seconds = ended - began - (time.perf_counter() - ended)
    found = state.digest()
    if found != digest:
        raise WrongError(f"the digest of what was loaded is {found}, and of what was saved {digest}")
    return {"seconds": seconds, "rss": peak.rise(), "nbytes": state.nbytes}


def loop(name: str, threads: int, gb: float, windows: int, directory: str) -> Figures:
    """What a save of XLA tensors to the disk does to a training loop on the CPU: see `beside`."""
    state, contender = fresh_state("xla", gb, 0), getattr(saves, name)

    def begin(number: int) -> Callable[[], object]:
        folder = Path(directory) / str(number)
        folder.mkdir()
        return contender(state, folder)  # type: ignore[no-any-return]

    def end(number: int) -> None:
        sync_files(Path(directory) / str(number))
        shutil.rmtree(Path(directory) / str(number))

    return {**beside(threads, windows, begin, end), "nbytes": state.nbytes}


def beside(
    threads: int, windows: int, begin: Callable[[int], Callable[[], object]], end: Callable[[int], object]
) -> Figures:
    """How much longer a step of a training loop on the CPU takes while a save runs than without one (a part of 1).

    The loop multiplies matrices with as many threads as it says; windows with a save and windows of the same length
    without one take turns. "lost" is how much longer the loop took for the steps of a window with a save (seconds),
    and "cpu" the processor time of this process in a save without a loop. `begin` is given the number of a save, and
    returns what saves or waits for it; `end` is called when it is done.
    """
    import torch

    torch.set_num_threads(threads)
    a, b = torch.rand(384, 384), torch.rand(384, 384)

    def steps(until: Any) -> float:
        """Seconds of a step, on the average of a window."""
        began, number = time.perf_counter(), 0
        while number == 0 or not until(time.perf_counter() - began):
            torch.mm(a, b)
            number += 1
        return (time.perf_counter() - began) / number

    steps(lambda passed: passed > 0.3)
    ratios, lost, used, lengths = [], [], [], [0.5]
    for number in range(windows + 1):
        before = steps(lambda passed: passed > lengths[-1])
        thread = threading.Thread(target=begin(2 * number))
        began = time.perf_counter()
        thread.start()
        during = steps(lambda _, saving=thread: not saving.is_alive())
        lengths.append(time.perf_counter() - began)
        thread.join()
        after = steps(lambda passed: passed > lengths[-1])
        undisturbed = (before + after) / 2
        ratios.append(during / undisturbed - 1)
        lost.append(lengths[-1] * (1 - undisturbed / during))
        end(2 * number)
        began = time.process_time()
        begin(2 * number + 1)()
        used.append(time.process_time() - began)
        end(2 * number + 1)
    return {
        "seconds": statistics.median(ratios[1:]), "save": statistics.median(lengths[2:]),
        "lost": statistics.median(lost[1:]), "cpu": statistics.median(used[1:]),
    }  # fmt: skip


def rank_saves(rank: int, world: int, gb: float, directory: str) -> Figures:
    """One rank's part of a save of a data-parallel job with torch_xla's ZeRO-1: its own seconds, and all bytes."""
    import torch
    import torch.distributed as dist
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    import neuron_compat
    import xla_ckpt

    neuron_compat.emulate()
    state = fresh_state("xla", gb / 3, 0)
    optimizer = ZeroRedundancyOptimizer(
        state.module.parameters(), torch.optim.AdamW, sharding_groups=[list(range(world))], grad_clipping=False,
        pin_layout=False, lr=1e-3, foreach=False,
    )  # fmt: skip
    for group in optimizer.base_optimizer.param_groups:
        for shard in group["params"]:
            moments = {name: torch.rand(shard.shape).to(shard.device) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.base_optimizer.state[shard] = {"step": torch.tensor(7.0), **moments}
    import torch_xla

    torch_xla.sync(wait=True)
    import orbax.checkpoint  # noqa: F401  # loaded once a process: its seconds are not those of a save

    dist.barrier()
    began = time.perf_counter()
    xla_ckpt.save_checkpoint(directory, "a", state.module, optimizer, mesh=f"dp={world}")
    return {"seconds": time.perf_counter() - began, "nbytes": stored_bytes(Path(directory))}


def spmd_saves(gb: float, directory: str) -> Figures:
    """A save of tensors that lie on eight SPMD devices of one process."""
    import numpy as np
    import torch_xla
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    import xla_ckpt

    xr.use_spmd()
    mesh = xs.Mesh(np.arange(8), (8,), ("x",))
    state = fresh_state("cpu", gb, 0)
    module = state.module.to(torch_xla.device())
    for parameter in module.parameters():
        xs.mark_sharding(parameter, mesh, ("x", *[None] * (parameter.dim() - 1)))
    torch_xla.sync(wait=True)
    wait_for_device("xla")
    began = time.perf_counter()
    xla_ckpt.save_checkpoint(directory, "a", module)
    return {"seconds": time.perf_counter() - began, "nbytes": state.nbytes}


def fresh_state(device: str, gb: float, count: int, seed: int = 0) -> State:
    """The state, with everything loaded and set that is no part of a measurement, ours as the peers'."""
    import orbax.checkpoint
    import torch
    import torch.distributed.checkpoint

    import xla_ckpt.dcp

    torch.set_num_threads(os.cpu_count() or 1)
    assert all((orbax.checkpoint.args, torch.distributed.checkpoint.load, xla_ckpt.load_checkpoint, xla_ckpt.dcp.load))
    return State(device, gb, count, seed)
