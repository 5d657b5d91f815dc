"""Running python in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent


def names_in(folder: str | os.PathLike[str]) -> list[str]:
    """What lies in a directory, sorted, without the lease that a running job has there."""
    return sorted(name for name in os.listdir(folder) if name != ".lease")


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child: this checkout first, XLA on the CPU."""
    # Without those of this process, a child would have other packages than it where some lie in a folder of their own.
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": paths, "PJRT_DEVICE": "CPU", "PYTHONUNBUFFERED": "1", **(extra or {})}


def start(code: str, *args: object, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a python program; its output can be read line by line."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(env),
    )  # fmt: skip


def run(
    code: str, *args: object, env: Mapping[str, str] | None = None, ok: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a python program to its end; unless `ok` is False it must succeed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        capture_output=True, text=True, env=environment(env), timeout=240, check=False,
    )  # fmt: skip
    assert not ok or done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done
