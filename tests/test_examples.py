"""The examples run, and show what they promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.runs import ROOT, environment


def program(name: str, *args: object) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *map(str, args)],
        capture_output=True, text=True, env=environment(), check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_killed_in_mid_save_and_resumed_bit_for_bit(tmp_path: Path) -> None:
    shown = program("kill_and_resume.py", "--root", tmp_path / "demo", "--steps", 20, "--save-every", 4)
    assert "all 20 losses bit-identical: yes; every tag sound: yes" in shown
    assert "half written" in shown


def test_saving_does_not_change_the_training(tmp_path: Path) -> None:
    losses = []
    for every in (2, 1000):
        log = tmp_path / f"{every}.jsonl"
        program("train_lm.py", "--root", tmp_path / str(every), "--steps", 7, "--save-every", every, "--log", log)
        losses.append([json.loads(line)["loss"] for line in log.read_text().splitlines()])
    assert losses[0] == losses[1]


def test_fsdp2_on_four_ranks_resumed_on_two_and_on_one() -> None:
    shown = program("fsdp2_reshard.py")
    assert "save on 4 rank(s)" in shown
    assert "load on 2 rank(s)" in shown
    assert "load on 1 rank(s)" in shown


def test_zero1_resumes_bit_for_bit_and_in_another_shape() -> None:
    shown = program("tp_zero1_resume.py")
    assert "20 losses after the resume as tp=2,dp=2: bit-identical, right" in shown
    assert "20 losses after the resume as tp=1,dp=2: largest relative difference" in shown
