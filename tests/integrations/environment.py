"""Where the trainers are that the development environment lacks: `make test-trainers` puts them into .trainers.

They train on the accelerator of the machine, if it has one.
"""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest

from tests.runs import ROOT

TRAINERS = ROOT / ".trainers"
# Trainers take XLA's device where torch_xla is installed. `make test-trainers` runs them where it is not; the tests of
# the other environment, where somebody has run that, would find the trainers and fail.
if str(TRAINERS) not in sys.path and importlib.util.find_spec("torch_xla") is None:
    sys.path.append(str(TRAINERS))  # after everything else: it has nothing that is there already


def has_accelerator() -> bool:
    """Whether the jobs train on one. Then its kernels are those that give the same bits in each run."""
    import torch

    if not torch.accelerator.is_available():
        return False
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS asks for it where all has to be deterministic
    torch.use_deterministic_algorithms(True)
    return True


def needs(*modules: str) -> pytest.MarkDecorator:
    """Skips a test where a module is missing, saying so."""
    missing = [name for name in modules if not _is_there(name)]
    # No environment of ours has the large ones.
    target = "" if {"grain", "datasets"} & set(missing) else ": make test-trainers"
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} is not installed{target}")


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False
