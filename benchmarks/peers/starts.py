"""What a new interpreter pays: imports, the first save of a process, and the command line.

Here nothing is loaded before: these processes are not forked from one that has imported everything.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from tests.runs import environment

Figures = dict[str, float]

_IMPORTS = """
import json, time
began = time.perf_counter()
import torch
torch_ = time.perf_counter()
import xla_ckpt
xla_ckpt.save_checkpoint, xla_ckpt.load_checkpoint
print(json.dumps({"seconds": time.perf_counter() - torch_, "torch": torch_ - began}))
"""

_FIRST = """
import json, sys, time
from pathlib import Path
import torch, torch_xla
import xla_ckpt
from benchmarks.peers.states import State

state = State("xla", float(sys.argv[1]))
seconds = []
for tag in ("a", "b", "c"):
    began = time.perf_counter()
    xla_ckpt.save_checkpoint(sys.argv[2], tag, model=state.module)
    seconds.append(time.perf_counter() - began)
print(json.dumps({"seconds": seconds[0], "later": min(seconds[1:]), "nbytes": state.nbytes}))
"""


def imports(_: Path, limit: float) -> Figures:
    """Seconds that `import xla_ckpt` and its two main functions take after `import torch`, and torch itself."""
    return _figures([sys.executable, "-c", _IMPORTS], limit)


def first_save(gb: float, directory: Path, limit: float) -> Figures:
    """The first save of a process, which loads orbax, and a later one."""
    return _figures([sys.executable, "-c", _FIRST, str(gb), str(directory)], limit)


def listing(directory: Path, limit: float) -> Figures:
    """`xla-ckpt ls` of a directory with three tags, from the start of the process to its end."""
    code = "import sys, xla_ckpt\nfor tag in 'abc': xla_ckpt.save(sys.argv[1], tag, {'step': 1})"
    _run([sys.executable, "-c", code, str(directory)], limit)
    began = time.perf_counter()
    table = _run([sys.executable, "-m", "xla_ckpt.cli.main", "ls", str(directory)], limit)
    seconds = time.perf_counter() - began
    if not {"a", "b", "c"} <= {line.split("\t")[0] for line in table.splitlines()}:  # tabs, since it is a pipe
        raise ValueError(f"xla-ckpt ls does not list the tags a, b, c:\n{table}")
    return {"seconds": seconds}


def _figures(command: list[str], limit: float) -> Figures:
    figures: Figures = json.loads(_run(command, limit).splitlines()[-1])
    return figures


def _run(command: list[str], limit: float) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit, env=environment())
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-2000:])
    return done.stdout
