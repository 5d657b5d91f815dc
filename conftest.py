"""Where torch_xla is not installed, what needs it is skipped; tests/README.md says how it is marked."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.xla import HAS_XLA, all_of_it_needs_xla

NEEDS_XLA = "needs torch_xla"

collect_ignore_glob = [
    "xla_ckpt/integrations/*.py",  # they cannot be imported where their trainers are not installed
    "tests/integrations/package_storage.py",  # a plugin, likewise
    "tests/integrations/lightning_runs.py",  # runs of one of them
    *(str(path) for path in Path("neuron_compat").rglob("*.py") if "\nabsent(__name__" in path.read_text()),
]
"""Modules without doctests that cannot be imported."""


class _Skipped(pytest.File):
    """A module that cannot be imported without torch_xla."""

    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip(f"{self.nodeid} {NEEDS_XLA}", allow_module_level=True)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path, parent: pytest.Collector
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Skip modules that cannot be imported."""
    found = yield
    if HAS_XLA or not found or file_path.suffix != ".py":
        return found
    return [_Skipped.from_parent(parent, path=file_path)] if all_of_it_needs_xla(file_path) else found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests and parameters."""
    for item in items:
        if not HAS_XLA and item.get_closest_marker("xla"):
            item.add_marker(pytest.mark.skip(reason=NEEDS_XLA))
