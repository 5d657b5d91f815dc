"""``make test-versions``: a short selection of tests with each of some versions of Python and of packages.

A leg is an environment as `make setup` or `make test-latest` makes it, with the pins of a requirements file, and what
is installed over it. docs/versions.md says what came of them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.runs import ROOT

HERE = Path(__file__).parent
LEGS_AT = ROOT / ".versions"
FAILED = "failed"
TESTS = ("tests/tags/test_orbax_process.py", "tests/cli/test_cli.py", "tests/arrays/test_arrays.py")
TORCHS = (
    "tests/arrays/test_arrays.py", "tests/api/test_training.py", "tests/dcp", "tests/topology/test_real_jobs.py",
    "tests/topology/test_strided_jobs.py", "tests/topology/test_strided_shards.py",
    "tests/topology/test_torch_wrappers.py", "tests/formats/test_dcp_restore.py", "tests/formats/test_dcp_versions.py",
    "tests/formats/test_dcp_writing.py",
)  # fmt: skip
"""Those in which torch does most: arrays and programs, sharded jobs, and DCP."""
COMPILED = (
    "tests/api/test_xla_loops.py", "tests/engine/test_growth.py", "tests/neuron/test_missing_libpython.py",
)  # fmt: skip
"""Those in which XLA and the interpreter do most."""
AVX2 = "--xla_backend_optimization_level=0 --xla_cpu_max_isa=AVX2"
"""XLA compiles otherwise for a processor without AVX-512."""
TRAINERS = tuple(f"tests/integrations/test_{name}.py" for name in ("resumed", "refused", "documented"))
"""Those of transformers and accelerate; those of Lightning are skipped unless `make test-trainers` has installed it."""


@dataclass(frozen=True)
class Leg:
    """One line of the table."""

    python: str | None
    """Its version; None is the one of the checkout's own environments."""

    pins: str
    """``dev``: torch 2.9.1 and torch_xla 2.9.0; ``latest``: the newest torch, without torch_xla."""

    over: str | None = None
    """A file of requirements in this folder, of packages that come before those of the pins."""

    tests: tuple[str, ...] = TESTS
    flags: str | None = None
    """``XLA_FLAGS`` in place of those that the tests set."""

    demo: bool = False
    """Whether ``make demo`` runs there, too."""


LEGS = {
    "torch": Leg(None, "latest", tests=TORCHS),
    "oldest": Leg("3.11", "dev", over="oldest.txt"),
    "python-3.12": Leg("3.12", "dev"),
    "python-3.13": Leg("3.13", "dev", tests=(*TESTS, *COMPILED), flags=AVX2, demo=True),
    "newest": Leg("3.13", "latest"),
    "trainers": Leg(None, "latest", over="trainers.txt", tests=TRAINERS),
}


def python_of(version: str) -> str | None:
    """A Python of this version, with the shared library that torch_xla loads; None if there is none here."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    works = f"import ctypes, ensurepip; ctypes.CDLL('libpython{version}.so.1.0')"
    for python in (f"python{version}", *map(str, sorted(versions.glob(f"{version}.*/bin/python{version}")))):
        try:
            if subprocess.run([python, "-c", works], capture_output=True, check=False).returncode == 0:
                return python
        except FileNotFoundError:
            continue
    return None


def environment_of(leg: Leg, *targets: str) -> Path | None:
    """The environment of a leg, when make has made these targets with it; None if there is no such Python."""
    variable, place = {"dev": ("VENV", ".venv"), "latest": ("LATEST", ".venv-latest")}[leg.pins]
    command = ["make"]
    if leg.python not in (None, f"{sys.version_info.major}.{sys.version_info.minor}"):
        python, place = python_of(leg.python), f".versions/{leg.python}-{leg.pins}"
        if python is None:
            return None
        command += [f"{variable}={place}", f"PYTHON={python}"]
    subprocess.run([*command, f"{place}/.ready", *targets], cwd=ROOT, check=True)
    return ROOT / place


def run(leg: Leg, tests: list[str], workers: str) -> str:
    """What came of the tests of a leg, or of others in its environment, with so many of pytest's workers."""
    environment = environment_of(leg, *["demo"] * leg.demo)
    if environment is None:
        return f"left out: there is no Python {leg.python} with a shared library here"
    paths = [str(ROOT)]
    if leg.over is not None:
        target = LEGS_AT / Path(leg.over).stem
        uv = [str(environment / "bin/uv"), "pip", "install", "--quiet", "--python", str(environment / "bin/python")]
        hashes = ["--no-deps", "--require-hashes", "-r", str(HERE / leg.over)]
        subprocess.run([*uv, "--target", str(target), *hashes], check=True)
        paths.insert(0, str(target))
    command = [str(environment / "bin/python"), "-m", "pytest", "-n", workers, "--dist", "worksteal", "-q"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if leg.flags is not None:
        env["XLA_FLAGS"] = leg.flags
    done = subprocess.run(
        [*command, *(tests or leg.tests)], cwd=ROOT, env=env, check=False, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    print(done.stdout, flush=True)  # as a whole: another leg may run at the same time
    return f"{FAILED} with exit code {done.returncode}" if done.returncode else "passed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leg", action="append", choices=LEGS, help="only this one; may be given several times")
    parser.add_argument("tests", nargs="*", help="in place of those of the leg")
    args = parser.parse_args()
    legs = args.leg or list(LEGS)
    # Of two legs each has a core: a second worker of one leg would take as long to import and to collect as the first.
    workers = "auto" if len(legs) == 1 else "1"
    with ThreadPoolExecutor(2) as pool:
        came = dict(zip(legs, pool.map(lambda name: run(LEGS[name], args.tests, workers), legs), strict=True))
    print("\n".join(f"{name}: {result}" for name, result in came.items()))
    return int(any(result.startswith(FAILED) for result in came.values()))


if __name__ == "__main__":
    sys.exit(main())
