"""What is skipped without torch_xla is what needs it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.runs import ROOT
from tests.xla import HAS_XLA, all_of_it_needs_xla

LEFT_OUT = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if all_of_it_needs_xla(path))


def test_some_modules_are_left_out() -> None:
    assert 5 < len(LEFT_OUT) < 30


@pytest.mark.skipif(HAS_XLA, reason="is about environments without torch_xla")
@pytest.mark.parametrize("path", LEFT_OUT, ids=lambda path: path.stem)
def test_a_module_that_is_left_out_cannot_be_imported(path: Path) -> None:
    """Else tests in it that could run would be skipped with the others."""
    with pytest.raises(ModuleNotFoundError, match="No module named 'torch_xla"):
        importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
