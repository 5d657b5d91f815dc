"""House rules that no linter knows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import ROOT, environment

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
