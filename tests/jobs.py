"""Running jobs of several real processes: a function on every rank of a job, as `torch.multiprocessing.spawn` does it.

tests/README.md shows how to write one.
"""

from __future__ import annotations

import errno
import os
import pickle
import random
import selectors
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tests.nursery import Born, Call, End, ProcessError, Program, bear, function_of
from tests.runs import environment

Value = TypeVar("Value")

LOWEST_PORT = 10_000
"""Below lie the ports of well-known services."""


def run_on_ranks(
    function: Callable[..., Value], world: int, *args: object, xla: bool = False, timeout: float = 240
) -> list[Value]:
    """Call `function(rank, *args)` on every rank of a job; what each returned.

    The ranks are processes that have met in a gloo group, as under torchrun (tests/nursery.py says how they are born).
    As under torchrun, the first that fails takes the others down; what it raised is raised here, and shows what all of
    them printed. `xla` says that torch_xla is imported.
    """
    ranks = start_on_ranks(function, world, *args, xla=xla)
    failed = _first_to_fail(ranks, timeout)
    if failed is None:
        return [rank.value() for rank in ranks]
    for rank in ranks:
        rank.send_signal(signal.SIGABRT)  # which shows where it is
    others = "\n".join(f"--- rank {n}\n{rank.communicate(30)[1][-4000:]}" for n, rank in enumerate(ranks))
    number, why = failed
    try:
        ranks[number].value()
        raise ProcessError(why)
    except Exception as error:
        error.add_note(f"{why}\n{others}")
        raise


def _first_to_fail(ranks: Sequence[Born], timeout: float) -> tuple[int, str] | None:
    """Wait for all ranks, or for the first one that fails, and how it does."""
    over = time.monotonic() + timeout
    with selectors.DefaultSelector() as ends:
        for number, rank in enumerate(ranks):
            ends.register(rank, selectors.EVENT_READ, number)
        while ends.get_map():
            ready = ends.select(max(over - time.monotonic(), 0.01))
            if not ready:
                return min(key.data for key in ends.get_map().values()), f"it did not end within {timeout:g} s"
            for key, _ in ready:
                ends.unregister(key.fileobj)
                ranks[key.data].communicate()
                if ranks[key.data].returncode:
                    return key.data, f"rank {key.data} ended with exit code {ranks[key.data].returncode}"
    return None


def start_on_ranks(
    function: Callable[..., object], world: int, *args: object, xla: bool = False,
    env: Mapping[str, str] | None = None, first: str = "127.0.0.1",
) -> list[Born]:  # fmt: skip
    """Start the ranks of a job without a launcher: nobody takes the others down when one dies.

    `env` adds to their environment. Rank 0, at the address `first`, holds the job's store.
    """
    inner = Call.of(function, *args)
    call = Call.of(as_rank, inner.module, inner.function, inner.args)
    return [bear(call, env=place, xla=xla) for place in places(world, env, first)]


def run_alone(
    function: Callable[..., Value], *args: object, xla: bool = False, env: Mapping[str, str] | None = None,
    timeout: float = 240,
) -> Value:  # fmt: skip
    """Call a function in a process of its own, which is no rank of a job; what it returned. `env` adds to its own."""
    alone = bear(Call.of(function, *args), env=environment(env), xla=xla)
    alone.communicate(timeout)
    value: Value = alone.value()
    return value


def run_program(
    code: str, *args: object, env: Mapping[str, str] | None = None, xla: bool = False, end: End = "soon",
) -> str:  # fmt: skip
    """Run a program in a process of its own to its end, which must be a good one; what it printed."""
    program = Program(textwrap.dedent(code), tuple(map(str, args)))
    ((status, out, err),) = finish([bear(program, env=environment(env), xla=xla, end=end)], 240)
    assert status == 0, f"exit code {status}\n{out[-4000:]}\n{err[-8000:]}"
    return out


def places(world: int, env: Mapping[str, str] | None = None, first: str = "127.0.0.1") -> list[dict[str, str]]:
    """The environment of each rank of a job."""
    port = free_port()
    return [
        environment({
            "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": first, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            "RES_OPTIONS": "timeout:1 attempts:1", **(env or {}),
        })
        for rank in range(world)
    ]  # fmt: skip


def as_rank(module: str, function: str, args: bytes) -> object:
    """Join the job, and do this rank's part in it."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return function_of(module, function)(dist.get_rank(), *pickle.loads(args))


def start_on_jax_processes(function: Callable[..., object], world: int, devices: int, *args: object) -> list[Born]:
    """Start a job of jax's: its processes have met by `jax.distributed`, and each has so many devices."""
    inner = Call.of(function, *args)
    call = Call.of(as_jax_process, inner.module, inner.function, inner.args)
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}
    return [bear(call, env=place) for place in places(world, flags)]


def run_on_jax_processes(function: Callable[..., Value], world: int, devices: int, *args: object) -> list[Value]:
    """Call `function(rank, *args)` in every process of a job of jax's; what each returned."""
    processes = start_on_jax_processes(function, world, devices, *args)
    for rank, (code, out, err) in enumerate(finish(processes)):
        assert code == 0, f"process {rank}: exit code {code}\n{out[-3000:]}\n{err[-6000:]}"
    return [process.value() for process in processes]


