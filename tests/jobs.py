"""Running jobs of several real processes: under torchrun, or one by one where a test kills some of them."""

from __future__ import annotations

import selectors
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.nursery import bear
from tests.runs import environment

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


class Launch(Protocol):
    """A way to run a job to its end."""

    def __call__(
        self, code: str, ranks: int, folder: Path, *args: object, timeout: float, env: Mapping[str, str]
    ) -> object: ...


def program(code: str) -> str:
    """A rank's program: `code` after the usual beginning."""
    return START + textwrap.dedent(code)


def torchrun(
    code: str, ranks: int, folder: Path, *args: object, timeout: float = 240, env: Mapping[str, str] | None = None
) -> str:
    """Run `code` on every rank of a torchrun job; all must succeed. Returns what they printed."""
    script = folder / f"program_{ranks}.py"
    script.write_text(program(code))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
         str(script), *map(str, args)],
        capture_output=True, text=True, env=environment({"OMP_NUM_THREADS": "1", **(env or {})}), timeout=timeout,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout


def job(
    code: str, ranks: int, folder: Path, *args: object, timeout: float = 240, launch: Launch | None = None
) -> list[str]:
    """Run `code` on every rank of a job; what all ranks said with `say(...)`, rank by rank, a line each.

    All must succeed: as under torchrun, the first that fails takes the others down. `launch=torchrun` is torchrun.
    """
    said = folder / "said"
    (launch or together)(code, ranks, folder, *args, timeout=timeout, env={"SAY": str(said)})
    found = [folder / f"said.{rank}" for rank in range(ranks)]
    return [line for file in found if file.exists() for line in file.read_text().splitlines()]


def together(
    code: str, ranks: int, folder: Path, *args: object, timeout: float = 240, env: Mapping[str, str] | None = None
) -> None:
    """Run `code` on every rank of a job, as `torchrun` does, but without its imports (tests/nursery.py)."""
    script = folder / f"program_{ranks}.py"
    script.write_text(program(code))
    processes = start_ranks(code, ranks, *args, env=dict.fromkeys(range(ranks), env or {}), name=str(script))
    with selectors.DefaultSelector() as ends:
        for rank, process in enumerate(processes):
            ends.register(process, selectors.EVENT_READ, rank)
        over, failed = time.monotonic() + timeout, ""
        while ends.get_map():
            ready = ends.select(max(over - time.monotonic(), 0.01))
            if not ready and not failed:
                failed = f"it did not end within {timeout:g} s"
            for key, _ in ready:
                ends.unregister(key.fileobj)
                out, err = processes[key.data].communicate()
                if (status := processes[key.data].returncode) and not failed:
                    failed = f"rank {key.data}: exit code {status}\n{out[-4000:]}\n{err[-8000:]}"
            if failed:
                break
        for process in processes if failed else ():
            process.send_signal(signal.SIGABRT)  # which shows where it is
    if failed:
        told = "\n".join(f"--- rank {rank}\n{p.communicate(30)[1][-4000:]}" for rank, p in enumerate(processes))
        pytest.fail(f"{failed}\n{told}", pytrace=False)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_ranks(
    code: str,
    ranks: int,
    *args: object,
    env: Mapping[int, Mapping[str, str]] | None = None,
    inside: Mapping[int, Sequence[str]] | None = None,
    name: str = "<program>",
) -> list[Any]:
    """Start the ranks of a job without a launcher: nobody takes the others down when one dies.

    `env` adds to the environment of single ranks, `inside` is a command that runs a rank's command (`ip netns exec`).
    Rank 0 holds the job's store.
    """
    port, text = free_port(), program(code)
    processes: list[Any] = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1",
                 **(env or {}).get(rank, {})}  # fmt: skip
        if inside is None:
            processes.append(bear(text, args, environment(place), name))
        else:
            command = [*inside[rank], sys.executable, "-c", text, *map(str, args)]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            processes.append(subprocess.Popen(command, text=True, env=environment(place), **pipes))
    return processes


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
