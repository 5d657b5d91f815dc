"""The real torch_checkpointing, run by an interpreter that has torch 2.11 or newer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.runs import ROOT

FIXTURES = ROOT / "tests/fixtures/torch_checkpointing"
_PACKAGE = ROOT / ".peers"
_IS_NEW = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 11)
_PYTHON = Path(sys.executable) if _IS_NEW else ROOT / ".venv-latest/bin/python"

needs_package = pytest.mark.skipif(
    not (_PYTHON.exists() and (_PACKAGE / "torch_checkpointing").exists()),
    reason="needs torch_checkpointing in .peers (make bench brings it) and torch 2.11 (make test-latest brings it)",
)


def run_package(*args: object) -> None:
    """Run the program to its end."""
    done = subprocess.run(
        [str(_PYTHON), str(FIXTURES / "package.py"), *map(str, args)],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(_PACKAGE)}, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"[-4000:]
