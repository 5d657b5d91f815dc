"""A sample of `python -m tests.crash.ranks`: ranks that are lost at a message, and one error on all others.

And the instant between rank 0's last look at the others and the rename.
"""

from __future__ import annotations

import datetime
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.crash.ranks import (
    ALL_CTRL_C,
    BEGAN,
    CTRL_C,
    FULL,
    KILLED,
    LONG,
    NAPS,
    RAISES,
    STOPPED,
    Case,
    Told,
    model_of,
    numbers_in,
    outcome_of,
)
from tests.jobs import finish, start_on_ranks, store_of_torchrun
from tests.runs import names_in
from xla_ckpt.distributed.exchange import Exchange

SHORT = 2.0
"""The timeout of calls in which a rank is lost, in seconds."""

SAMPLE = [
    Case("save", 0, STOPPED, 1, "dp=3", SHORT),
    Case("async save", 1, KILLED, 2, "pp=3", SHORT),
    Case("load", 0, STOPPED, 4, "dp=3", SHORT),
    Case("save, parity", 1, RAISES, 3, "dp=2", SHORT),
    Case("save, dcp", 1, NAPS, 2, "dp=2", SHORT),
    Case("save, xser", 1, FULL, 1, "dp=2", SHORT),
    Case("dcp.save", 1, KILLED, 3, "dp=3", SHORT),
    Case("dcp.async_save", 0, STOPPED, 2, "dp=3", SHORT),
    Case("dcp.load", 2, KILLED, 2, "dp=3", SHORT),
    Case("load", 2, CTRL_C, 3, "dp=3", SHORT),
    Case("load", 0, ALL_CTRL_C, 4, "dp=4", SHORT),
    Case("dcp.load", 1, CTRL_C, 2, "dp=3", SHORT),
]
ERRORS = {
    KILLED: "RankFailedError", STOPPED: "RankFailedError", NAPS: None, FULL: "StorageError", CTRL_C: "RankFailedError",
    ALL_CTRL_C: "KeyboardInterrupt",
}  # fmt: skip


@pytest.mark.crash
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_rank_that_is_lost_or_fails(case: Case, tmp_path: Path) -> None:
    outcome = outcome_of(case, tmp_path / "root")
    assert outcome.happened
    assert outcome.wrong == []
    if case.fault in ERRORS:
        assert {told["error"] for told in outcome.told if told["self"] != case.victim} == {ERRORS[case.fault]}


@pytest.mark.crash
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_rank_is_lost_when_rank_0_has_committed_a_checkpoint_of_dcps(tmp_path: Path) -> None:
    """torch's last collective fails on rank 0, and has reached other ranks: the checkpoint is there, and all say so."""
    outcome = outcome_of(Case("dcp.save", 2, STOPPED, 5, "dp=3", SHORT), tmp_path / "root")
    assert outcome.happened
    assert outcome.wrong == []
    assert [(told["self"], told["error"]) for told in outcome.told if told["self"] != 2] == [(0, None), (1, None)]


def stops_at_the_commit(rank: int, root: Path, where: str) -> Told:
    """Rank 0 is stopped when it has looked at the others for the last time, and its tag is not there yet."""
    from xla_ckpt.tags.orbax_commit import ORBAX_COMMITTER, OrbaxCommitter
    from xla_ckpt.tags.root import Transaction

    owner: Any = Transaction if where == "before the last look" else OrbaxCommitter
    commit = owner.commit

    def commits(*args: Any, **options: Any) -> Any:
        # To this thread: sent to the process, it may take effect only when this thread has gone on for a while.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return commit(*args, **options)

    owner.commit = commits
    if rank == 0:
        ORBAX_COMMITTER.wait_ready(LONG)  # else its start may take longer than the timeout of the save
    store = torch.distributed.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]))
    store.set(f"ready/{rank}", "")
    store.wait(["ready/0", "ready/1"], datetime.timedelta(seconds=LONG))
    try:
        xla_ckpt.save_checkpoint(root, "new", model_of(2), options=xla_ckpt.SaveOptions(timeout=SHORT, stale="ignore"))
    except xla_ckpt.CheckpointError as error:
        return {"error": type(error).__name__, "rank": error.rank, "text": str(error)}
    return {"error": None}


