"""``make test-versions``: a short selection of tests with each of some versions of Python and of packages.

A leg is an environment as `make setup` or `make test-latest` makes it, with the pins of a requirements file, and what
is installed over it. docs/versions.md says what came of them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.runs import ROOT

HERE = Path(__file__).parent
LEGS_AT = ROOT / ".versions"
FAILED = "failed"
TESTS = ("tests/tags/test_orbax_process.py", "tests/cli/test_cli.py", "tests/arrays/test_arrays.py")


@dataclass(frozen=True)
class Leg:
    """One line of the table."""

    python: str
    pins: str
    """``dev``: torch 2.9.1 and torch_xla 2.9.0; ``latest``: the newest torch, without torch_xla."""

    over: str | None = None
    """A file of requirements in this folder, of packages that come before those of the pins."""


LEGS = {
    "oldest": Leg("3.11", "dev", over="oldest.txt"),
    "python-3.12": Leg("3.12", "dev"),
    "python-3.13": Leg("3.13", "dev"),
    "newest": Leg("3.13", "latest"),
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


def environment_of(leg: Leg) -> Path | None:
    """The environment of a leg, which is made unless it is there; None if there is no such Python."""
    variable, name = {"dev": ("VENV", ".venv"), "latest": ("LATEST", ".venv-latest")}[leg.pins]
    if leg.python == f"{sys.version_info.major}.{sys.version_info.minor}":
        return ROOT / name  # the checkout's own, which make has seen to
    python, place = python_of(leg.python), f".versions/{leg.python}-{leg.pins}"
    if python is None:
        return None
    subprocess.run(["make", f"{place}/.ready", f"{variable}={place}", f"PYTHON={python}"], cwd=ROOT, check=True)
    return ROOT / place


def run(leg: Leg, tests: list[str]) -> str:
    """What came of the tests of a leg."""
    environment = environment_of(leg)
    if environment is None:
        return f"left out: there is no Python {leg.python} with a shared library here"
    paths = [str(ROOT)]
    if leg.over is not None:
        target = LEGS_AT / Path(leg.over).stem
        uv = [str(environment / "bin/uv"), "pip", "install", "--quiet", "--python", str(environment / "bin/python")]
        hashes = ["--no-deps", "--require-hashes", "-r", str(HERE / leg.over)]
        subprocess.run([*uv, "--target", str(target), *hashes], check=True)
        paths.insert(0, str(target))
    command = [str(environment / "bin/python"), "-m", "pytest", "-n", "auto", "--dist", "worksteal", "-q", *tests]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    code = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
    return f"{FAILED} with exit code {code}" if code else "passed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leg", action="append", choices=LEGS, help="only this one; may be given several times")
    parser.add_argument("tests", nargs="*", default=TESTS)
    args = parser.parse_args()
    came = {name: run(LEGS[name], list(args.tests)) for name in args.leg or LEGS}
    print("\n".join(f"{name}: {result}" for name, result in came.items()))
    return int(any(result.startswith(FAILED) for result in came.values()))


if __name__ == "__main__":
    sys.exit(main())
