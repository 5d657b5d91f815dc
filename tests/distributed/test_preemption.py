"""A notice that one rank gets has all ranks save the same step."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import xla_ckpt
from tests.jobs import run_alone, run_on_ranks, torchrun_command, write_call
from tests.runs import environment

WORLD, STEPS = 4, 1000


def trains_until_told(rank: int, root: Path, how: str, every: int) -> tuple[int, str | None, int]:
    """Train; rank 1 has rank 2 noticed in step 5. (step that was saved, why, what SIGTERM does afterwards)."""
    pids: list[int] = [0] * WORLD
    dist.all_gather_object(pids, os.getpid())
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    told = threading.Event()
    asked = told.is_set if how == "function" and rank == 2 else None
    file = root.with_name("stop") if how == "file" else None
    with xla_ckpt.PreemptionGuard(file=file, asked=asked, every=every) as guard:
        for step in range(STEPS):
            with torch.no_grad():
                model.weight.fill_(step)
            if step == 5 and rank == 1 and how == "signal":
                os.kill(pids[2], signal.SIGTERM)
            if step == 5 and rank == 1 and file is not None:
                file.touch()
            if step == 5 and rank == 2:
                told.set()
            if guard.should_save():
                assert guard.should_save(), "it stays so"
                xla_ckpt.save_checkpoint(root, f"step_{step}", model, user_content=step)
                break
    return step, guard.reason, int(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)


@pytest.mark.parametrize(("how", "every"), [("signal", 1), ("signal", 4), ("file", 1), ("function", 1)])
def test_all_ranks_save_the_same_step(tmp_path: Path, how: str, every: int) -> None:
    found = run_on_ranks(trains_until_told, WORLD, tmp_path / "root", how, every)
    steps = {step for step, _, _ in found}
    assert len(steps) == 1, found
    (step,) = steps
    assert 5 <= step < STEPS - 1
    assert step % every == every - 1
    (reason,) = {reason for _, reason, _ in found}
    assert reason is not None
    assert {"signal": "SIGTERM, on rank 2", "file": "is there", "function": "on rank 2"}[how] in reason
    assert all(back for _, _, back in found), "the former handler is back"
    assert xla_ckpt.list_tags(tmp_path / "root") == [f"step_{step}"]
    model = torch.nn.Linear(4, 4)
    assert xla_ckpt.load_checkpoint(tmp_path / "root", model=model).user_content == step
    assert (model.weight == step).all()


def a_question_fails(rank: int) -> str:
    def asked() -> bool:
        if rank == 3:
            raise KeyError("no such metadata")
        return False

    guard = xla_ckpt.PreemptionGuard(signals=(), asked=asked)
    with pytest.raises(xla_ckpt.SaveError) as caught:
        guard.should_save()
    return str(caught.value)


def test_a_question_that_fails_on_one_rank_fails_on_all() -> None:
    found = run_on_ranks(a_question_fails, WORLD)
    assert all("no such metadata" in text and "rank 3" in text.replace("=", " ") for text in found), found


def a_rank_stays_away(rank: int) -> str:
    if rank == 1:
        return ""
    with pytest.raises(xla_ckpt.RankFailedError) as caught:
        xla_ckpt.PreemptionGuard(signals=(), timeout=2).should_save()
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named() -> None:
    found = run_on_ranks(a_rank_stays_away, 3)
    assert all("rank 1 did not answer" in text for text in found if text), found


def alone() -> list[bool]:
    with xla_ckpt.PreemptionGuard(signals=(signal.SIGUSR1,)) as guard:
        before = guard.should_save()
        signal.raise_signal(signal.SIGUSR1)
        return [before, guard.should_save(), guard.reason == "SIGUSR1"]


def test_one_process_asks_nobody() -> None:
    assert run_alone(alone) == [False, True, True]


def in_a_thread() -> str:
    found: list[str] = []

    def work() -> None:
        try:
            xla_ckpt.PreemptionGuard()
        except xla_ckpt.UsageError as error:
            found.append(str(error))
        found.append(str(xla_ckpt.PreemptionGuard(signals=()).should_save()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return " / ".join(found)


def test_another_thread_receives_no_signals() -> None:
    found = run_alone(in_a_thread)
    assert "the main one" in found
    assert found.endswith("False")


def test_it_says_how_often_it_meets() -> None:
    with pytest.raises(xla_ckpt.UsageError, match="1 or more"):
        xla_ckpt.PreemptionGuard(every=0)


def the_launcher_is_told(rank: int, root: Path) -> None:
    """What a rank does under torchrun, which passes SIGTERM on to all of them."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    with xla_ckpt.PreemptionGuard() as guard:
        for step in range(10**9):
            dist.barrier()
            if step == 3 and rank == 0:
                os.kill(os.getppid(), signal.SIGTERM)
            if guard.should_save():
                xla_ckpt.save_checkpoint(root, f"step_{step}", model)
                return


def test_under_torchrun(tmp_path: Path) -> None:
    """Its agent ends with an error, as it does whenever it is told to end; the checkpoint is there."""
    write_call(tmp_path, the_launcher_is_told, tmp_path / "root")
    done = subprocess.run(
        torchrun_command(tmp_path, "--standalone", "--nproc-per-node=2"),
        capture_output=True, text=True, env=environment({"OMP_NUM_THREADS": "1"}), timeout=240, check=False,
    )  # fmt: skip
    assert "SIGTERM" in done.stderr
    (tag,) = xla_ckpt.list_tags(tmp_path / "root")
    assert xla_ckpt.verify(tmp_path / "root", tag).ok
