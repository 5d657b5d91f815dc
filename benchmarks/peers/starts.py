"""What a new interpreter pays: imports, the first save of a process, and the command line.

Here nothing is loaded before: these processes are not forked from one that has imported everything.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

import xla_ckpt
from tests.runs import environment
from xla_ckpt.core.manifest import manifest_json

Figures = dict[str, float]
Bytecode = Literal["with", "without"]

_IMPORTS = """
import json, sys, time
began = time.perf_counter()
import torch
torch_ = time.perf_counter()
sys.pycache_prefix = sys.argv[1]
sys.dont_write_bytecode = sys.argv[2] == "without"
import xla_ckpt
alone = time.perf_counter()
xla_ckpt.save_checkpoint, xla_ckpt.load_checkpoint
print(json.dumps({"seconds": time.perf_counter() - torch_, "alone": alone - torch_, "torch": torch_ - began}))
"""

_FIRST = """
import json, sys, time
from pathlib import Path
import torch, torch_xla
import xla_ckpt
from benchmarks.peers.states import State

state = State("xla", float(sys.argv[1]))
seconds, reports = [], []
for tag in ("a", "b", "c"):
    began = time.perf_counter()
    reports.append(xla_ckpt.save_checkpoint(sys.argv[2], tag, model=state.module).report)
    seconds.append(time.perf_counter() - began)
after = sum(reports[0].phases[name].seconds for name in ("helper", "commit"))
print(json.dumps({"seconds": seconds[0], "later": min(seconds[1:]), "after": after, "nbytes": state.nbytes}))
"""


def imports(bytecode: Bytecode, directory: Path, limit: float) -> Figures:
    """Seconds that `import xla_ckpt` and its two main functions take after `import torch`.

    Args:
        bytecode: Whether there are caches of bytecode, which then a process before this one writes.
        directory: Where they lie. Those that lie beside the modules do not count.
        limit: Seconds that it may take.

    The figure ``alone`` is the import statement without any name of the package, and ``torch`` is torch itself.
    """
    command = [sys.executable, "-c", _IMPORTS, str(directory), bytecode]
    if bytecode == "with":
        _figures(command, limit)
    return _figures(command, limit)


def first_save(gb: float, directory: Path, limit: float) -> Figures:
    """The first save of a process, which starts the one that loads orbax, and a later one.

    The figure ``after`` is what it takes after its last byte is on the disk: to wait for that process, and to commit.
    """
    return _figures([sys.executable, "-c", _FIRST, str(gb), str(directory)], limit)


def listing(many: int, directory: Path, limit: float) -> Figures:
    """`xla-ckpt ls` of a directory of many tags, from the start of the process to its end."""
    fill_root(str(directory / "tags"), range(1, many + 1))
    table, seconds = _command(["ls", str(directory / "tags")], directory, limit)
    tags = [line.split("\t")[0] for line in table.splitlines()[1:]]  # tabs, since it is a pipe
    if tags != [str(number) for number in range(1, many + 1)]:
        raise ValueError(f"xla-ckpt ls does not list the tags 1 to {many}: {len(tags)} lines, such as {tags[:3]}")
    return {"seconds": seconds}


def showing(many: int, directory: Path, limit: float) -> Figures:
    """`xla-ckpt show` of a tag of many arrays, likewise."""
    xla_ckpt.save(directory / "arrays", "a", {"layers": [np.zeros(256, np.float32) for _ in range(many)]})
    table, seconds = _command(["show", str(directory / "arrays")], directory, limit)
    arrays = sum(line.startswith("layers/") for line in table.splitlines())
    if arrays != many:
        raise ValueError(f"xla-ckpt show lists {arrays} arrays, and not {many}")
    return {"seconds": seconds}


def fill_root(root: str, numbers: range) -> None:
    """Put tags with these numbers as names and sequences into a root: a save, and copies with heads of their own."""
    first = Path(root, "1")
    if not first.exists():
        xla_ckpt.save(root, "1", {"w": np.ones(4, np.float32)})
    manifest = manifest_json.parse_manifest((first / "manifest.json").read_bytes())
    for number in numbers:
        if number > 1:
            copy = shutil.copytree(first, Path(root, str(number)))
            head = replace(manifest.header, tag=copy.name, sequence=number)
            (copy / "manifest.json").write_bytes(manifest_json.dump_manifest(replace(manifest, header=head)))


def _command(words: list[str], directory: Path, limit: float) -> tuple[str, float]:
    """What a command prints, and its seconds: a process of its own, which finds caches of bytecode."""
    env = environment({"PYTHONPYCACHEPREFIX": str(directory / "bytecode")})
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "xla_ckpt", *words]
    _run(command, limit, env)
    began = time.perf_counter()
    table = _run(command, limit, env)
    return table, time.perf_counter() - began


def _figures(command: list[str], limit: float) -> Figures:
    figures: Figures = json.loads(_run(command, limit).splitlines()[-1])
    return figures


def _run(command: list[str], limit: float, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit, env=env or environment())
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-2000:])
    return done.stdout
