"""The wheel and the source archive: what is in them, and that a program can use what was installed from them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import xla_ckpt

ROOT = Path(__file__).parent.parent

BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, "build_" + sys.argv[1])(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a checkout has for building: setuptools writes into the directory that it builds."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for package in ("xla_ckpt", "neuron_compat"):
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def built(kind: str, source: Path, into: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(into)], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return into / done.stdout.splitlines()[-1]


def modules_of(source: Path) -> set[str]:
    return {
        path.relative_to(source).as_posix()
        for package in ("xla_ckpt", "neuron_compat")
        for path in (source / package).rglob("*.py")
    }


def test_an_installed_wheel_works_without_the_checkout(source: Path, tmp_path: Path) -> None:
    wheel = built("wheel", source, tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")  # what installing a wheel of pure python does
    assert modules_of(source) <= names
    assert {"xla_ckpt/py.typed", "neuron_compat/py.typed"} <= names
    assert not any(name.startswith(("tests", "benchmarks", "docs")) for name in names)
    program = (
        "import torch, xla_ckpt, neuron_compat\n"
        "assert xla_ckpt.__file__.startswith(SITE), xla_ckpt.__file__\n"
        "xla_ckpt.save('ckpt', 'a', {'w': torch.arange(3)})\n"
        "assert xla_ckpt.restore('ckpt').tree['w'].tolist() == [0, 1, 2]\n"
    )
    (tmp_path / "program.py").write_text(f"SITE = {str(tmp_path / 'site')!r}\n{program}")
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    for command in ([sys.executable, "program.py"], [sys.executable, "-m", "xla_ckpt", "ls", "ckpt"]):
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    assert "a" in done.stdout.split()


def test_the_metadata_say_what_is_needed(source: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(built("wheel", source, tmp_path)) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
        (points,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        scripts = archive.read(points).decode()
    assert f"Version: {xla_ckpt.__version__}" in text
    assert "License-Expression: Apache-2.0" in text
    needs = {line.split(":")[1].split(";")[0].strip() for line in text.splitlines() if line.startswith("Requires-Dist")}
    assert {"numpy>=1.26", "torch>=2.9", "tqdm>=4.60"} <= needs
    assert "xla-ckpt = xla_ckpt.__main__:main" in scripts


def test_the_source_archive_can_be_built_from(source: Path, tmp_path: Path) -> None:
    archive = built("sdist", source, tmp_path)
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "out", filter="data")
    (unpacked,) = (tmp_path / "out").iterdir()
    assert {"README.md", "LICENSE", "pyproject.toml"} <= set(os.listdir(unpacked))
    with zipfile.ZipFile(built("wheel", unpacked, tmp_path)) as wheel:
        assert modules_of(source) <= set(wheel.namelist())
