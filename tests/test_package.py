"""The wheel and the source archive: what is in them, and that a program can use what was installed from them."""

from __future__ import annotations

import email
import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint
import pytest
import torch

import xla_ckpt
from tests.buckets.s3_server import S3Server
from tests.xla import HAS_XLA

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


def clean(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment variables of a process that finds nothing of this checkout."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | dict(more or {})


def said(*command: object, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """What a command prints, in an environment without ours."""
    words = list(map(str, command))
    done = subprocess.run(words, cwd=cwd or "/", env=clean(env), capture_output=True, text=True, check=False)
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


class Installed:
    """A new environment, into which the wheel is installed with one set of extras after the other, as a person does it.

    uv takes the packages of the pinned versions from its cache, where `make setup` has put them.
    """

    def __init__(self, wheel: Path, at: Path) -> None:
        self._wheel, self._at = wheel, at
        self.uv = Path(sys.executable).parent / "uv"
        said(self.uv, "venv", "--quiet", "--python", sys.executable, at)

    def add(self, extras: str = "") -> None:
        """Install the wheel, and what these extras bring: ``[orbax]``."""
        pins = ROOT / f"requirements-{'dev' if HAS_XLA else 'latest'}.txt"
        install = (self.uv, "pip", "install", "--quiet", "--python", self._at / "bin/python", "--constraint", pins)
        said(*install, f"xla-ckpt{extras} @ file://{self._wheel}")

    def packages(self) -> set[str]:
        listed = said(self.uv, "pip", "freeze", "--quiet", "--python", self._at / "bin/python")
        return {line.split("==")[0].split(" @ ")[0] for line in listed.splitlines()}

    def nbytes(self) -> int:
        return sum(path.lstat().st_size for path in self._at.rglob("*") if not path.is_symlink() and path.is_file())

    def command(self, *words: object, cwd: Path, code: int = 0) -> str:
        """What ``xla-ckpt`` prints, and with which exit code it has to end."""
        command = [self._at / "bin/xla-ckpt", *map(str, words)]
        done = subprocess.run(command, cwd=cwd, env=clean(), capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr[-3000:]
        return done.stdout + done.stderr

    def python(self, program: str, cwd: Path, env: Mapping[str, str] | None = None) -> str:
        return said(self._at / "bin/python", "-c", textwrap.dedent(program), cwd=cwd, env=env)


def needs(package: str, extra: str) -> str:
    """What each refusal ends with."""
    return f"needs the package {package}, which is not installed*Install it: pip install 'xla-ckpt[[]{extra}]'.\n"


def says(text: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(text, f"*{pattern}")


@pytest.fixture
def tags(tmp_path: Path) -> Path:
    """A directory with roots of tags that were saved where everything is installed."""
    folder = tmp_path / "tags"
    model = torch.nn.Linear(4, 4)
    for tag in ("a", "b"):
        xla_ckpt.save_checkpoint(
            folder / "run", tag, model, torch.optim.AdamW(model.parameters()), user_content={"s": 1}
        )
        torch.nn.init.zeros_(model.weight)
    xla_ckpt.save(folder / "arrays", "a", {"w": np.arange(8.0)})
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "theirs/a", {"w": jax.numpy.arange(8.0)})
    return folder


@pytest.mark.timeout(900)  # uv may have to fetch packages
def test_each_extra_brings_what_it_is_for(wheel: Path, tags: Path, tmp_path: Path, s3: S3Server) -> None:
    """One environment, which grows."""
    small = Installed(wheel, tmp_path / "environment")
    small.add()
    alone_it_looks_at_tags_and_converts_them(small, tags)
    alone_it_says_which_extra_else_takes(small, tags)
    small.add("[objects]")
    with_objects_it_saves_to_buckets(small, tags, s3)
    small.add("[orbax]")
    with_orbax_it_saves_into_directories_and_reads_those_of_orbax(small, tags)


def alone_it_looks_at_tags_and_converts_them(small: Installed, tags: Path) -> None:
    assert not small.packages() & {"torch", "torch-xla", "jax", "jaxlib", "orbax-checkpoint", "tensorstore", "obstore"}
    assert small.nbytes() < 100_000_000, "numpy is most of it"
    assert "newest" in small.command("ls", "run", cwd=tags)
    assert "model/weight" in small.command("show", "run/a", cwd=tags)
    assert small.command("verify", "run", "--all", cwd=tags).count("sound") == 2
    assert "model/weight" in small.command("diff", "run/a", "run/b", cwd=tags, code=1)
    small.command("view", "run", "--html", "run.html", cwd=tags)
    assert "model" in (tags / "run.html").read_text()
    small.command("convert", "run/a", "exported", "--to", "safetensors", cwd=tags)
    assert (tags / "exported/model.safetensors").is_file()
    program = """
    import numpy, sys, xla_ckpt
    assert 'site-packages' in xla_ckpt.__file__, xla_ckpt.__file__
    assert xla_ckpt.restore('arrays').tree['w'].tolist() == list(range(8))
    for name in xla_ckpt.__all__:
        getattr(xla_ckpt, name)
    """
    small.python(program, tags)


def alone_it_says_which_extra_else_takes(small: Installed, tags: Path) -> None:
    before = sorted(tags.rglob("*"))
    for words, package, extra in (
        (["show", "theirs/a"], "tensorstore", "orbax"),
        (["verify", "theirs/a"], "tensorstore", "orbax"),
        (["ls", "s3://bucket/run"], "obstore", "objects"),
        (["convert", "run/a", "new", "--to", "native"], "orbax", "orbax"),
        (["convert", "run/a", "new", "--to", "dcp"], "torch", "torch"),
        (["convert", "run/a", "new", "--to", "xser"], "torch", "torch"),
        (["convert", "run/a", "new.pt", "--to", "torch"], "torch", "torch"),
    ):
        assert says(small.command(*words, cwd=tags, code=2), needs(package, extra)), words
    program = """
    import numpy, xla_ckpt
    def save(**options):
        xla_ckpt.save('new', 'a', {'w': numpy.arange(3)}, **options)
    def of_dcp():
        import xla_ckpt.dcp
    def of_nxd():
        from neuron_compat.nxd import initialize_parallel_model
    for call in (save, lambda: save(async_save=True), of_dcp, of_nxd):
        try:
            call()
        except xla_ckpt.MissingPackageError as error:
            assert isinstance(error, ImportError)
            print(error)
    """
    told = small.python(program, tags).splitlines(keepends=True)
    assert len(told) == 4, told
    for text, package in zip(told, ("orbax", "orbax", "torch", "torch"), strict=True):
        assert says(text, needs(package, package)), text
    assert sorted(tags.rglob("*")) == before, "nothing was written"


def with_objects_it_saves_to_buckets(small: Installed, tags: Path, s3: S3Server) -> None:
    program = f"""
    import numpy, sys, xla_ckpt
    root = 's3://{s3.new_bucket()}/run'
    xla_ckpt.save(root, 'a', {{'w': numpy.arange(3)}})
    assert xla_ckpt.restore(root).tree['w'].tolist() == [0, 1, 2]
    assert not {{'jax', 'orbax', 'torch'}} & set(sys.modules)
    """
    small.python(program, tags, s3.environment)


def with_orbax_it_saves_into_directories_and_reads_those_of_orbax(small: Installed, tags: Path) -> None:
    assert "torch" not in small.packages()
    program = """
    import jax, numpy, xla_ckpt
    xla_ckpt.save('saved', 'a', {'w': numpy.arange(3), 'v': jax.numpy.arange(4)})
    tree = xla_ckpt.restore('saved', 'a').tree
    assert tree['w'].tolist() == [0, 1, 2] and isinstance(tree['v'], jax.Array)
    assert xla_ckpt.restore('theirs/a').tree['w'].tolist() == list(range(8))
    """
    small.python(program, tags)
    assert "a" in small.command("ls", "saved", cwd=tags).split()
    with_orbax = small.packages()
    small.add("[jax]")
    assert small.packages() == with_orbax, "orbax brings jax, so that both extras are one"


@pytest.mark.timeout(900)  # torch comes with 7 GB
def test_with_torch_it_saves_models_and_what_torch_reads(wheel: Path, tags: Path, tmp_path: Path) -> None:
    installed = Installed(wheel, tmp_path / "environment")
    installed.add("[torch]")
    program = """
    import torch, xla_ckpt
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    xla_ckpt.load_checkpoint('run', model=model, optimizer=optimizer)
    xla_ckpt.save_checkpoint('trained', 'a', model, optimizer)
    for layout in ('native', 'dcp', 'xser'):
        xla_ckpt.convert('trained/a', f'as_{layout}', to=layout)
    """
    installed.python(program, tags)
    for layout in ("native", "dcp", "xser"):
        assert "sound" in installed.command("verify", f"as_{layout}", cwd=tags)


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
    bound = r'^Requires-Dist: ([\w-]+)(?:<[\d.]+,)?>=([\d.]+)(?:,<[\d.]+)?(?:; extra == "orbax")?$'
    bounds = dict(re.findall(bound, text, re.MULTILINE))
    oldest = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "tests/versions/oldest.txt").read_text(), re.MULTILINE))
    assert {"numpy", "xxhash", "jax", "orbax-checkpoint"} <= set(bounds)
    for package, lowest in bounds.items():
        assert (oldest[package.replace("_", "-")] + ".").startswith(lowest + "."), package


def test_the_source_archive_can_be_built_from(source: Path, tmp_path: Path) -> None:
    archive = built("sdist", source, tmp_path)
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "out", filter="data")
    (unpacked,) = (tmp_path / "out").iterdir()
    assert {"README.md", "LICENSE", "pyproject.toml"} <= set(os.listdir(unpacked))
    with zipfile.ZipFile(built("wheel", unpacked, tmp_path)) as wheel:
        assert modules_of(source) <= set(wheel.namelist())