def as_jax_process(module: str, function: str, args: bytes) -> object:
    """Join the job by jax.distributed alone, and do this process's part in it."""
    import jax

    rank, world, port = (int(os.environ.pop(name)) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", world, rank, shutdown_timeout_seconds=30)
    return function_of(module, function)(rank, *pickle.loads(args))


def finish(processes: Sequence[Any], timeout: float = 120) -> list[tuple[int, str, str]]:
    """(exit code, output, errors) of each process; kills all of them, and fails, if one does not end in time."""
    end = time.monotonic() + timeout
    ended: list[tuple[int, str, str]] = []
    late = []
    for rank, process in enumerate(processes):
        try:
            # Read on, rank by rank: what the others print meanwhile fits into their pipes.
            out, err = process.communicate(timeout=max(end - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            late.append(rank)
            for other in processes:
                other.kill()
            out, err = process.communicate()
        ended.append((process.returncode, out, err))
    told = "\n".join(f"--- rank {rank}\n{out[-3000:]}\n{err[-3000:]}" for rank, (_, out, err) in enumerate(ended))
    assert not late, f"rank {late[0]} did not end within {timeout:g} s\n{told}"
    return ended


def torchrun(
    function: Callable[..., Value], world: int, folder: Path, *args: object, timeout: float = 240
) -> list[Value]:
    """As `run_on_ranks`, under the real torchrun: its ranks have imported nothing, and its agent holds the store."""
    write_call(folder, function, *args)
    done = subprocess.run(
        torchrun_command(folder, "--standalone", f"--nproc-per-node={world}"),
        capture_output=True, text=True, env=environment({"OMP_NUM_THREADS": "1"}), timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return read_values(folder, world)


def torchrun_command(folder: Path, *options: str) -> list[str]:
    """The command that has each rank make the call that `write_call` left in a folder."""
    return [sys.executable, "-m", "torch.distributed.run", *options, "-m", "tests.jobs", str(folder)]


def store_of_torchrun() -> tuple[Any, dict[str, str]]:
    """A store in this process, as torchrun's agent has one, and what ranks are started with that use it.

    It is there as long as the object is: no rank takes it away when it is lost.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    return store, {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}


def write_call(folder: Path, function: Callable[..., object], *args: object) -> None:
    """Leave what the ranks of a torchrun job are to do."""
    call = Call.of(function, *args)
    (folder / "call").write_bytes(pickle.dumps((call.module, call.function, call.args)))


def read_values(folder: Path, world: int) -> list[Any]:
    """What the ranks of a torchrun job returned."""
    return [pickle.loads((folder / f"value.{rank}").read_bytes()) for rank in range(world)]


def free_port() -> int:
    """A port that nobody listens on, for a process that binds it later.

    It lies below those that the kernel gives to whoever names none: gloo and every connection take such ports, and one
    of them may do so before rank 0 binds, for which the other ranks then wait in vain.
    """
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = range(LOWEST_PORT, first_given) or range(LOWEST_PORT, 1 << 16)
    dice = random.SystemRandom()  # a seed of the caller's would give all his jobs one port
    while True:
        port = dice.choice(ports)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise
        return port


# --- programs in text, for tests that are not yet functions --------------------------------------------------------

START = """
import os
import sys
import torch
import torch.distributed as dist
import xla_ckpt
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def say(*words):
    with open(os.environ["SAY"] + f".{rank}", "a") as file:
        print(*words, file=file)


"""
"""Put in front of every rank's program."""


def program(code: str) -> str:
    """A rank's program: `code` after the usual beginning."""
    return START + textwrap.dedent(code)


def job(code: str, ranks: int, folder: Path, *args: object, timeout: float = 240, launch: Any = None) -> list[str]:
    """Run `code` on every rank of a job; what all ranks said with `say(...)`, rank by rank, a line each."""
    said = folder / "said"
    env = dict.fromkeys(range(ranks), {"SAY": str(said)})
    failed = _first_to_fail(processes := start_ranks(code, ranks, *args, env=env), timeout)
    for process in processes:
        if failed is not None:
            process.send_signal(signal.SIGABRT)
    told = "\n".join(f"--- rank {n}\n{p.communicate(30)[1][-4000:]}" for n, p in enumerate(processes))
    assert failed is None, f"{failed}\n{told}"
    found = [folder / f"said.{rank}" for rank in range(ranks)]
    return [line for file in found if file.exists() for line in file.read_text().splitlines()]


def start_ranks(code: str, ranks: int, *args: object, env: Mapping[int, Mapping[str, str]] | None = None) -> list[Born]:
    """Start the ranks of a job without a launcher."""
    text = Program(program(code), tuple(map(str, args)))
    return [
        bear(text, env={**place, **(env or {}).get(rank, {})}, xla="torch_xla" in code)
        for rank, place in enumerate(places(ranks))
    ]


if __name__ == "__main__":  # a rank under torchrun
    _value = as_rank(*pickle.loads(Path(sys.argv[1], "call").read_bytes()))
    Path(sys.argv[1], f"value.{os.environ['RANK']}").write_bytes(pickle.dumps(_value))
