"""The process from which jobs of the real neuronx-distributed are forked: `run_on_nxd` of tests/neuron/real_nxd.py.

It reads one job from each line of its input, and answers with one line. `neuron_compat.nxd_on_cpu` makes
neuronx-distributed run: it is imported once, before the ranks are forked.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from neuron_compat import nxd_on_cpu

GRACE = 20.0
"""Seconds that the other ranks of a job go on when one has failed: they wait for it, and say so."""


def main() -> None:
    """Carry out all jobs, until there is no more input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed is no answer
    nxd_on_cpu.prepare()
    import torch

    import neuron_compat.nxd  # noqa: F401  # and xla_ckpt, so that no rank has to

    torch.set_num_threads(1)
    for line in sys.stdin:
        module, function, world, args, timeout = json.loads(line)
        importlib.import_module(module)
        with tempfile.TemporaryDirectory(prefix="nxd_") as folder:
            answers.write(json.dumps(_run(Path(folder), world, timeout, (module, function, args))) + "\n")
        answers.flush()


def _run(folder: Path, world: int, timeout: float, work: tuple[str, str, list[Any]]) -> list[dict[str, Any]]:
    """Fork the ranks of a job, and wait for them; what each of them answered."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    waiting = {_fork(folder, rank, work): rank for rank in range(world)}
    end = time.monotonic() + timeout
    while waiting:
        if time.monotonic() > end:
            for pid in waiting:
                os.kill(pid, signal.SIGKILL)
            end = time.monotonic() + timeout
        ended, status = os.waitpid(-1, os.WNOHANG)
        if not ended:
            time.sleep(0.02)
            continue
        waiting.pop(ended, None)
        if status:
            end = min(end, time.monotonic() + GRACE)
    return [_answer(folder, rank) for rank in range(world)]


def _fork(folder: Path, rank: int, work: tuple[str, str, list[Any]]) -> int:
    pid = os.fork()
    if pid:
        return pid
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        answer = {"value": _as_rank(rank, *work)}
        code = 0
    except BaseException:
        answer = {"error": traceback.format_exc()}
    (folder / f"{rank}.json").write_text(json.dumps(answer))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _as_rank(rank: int, module: str, function: str, args: list[Any]) -> Any:
    """A rank's part of a job."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    nxd_on_cpu.begin()
    import torch.distributed as dist

    dist.init_process_group("xla")
    return getattr(sys.modules[module], function)(rank, *args)


def _answer(folder: Path, rank: int) -> dict[str, Any]:
    log = (folder / f"{rank}.log").read_text()[-3000:]
    said = folder / f"{rank}.json"
    answer: dict[str, Any] = json.loads(said.read_text()) if said.exists() else {"error": "it was killed"}
    return {**answer, "log": log}


if __name__ == "__main__":
    main()
