"""House rules that no linter knows."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT, environment

HOME_OF_PATHS = "xla_ckpt/tree/schema.py"
PATHS_OF_THE_STATE = re.compile(
    r"^(model|optimizer|scheduler|extras|user_content)(/|$)|param_groups|^(state|master|per_rank|ranks|step)$"
    r"|(^|/)(state|master|ranks)/|exp_avg|momentum_buffer"
)
FOREIGN = {
    "xla_ckpt/__init__.py": {"state"},  # a package
    "xla_ckpt/cli/facts.py": {"ranks"},  # keys of what the commands print
    "xla_ckpt/cli/render.py": {"ranks"},
    # Folders of neuronx-distributed's tags, and keys of its files.
    "xla_ckpt/layouts/nxd/convert_zero.py": {"model"},
    "xla_ckpt/layouts/nxd/layout.py": {"model/"},
    "xla_ckpt/layouts/nxd/plan.py": {"model/", "param_groups", "state"},
    "xla_ckpt/layouts/nxd/rank_files.py": {"model"},
    "xla_ckpt/layouts/nxd/scan.py": {"model", "optimizer", "scheduler"},
    "xla_ckpt/layouts/nxd/state.py": {"param_groups", "state", "the optimizer of a rank file has no param_groups"},
    "xla_ckpt/layouts/nxd/tags.py": {"model"},
}
"""Strings that look like paths of a state, and are words of something else."""

SOURCES = sorted(p for package in ("xla_ckpt", "neuron_compat") for p in (ROOT / package).rglob("*.py"))
FRAMEWORKS = re.compile(r"\b(torch|torch_xla|jax|orbax|numpy|tensorstore)\b")


def imported(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, env=environment(), check=True
    )
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


def test_import_is_cheap() -> None:
    modules = imported("import xla_ckpt, neuron_compat")
    assert "xla_ckpt" in modules
    assert not [m for m in modules if FRAMEWORKS.match(m)]


def test_listing_tags_needs_no_framework() -> None:
    modules = imported("import xla_ckpt; xla_ckpt.list_tags('/nowhere'); xla_ckpt.has_checkpoint('/nowhere')")
    assert not {m for m in modules if re.match(r"(torch|torch_xla|jax|orbax)\b", m)}


def test_the_first_torch_name_loads_neither_torch_xla_nor_jax_nor_orbax() -> None:
    modules = imported(
        "import xla_ckpt; xla_ckpt.save_checkpoint, xla_ckpt.restore, xla_ckpt.RNGState, xla_ckpt.ArraySpec"
    )
    assert "torch" in modules
    assert not {m for m in modules if re.match(r"(torch_xla|jax|orbax)\b", m)}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_are_named_for_something(path: Path) -> None:
    assert path.stem not in ("utils", "common", "helpers", "misc", "types")


def strings(path: Path) -> set[str]:
    """The strings of a module that are no documentation."""
    tree = ast.parse(path.read_text())
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation
    }


def test_paths_of_the_state_are_spelled_in_one_place() -> None:
    """A path that is spelled twice is changed once."""
    spelled = {
        name: {text for text in strings(path) if PATHS_OF_THE_STATE.search(text)}
        for path in SOURCES
        if (name := str(path.relative_to(ROOT))).startswith("xla_ckpt/")
    }
    assert {"model", "optimizer", "param_groups", "master", "step", "exp_avg"} <= spelled.pop(HOME_OF_PATHS)
    assert {name: found for name, found in spelled.items() if found} == FOREIGN


def test_every_public_name_is_documented() -> None:
    import xla_ckpt

    for name in xla_ckpt.__all__:
        value = getattr(xla_ckpt, name)
        assert name == "__version__" or (value.__doc__ or "").strip(), name
    assert set(xla_ckpt.__all__) <= set(dir(xla_ckpt))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = xla_ckpt.nonsense


def test_no_download_addresses_are_committed() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout: what is committed is unknown")
    assert not [name for name in tracked if name.endswith(("uv.lock", "pylock.toml"))]
    assert "http" not in (ROOT / "requirements-dev.txt").read_text()