@pytest.mark.crash
@pytest.mark.parametrize(
    ("where", "replaces", "overtaken"),
    [
        ("before the last look", False, False),
        ("before orbax is asked", True, True),
        ("before orbax is asked", False, True),
    ],
)
def test_rank_0_is_stopped_while_it_commits(where: str, replaces: bool, overtaken: bool, tmp_path: Path) -> None:
    tags = ["old", "new"] if replaces else ["old"]
    for tag in tags:
        xla_ckpt.save_checkpoint(tmp_path, tag, model_of(1), options=xla_ckpt.SaveOptions(stale="ignore"))
    _store, env = store_of_torchrun()
    zero, *others = start_on_ranks(stops_at_the_commit, 2, tmp_path, where, env=env)
    finish(others, timeout=LONG)
    told: list[Told] = [process.value() for process in others]
    assert [(t["error"], t["rank"], BEGAN in t["text"]) for t in told] == [("RankFailedError", 0, True)], told
    assert xla_ckpt.list_tags(tmp_path) == tags
    if overtaken:
        xla_ckpt.save_checkpoint(tmp_path, "new", model_of(3), options=xla_ckpt.SaveOptions(stale="ignore"))
        xla_ckpt.finalize_checkpoint()
    zero.send_signal(signal.SIGCONT)
    finish([zero], timeout=LONG)
    last: Told = zero.value()
    assert last["error"] == ("SaveError" if overtaken else None), last
    assert not overtaken or "another job has saved this checkpoint meanwhile" in last["text"]
    assert xla_ckpt.list_tags(tmp_path) == ["old", "new"]
    model = model_of(0)
    xla_ckpt.load_checkpoint(tmp_path, "new", model=model)
    assert numbers_in(model) == [3 if overtaken else 2], "what the next job saved stays"
    assert not [name for name in names_in(tmp_path) if name.startswith(".")]


def is_killed_in_a_load(rank: int, root: Path, key: str) -> Told:
    """Rank 1 is killed when it has something to say under a key; what the others then have."""
    model = model_of(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter.data, 2)
    say = Exchange.publish

    def strikes(self: Exchange, name: str, *args: Any, **options: Any) -> None:
        if name == f"{key}/1":
            os.kill(os.getpid(), signal.SIGKILL)
        say(self, name, *args, **options)

    Exchange.publish = strikes  # type: ignore[method-assign]
    told = Told(error=None)
    try:
        xla_ckpt.load_checkpoint(root, "old", model, optimizer, options=xla_ckpt.LoadOptions(timeout=SHORT))
    except xla_ckpt.CheckpointError as error:
        told = {"error": type(error).__name__, "rank": error.rank, "text": str(error)}
    state = {float(n) for of in optimizer.state.values() for n in of["momentum_buffer"].unique()}
    return told | {"numbers": numbers_in(model), "state": sorted(state)}


@pytest.mark.crash
@pytest.mark.parametrize("key", ["handing over", "overwriting"])
def test_what_the_others_have_of_a_load_in_which_a_rank_is_killed(key: str, tmp_path: Path) -> None:
    model = model_of(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter.data, 1)
    xla_ckpt.save_checkpoint(tmp_path, "old", model, optimizer)
    _store, env = store_of_torchrun()
    ranks = start_on_ranks(is_killed_in_a_load, 3, tmp_path, key, env=env)
    finish(ranks, timeout=LONG)
    told: list[Told] = [ranks[rank].value() for rank in (0, 2)]
    assert [(t["error"], t["rank"]) for t in told] == [("RankFailedError", 1)] * 2
    whole = key != "handing over"
    assert ["have the values of tag old" in t["text"] for t in told] == [whole] * 2, told
    assert [(t["numbers"], t["state"]) for t in told] == [([1.0], [1.0]) if whole else ([2.0], [2.0])] * 2
