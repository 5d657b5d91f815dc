"""The examples run, and show what they promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import xla_ckpt
from tests.nursery import bear
from tests.runs import ROOT, environment


def program(name: str, *args: object, ranks: int = 0) -> str:
    """Run an example to its end, under torchrun if it has `ranks`; what it prints."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    done = subprocess.run(
        [sys.executable, *launcher, str(ROOT / "examples" / name), *map(str, args)],
        capture_output=True, text=True, env=environment({"OMP_NUM_THREADS": "1"} if ranks else {}), check=False,
        timeout=280,
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
        args = ("--root", tmp_path / str(every), "--steps", 7, "--save-every", every, "--log", log)
        example = ROOT / "examples/train_lm.py"
        running = bear(example.read_text(), args, environment(), str(example))
        _, errors = running.communicate(200)
        assert running.returncode == 0, errors
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


@pytest.mark.timeout(600)  # two jobs of four processes
def test_a_script_for_neuronx_distributed_goes_on_where_it_stopped(tmp_path: Path) -> None:
    root, straight = tmp_path / "run", tmp_path / "straight"
    first = program("nxd_train.py", "--checkpoint_dir", root, "--steps", 4, ranks=4)
    assert "resumed" not in first
    assert xla_ckpt.list_tags(root) == ["step_3", "step_4"]
    (root / "step_4").rename(straight)  # as if it had been killed before
    again = program("nxd_train.py", "--checkpoint_dir", root, "--steps", 2, ranks=4)
    assert "resumed after step 3" in again
    assert xla_ckpt.list_tags(root) == ["step_4", "step_5"]
    losses = [[line for line in shown.splitlines() if line.startswith("step ")] for shown in (first, again)]
    assert list(map(len, losses)) == [4, 2]
    assert losses[0][3] == losses[1][0]

    files = {str(file.relative_to(straight)) for file in straight.rglob("*.pt")}
    assert {f for f in files if ".tensors/" not in f} == {"scheduler.pt", "user_content.pt"} | {
        f"{part}/dp_rank_{dp:02d}_tp_rank_{tp:02d}_pp_rank_00.pt{end}"
        for part, dp in (("model", 0), ("optim", 0), ("optim", 1)) for tp in range(2) for end in ("", ".info.pt")
    }  # fmt: skip
    assert "optim/dp_rank_01_tp_rank_00_pp_rank_00.pt.tensors/tensor_0.pt" in files
    for name in ("checkpoint", "done", *files):  # weights, optimizer and scheduler are the same, byte for byte
        assert (root / "step_4" / name).read_bytes() == (straight / name).read_bytes() or name == "user_content.pt"
    for tag, step in (("step_4", 4), ("step_5", 5)):
        assert xla_ckpt.verify(root, tag).ok
        assert torch.load(root / tag / "user_content.pt", weights_only=True)["total_steps"] == step
