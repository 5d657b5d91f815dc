"""Jobs of the real neuronx-distributed, where the environment variable NXD_REAL names a folder that has it.

In the folder ``nxd/src`` has the package, and ``extra`` the packages that it needs. `neuron_compat.nxd_on_cpu` makes it
run: its ranks are real processes on CPUs, with gloo in the place of Neuron's collectives. They have other packages than
the tests have, so they are forked from a process with an environment of its own, which imports neuronx-distributed
once. What they run are functions of the modules in tests/neuron/real:

    @needs_nxd
    def test_it_is_there() -> None:
        assert run_on_nxd(meeting.stage_of, 2, 2) == [0, 1]
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.nursery import ProcessError
from tests.runs import ROOT, environment

_NAMED = os.environ.get("NXD_REAL", "")
needs_nxd = pytest.mark.skipif(not _NAMED, reason="NXD_REAL names no folder that has neuronx-distributed")


def run_on_nxd(function: Callable[..., object], world: int, *args: object, timeout: float = 250) -> list[Any]:
    """Call `function(rank, *args)` on every rank of a job of the real neuronx-distributed; what each returned, as JSON.

    The ranks have met, and neuronx-distributed can be used; its parallel state is not made yet. Arguments are plain
    values and paths, which arrive as texts. If a rank fails, what it raised and printed is in the error.
    """
    request = [function.__module__, function.__name__, world, args, timeout]
    ranks = json.loads(_answer(json.dumps(request, default=os.fspath)))
    failed = [f"--- rank {n}\n{r['error']}\n{r['log']}" for n, r in enumerate(ranks) if "error" in r]
    if failed:
        raise ProcessError("\n".join(failed))
    return [rank["value"] for rank in ranks]


def _answer(request: str) -> str:
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        server.stdin.write(request + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
    except BaseException:  # the next test must not read what this one did not wait for
        _server.cache_clear()
        os.killpg(server.pid, signal.SIGKILL)
        raise
    if not answer:
        _server.cache_clear()
        raise ProcessError(f"the process that starts such jobs has ended with exit code {server.wait()}")
    return answer


def at_nxd() -> dict[str, str]:
    """The environment of a process that finds neuronx-distributed and its packages."""
    scratch = Path(_NAMED).resolve(strict=True)
    path = os.pathsep.join(map(str, (ROOT, scratch / "nxd/src", scratch / "extra")))
    return environment(
        {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "NXD_LOG_LEVEL": "error", "OMP_NUM_THREADS": "1"}
    )


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process from which all such jobs are forked; it ends when its input does."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.neuron.real.jobs"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=at_nxd(), cwd=ROOT,
        start_new_session=True,
    )  # fmt: skip
    atexit.register(server.communicate)
    return server
