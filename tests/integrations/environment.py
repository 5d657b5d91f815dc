"""Where the trainers are that the development environment lacks: `make test-trainers` puts them into .trainers."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tests.runs import ROOT

TRAINERS = ROOT / ".trainers"
# Trainers take XLA's device where torch_xla is installed. `make test-trainers` runs them where it is not; the tests of
# the other environment, where somebody has run that, would find the trainers and fail.
if str(TRAINERS) not in sys.path and importlib.util.find_spec("torch_xla") is None:
    sys.path.append(str(TRAINERS))  # after everything else: it has nothing that is there already


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
