"""Ctrl-C and other interrupts of calls in a program that goes on: a sample of what `make interrupts` does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.crash import interrupts
from tests.crash.instants import CLOCKS
from tests.runs import environment

pytestmark = pytest.mark.crash

SAMPLE = ("save", "load", "load, read twice", "dcp.load", "convert to native", "xla-ckpt verify")


def test_a_sample_of_the_interrupts_loses_nothing_and_reaches_the_program(tmp_path: Path) -> None:
    file = tmp_path / "results"
    chosen = [word for name in SAMPLE for word in ("--operation", name)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash.interrupts", *chosen, "--each", "4", "--json", str(file)],
        env=environment({"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}),
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    cases = [interrupts.case_of(line) for line in file.read_text().splitlines()]
    assert {case.operation for case in cases} == set(SAMPLE)
    assert {case.clock for case in cases} == set(CLOCKS)
    assert sum(case.reached for case in cases) > len(cases) / 2
    assert [case.problems for case in cases if case.problems] == []
