"""A sample of `python -m tests.crash.ranks`: ranks that are lost at a message, and one error on all others.

And the instant between rank 0's last look at the others and the rename.
"""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.crash.ranks import BEGAN, LONG, TIMEOUT, Case, Told, model_of, numbers_in, wrong_with
from tests.jobs import finish, start_on_ranks
from xla_ckpt.engine import save as engine

SAMPLE = [
    Case("save", 0, signal.SIGSTOP, 1, "dp=3"),
    Case("save", 2, signal.SIGSTOP, 2, "pp=3"),
    Case("async save", 1, signal.SIGKILL, 2, "dp=3"),
    Case("load", 0, signal.SIGSTOP, 4, "dp=3"),
]


@pytest.mark.crash
@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_lost_rank(case: Case, tmp_path: Path) -> None:
    happened, wrong, told = wrong_with(case, tmp_path / "root", 3)
    assert happened
    assert wrong == []
    assert {t["error"] for t in told} == {"RankFailedError"}


def stops_before_the_rename(rank: int, root: Path) -> Told:
    """Rank 0 is stopped when it has looked at the others for the last time, and has not renamed its draft."""
    commit = engine.tags.commit

    def stopped(*args: Any, **options: Any) -> float:
        # To this thread: sent to the process, it may take effect only when this thread has gone on for a while.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return commit(*args, **options)

    engine.tags.commit = stopped
    try:
        xla_ckpt.save_checkpoint(root, "new", model_of(2), timeout=TIMEOUT, stale="ignore")
    except xla_ckpt.CheckpointError as error:
        return {"error": type(error).__name__, "rank": error.rank, "text": str(error)}
    return {"error": None}


@pytest.mark.crash
@pytest.mark.parametrize("overtaken", [False, True], ids=["goes on", "finds the tag saved by the next job"])
def test_rank_0_is_stopped_right_before_the_rename(overtaken: bool, tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "old", model_of(1))
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    zero, *others = start_on_ranks(stops_before_the_rename, 3, tmp_path, env=env)
    finish(others, timeout=LONG)
    told: list[Told] = [process.value() for process in others]
    assert [(t["error"], t["rank"], BEGAN in t["text"]) for t in told] == [("RankFailedError", 0, True)] * 2
    assert xla_ckpt.list_tags(tmp_path) == ["old"]
    if overtaken:
        xla_ckpt.save_checkpoint(tmp_path, "new", model_of(3), stale="ignore")
    zero.send_signal(signal.SIGCONT)
    finish([zero], timeout=LONG)
    last: Told = zero.value()
    assert last["error"] == ("SaveError" if overtaken else None), last
    assert xla_ckpt.list_tags(tmp_path) == ["old", "new"]
    model = model_of(0)
    xla_ckpt.load_checkpoint(tmp_path, "new", model=model)
    assert numbers_in(model) == [3 if overtaken else 2], "what the next job saved stays"
    assert not list(tmp_path.glob(".new-*"))
