"""The wheel and the source archive: what is in them, and that a program can use what was installed from them."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
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


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment, in which nothing but the wheel is installed, as a person installs it."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment)
    pip = (sys.executable, "-m", "pip", "--python", environment / "bin/python")  # its own pip would take seconds
    said(*pip, "install", "--quiet", "--no-index", "--no-deps", wheel)
    return environment


def said(*command: object, cwd: Path | None = None) -> str:
    """What a command prints, in an environment without ours."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    words = list(map(str, command))
    done = subprocess.run(words, cwd=cwd or "/", env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def test_the_wheel_has_the_packages_and_nothing_else(source: Path, wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert modules_of(source) | {"xla_ckpt/py.typed", "neuron_compat/py.typed"} == {
        name for name in names if ".dist-info/" not in name
    }
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_what_needs_no_dependency_works_in_an_empty_environment(environment: Path) -> None:
    assert said(environment / "bin/xla-ckpt", "--version") == f"xla-ckpt {xla_ckpt.__version__}\n"
    for words in (["--help"], ["ls", "--help"], ["selftest", "--help"]):
        assert "usage: xla-ckpt" in said(environment / "bin/xla-ckpt", *words)
    program = (
        "import importlib.metadata, neuron_compat, xla_ckpt; "
        "assert importlib.metadata.version('xla-ckpt') == xla_ckpt.__version__"
    )
    said(environment / "bin/python", "-c", program)


def test_an_installed_wheel_works_without_the_checkout(environment: Path, tmp_path: Path) -> None:
    """With the dependencies of the environment of the tests, and not with its editable installation of this library."""
    (site,) = environment.glob("lib/python3*/site-packages")
    theirs = site / "dependencies.pth"
    theirs.write_text(sysconfig.get_path("purelib") + "\n")
    program = (
        "import numpy, xla_ckpt, neuron_compat\n"
        f"assert xla_ckpt.__file__.startswith({str(site)!r}), xla_ckpt.__file__\n"
        "xla_ckpt.save('ckpt', 'a', {'w': numpy.arange(3)})\n"
        "assert xla_ckpt.restore('ckpt').tree['w'].tolist() == [0, 1, 2]\n"
    )
    (tmp_path / "program.py").write_text(program)
    try:
        said(environment / "bin/python", "program.py", cwd=tmp_path)
        assert "a" in said(environment / "bin/xla-ckpt", "ls", "ckpt", cwd=tmp_path).split()
        assert "a" in said(environment / "bin/python", "-m", "xla_ckpt", "ls", "ckpt", cwd=tmp_path).split()
    finally:
        theirs.unlink()


def test_the_metadata_say_what_is_needed(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
        (points,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        scripts = archive.read(points).decode()
    assert f"Version: {xla_ckpt.__version__}" in text
    assert "License-Expression: Apache-2.0" in text
    needs = {line.split(":")[1].split(";")[0].strip() for line in text.splitlines() if line.startswith("Requires-Dist")}
    assert {"numpy>=1.26", "torch>=2.9", "tqdm>=4.60"} <= needs
    assert "xla-ckpt = xla_ckpt.__main__:main" in scripts


def test_the_metadata_are_complete(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    for field in ("Name", "Summary", "Keywords", "Requires-Python", "License-Expression", "License-File"):
        assert metadata[field], field
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
    classifiers = metadata.get_all("Classifier", [])
    assert {"Typing :: Typed", "Operating System :: POSIX :: Linux"} <= set(classifiers)
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(classifiers)
    # Addresses of registries are those of the machine that built it; this project has no home page to name.
    assert not {"Home-page", "Download-URL", "Project-URL"} & set(metadata)
    assert not [need for need in metadata.get_all("Requires-Dist", []) if "://" in need]


def test_the_oldest_leg_has_the_lower_bounds(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(name).decode()
    bounds = dict(re.findall(r"^Requires-Dist: ([\w-]+)(?:<[\d.]+,)?>=([\d.]+)(?:,<[\d.]+)?$", text, re.MULTILINE))
    bounds.pop("torch", None)  # that of the pins: an older one is another environment
    oldest = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "tests/versions/oldest.txt").read_text(), re.MULTILINE))
    assert {"numpy", "xxhash"} <= set(bounds)
    for package, bound in bounds.items():
        assert (oldest[package.replace("_", "-")] + ".").startswith(bound + "."), package


def test_the_source_archive_can_be_built_from(source: Path, tmp_path: Path) -> None:
    archive = built("sdist", source, tmp_path)
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "out", filter="data")
    (unpacked,) = (tmp_path / "out").iterdir()
    assert {"README.md", "LICENSE", "pyproject.toml"} <= set(os.listdir(unpacked))
    with zipfile.ZipFile(built("wheel", unpacked, tmp_path)) as wheel:
        assert modules_of(source) <= set(wheel.namelist())
