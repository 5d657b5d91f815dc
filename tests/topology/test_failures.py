"""One verdict: whatever happens to one rank, all others raise the same error, in time, and no tag is harmed."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import xla_ckpt
from tests.jobs import finish, start_on_ranks, store_of_torchrun
from tests.nursery import Born
from tests.runs import names_in
from xla_ckpt.distributed.exchange import LEADER_TIMEOUT_FRACTION
from xla_ckpt.saving import run as engine

RANKS = 4
TIMEOUT = 5.0
"""Given to the saves that must run into it."""

SLACK = 3.0
"""Seconds that an error may come later than the timeout: two busy cores, four processes."""

AT_ONCE = 20.0
"""Seconds within which comes what needs no timeout (the saves that meet it have a far longer one)."""

LONG = 120.0

Told = dict[str, Any]
"""What a rank tells of an attempt: its value, or the facts of the error."""


def state(number: int) -> dict[str, torch.Tensor]:
    """What the ranks save."""
    return {f"w{i}": torch.arange(20_000, dtype=torch.float64) + 1000 * number + i for i in range(8)}


class Rank:
    """What a rank of these jobs does, and what came of it."""

    def __init__(self, rank: int, root: Path) -> None:
        self.rank, self.root, self.told = rank, root, dict[str, Told]()
        self._write_files = engine.write_files

    def save(self, number: int, tag: str = "good", timeout: float = LONG, **options: Any) -> xla_ckpt.SaveHandle:
        return xla_ckpt.save(self.root, tag, state(number), options=xla_ckpt.SaveOptions(timeout=timeout), **options)

    def stored(self) -> int | str:
        """The number of the state that is stored, if it is that in every bit. All ranks call it."""
        tree = xla_ckpt.restore(self.root, "good", options=xla_ckpt.LoadOptions(timeout=LONG)).tree
        number = int(tree["w0"][0]) // 1000
        whole = tree.keys() == state(0).keys() and all(torch.equal(tree[n], w) for n, w in state(number).items())
        return number if whole else "a mixture"

    def attempt(self, name: str, action: Callable[[], Any]) -> None:
        """Do it, and keep what came of it."""
        began = time.monotonic()
        told: Told
        try:
            value = action()
            told = {"value": value.tag if isinstance(value, xla_ckpt.SaveHandle) else value}
        except Exception as error:
            facts = ("rank", "errno", "leaf", "tag")
            told = {"kind": type(error).__name__, "text": str(error), **{f: getattr(error, f, None) for f in facts}}
        self.told[name] = told | {"seconds": time.monotonic() - began}

    def write_on(self, which: int | None, action: Callable[..., Any] | None = None) -> None:
        """One rank writes in a way of its own from now on; None: nobody does."""
        dist.barrier()
        engine.write_files = action if self.rank == which else self._write_files  # type: ignore[assignment]

    def lazily(self, which: int) -> Callable[..., Any]:
        """Writes when all the others have given up."""
        gone = [Path(f"{self.root}.{which}.{other}") for other in range(RANKS) if other != which]

        def write(*args: Any, **kwargs: Any) -> Any:
            end = time.monotonic() + 60
            while not all(p.exists() for p in gone):
                assert time.monotonic() < end, "it never came"
                time.sleep(0.01)
            return self._write_files(*args, **kwargs)

        return write


def die(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def full(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "No space left on device")


def holds(root: Path, tag: str, number: int) -> None:
    """Check that every bit of a tag is that of the state with this number."""
    report = xla_ckpt.verify(root, tag)
    assert report.ok, report.problems
    tree = xla_ckpt.restore(root, tag).tree
    assert tree.keys() == state(number).keys()
    for name, whole in state(number).items():
        assert torch.equal(tree[name], whole), name


class Outcome:
    """What the ranks of a job told, by attempt."""

    def __init__(self, ranks: Sequence[Born], killed: int | None = None) -> None:
        for rank, (code, out, err) in enumerate(finish(ranks)):
            expected = -signal.SIGKILL if rank == killed else 0
            assert code == expected, f"rank {rank}: exit code {code}\n{out[-4000:]}\n{err[-8000:]}"
        self._told: list[dict[str, Told]] = [rank.value() for n, rank in enumerate(ranks) if n != killed]

    def of(self, name: str) -> list[Told]:
        """What each rank that lived to tell it told of an attempt."""
        return [told[name] for told in self._told if name in told]

    def values(self, name: str) -> list[Any]:
        """The result of an attempt on all ranks; it succeeded on all of them."""
        told = self.of(name)
        assert len(told) == RANKS
        assert all("value" in t for t in told), told
        return [t["value"] for t in told]

    def error(self, name: str, ranks: int = RANKS, within: float = AT_ONCE, late: int | None = None) -> Told:
        """The error of an attempt: that of `ranks` ranks, the same on all, in time (except for rank `late`)."""
        told = self.of(name)
        assert len(told) == ranks
        assert all("kind" in t for t in told), told
        facts = [{k: v for k, v in t.items() if k != "seconds"} for t in told]
        assert all(f == facts[0] for f in facts), facts
        assert max(t["seconds"] for rank, t in enumerate(told) if rank != late) < within, told
        return facts[0]


def job(function: Callable[..., object], *args: object) -> Outcome:
    """Run a job of four ranks, all of which live."""
    return Outcome(start_on_ranks(function, RANKS, *args))


# --- ranks that die ------------------------------------------------------------------------------------------------


def loses_one(rank: int, root: Path, victim: int, load: bool) -> dict[str, Told]:
    me = Rank(rank, root)
    me.save(1, tag="old")
    me.save(2)
    me.write_on(victim, die)
    me.attempt("save", lambda: me.save(3, timeout=TIMEOUT))
    if load:
        me.attempt(
            "load", lambda: xla_ckpt.restore(root, options=xla_ckpt.LoadOptions(timeout=TIMEOUT)).tree and "loaded"
        )
    return me.told


def begins_anew(rank: int, *roots: Path) -> dict[str, Told]:
    told = {}
    for root in roots:
        me = Rank(rank, root)
        me.attempt(str(root), lambda me=me: me.save(4))
        told.update(me.told)
    return told


def untouched(root: Path) -> None:
    assert xla_ckpt.list_tags(root) == ["old", "good"]
    holds(root, "old", 1)
    holds(root, "good", 2)


@pytest.mark.crash
def test_kill_nine(tmp_path: Path) -> None:
    """Of one rank in mid-save, in three kinds of jobs; then a fresh job goes on in all of their directories."""
    one, zero, alone = (tmp_path / name for name in ("one", "zero", "alone"))

    _store, agent = store_of_torchrun()
    # The jobs mostly wait, and so all of them at the same time.
    jobs = [
        start_on_ranks(loses_one, RANKS, one, 2, True),
        start_on_ranks(loses_one, RANKS, zero, 0, True),  # rank 0 commits; here it holds the store, too
        start_on_ranks(loses_one, RANKS, alone, 0, False, env=agent),
    ]

    outcome = Outcome(jobs[0], killed=2)
    error = outcome.error("save", ranks=3, within=TIMEOUT + SLACK)
    assert (error["kind"], error["rank"], error["tag"]) == ("RankFailedError", 2, "good")
    assert f"rank 2 did not answer within {LEADER_TIMEOUT_FRACTION * TIMEOUT:g} s" in error["text"]
    error = outcome.error("load", ranks=3, within=TIMEOUT + SLACK)  # of which rank 2 is dead from the start
    assert (error["kind"], error["rank"]) == ("RankFailedError", 2)
    untouched(one)

    outcome = Outcome(jobs[1], killed=0)
    for name in ("save", "load"):
        error = outcome.error(name, ranks=3, within=TIMEOUT + SLACK)
        assert error["kind"] == "RankFailedError"
        assert "the store through which the ranks of the job meet is gone" in error["text"]
    untouched(zero)

    outcome = Outcome(jobs[2], killed=0)
    error = outcome.error("save", ranks=3, within=TIMEOUT + SLACK)
    assert (error["kind"], error["rank"]) == ("RankFailedError", 0)
    untouched(alone)

    assert [bool(list(root.glob(".new-*"))) for root in (one, zero, alone)] == [False, True, True]
    outcome = job(begins_anew, one, zero, alone)
    for root in (one, zero, alone):
        assert outcome.values(str(root)) == ["good"] * RANKS
        assert names_in(root) == ["good", "old"], "litter"
        holds(root, "old", 1)
        holds(root, "good", 4)


# --- ranks that fail or hang, and live -----------------------------------------------------------------------------


def cannot_write(rank: int, root: Path) -> dict[str, Told]:
    me = Rank(rank, root)
    me.attempt("first", lambda: me.save(1))

    for which in (2, 0):
        me.write_on(which, full)
        me.attempt(f"full on {which}", lambda: me.save(2))
        me.attempt(f"after full on {which}", me.stored)
    me.write_on(None)
    me.attempt("again", lambda: me.save(3))
    me.attempt("after again", me.stored)

    for which in (2, 0):
        me.write_on(which, me.lazily(which))
        me.attempt(f"hang of {which}", lambda: me.save(4, timeout=TIMEOUT))
        Path(f"{root}.{which}.{rank}").touch()
        me.attempt(f"after hang of {which}", me.stored)
    me.write_on(None)
    me.attempt("once more", lambda: me.save(5))
    me.attempt("after once more", me.stored)
    return me.told


def test_ranks_that_cannot_write(tmp_path: Path) -> None:
    """Because the disk is full, or because they hang and wake up too late: one job goes through all of it."""
    root = tmp_path / "tags"
    outcome = job(cannot_write, root)
    assert outcome.values("first") == ["good"] * RANKS

    for which in (2, 0):
        error = outcome.error(f"full on {which}")
        assert (error["kind"], error["rank"], error["errno"], error["tag"]) == ("StorageError", which, 28, "good")
        assert "No space left on device" in error["text"]
        assert outcome.values(f"after full on {which}") == [1] * RANKS
    assert outcome.values("again") == ["good"] * RANKS, "the same processes save the same tag again"
    assert outcome.values("after again") == [3] * RANKS

    for which in (2, 0):  # rank 0, too: it must not commit what the others have given up
        error = outcome.error(f"hang of {which}", within=TIMEOUT + SLACK, late=which)
        assert (error["kind"], error["rank"], error["tag"]) == ("RankFailedError", which, "good")
        assert f"rank {which} did not answer" in error["text"]
        assert outcome.values(f"after hang of {which}") == [3] * RANKS
    assert outcome.values("once more") == ["good"] * RANKS
    assert outcome.values("after once more") == [5] * RANKS
    assert names_in(root) == ["good"], "litter"
    holds(root, "good", 5)


# --- ranks that disagree, errors of saves in flight ----------------------------------------------------------------


def disagrees(rank: int, root: Path) -> dict[str, Told]:
    warnings.filterwarnings("ignore", message=".*[Ss]parse.*")
    me = Rank(rank, root)
    me.save(1)
    handles: list[xla_ckpt.SaveHandle] = []

    def odd(which: int, **options: Any) -> xla_ckpt.SaveHandle:
        arrays = state(2)
        tree = {"deep": {"w": arrays["w1"].to("meta") if rank == which else arrays["w1"]}}
        return xla_ckpt.save(root, "good", tree, options=xla_ckpt.SaveOptions(timeout=LONG), **options)

    for which in (3, 0):
        me.attempt(f"unsupported on {which}", lambda w=which: odd(w))
        me.attempt(f"unsupported on {which}, async", lambda w=which: handles.append(odd(w, async_save=True)))
        me.attempt(f"unsupported on {which}, result", lambda: handles[-1].result())
    me.attempt("other tag", lambda: me.save(2, tag="stray" if rank == 1 else "good"))
    me.write_on(2, full)
    me.attempt("async", lambda: handles.append(me.save(2, async_save=True)))
    me.attempt("async, result", lambda: handles[-1].result())
    me.attempt("unasked", lambda: me.save(2, async_save=True) and "a handle")
    me.attempt("unasked, next", lambda: me.save(2, tag="next"))
    me.write_on(None)
    me.attempt("stored", me.stored)
    me.attempt("tags", lambda: xla_ckpt.list_tags(root))
    me.attempt("fine", lambda: me.save(3, async_save=True).result().tag)
    return me.told | damaged_on_rank_3(rank, Path(f"{root}.split"))


def damaged_on_rank_3(rank: int, root: Path) -> dict[str, Told]:
    def split(number: int) -> dict[str, torch.Tensor]:
        return {"w": torch.arange(1000.0) + 1000 * rank + 10_000 * number, "c": torch.full((10,), float(number))}

    me = Rank(rank, root)
    layout: dict[str, Any] = {"mesh": xla_ckpt.Mesh(tp=RANKS), "shardings": [("w", ("tp",))]}
    for number, tag in enumerate(("older", "newer")):
        xla_ckpt.save_checkpoint(root, tag, model=split(number), options=xla_ckpt.SaveOptions(timeout=LONG), **layout)
    if rank == 0:
        with open(f"{root}/newer/model/00004-of-00004.safetensors", "r+b") as file:
            file.seek(-5, 2)
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))
    dist.barrier()
    mine = split(7)
    reports: list[xla_ckpt.LoadReport] = []

    def is_now(number: int) -> bool:
        return all(torch.equal(mine[n], v) for n, v in split(number).items())

    layout["options"] = xla_ckpt.LoadOptions(timeout=LONG)
    me.attempt("damaged", lambda: xla_ckpt.load_checkpoint(root, "newer", model=mine, **layout).user_content)
    me.attempt("damaged, memory", lambda: is_now(7))
    me.attempt("newest", lambda: reports.append(xla_ckpt.load_checkpoint(root, model=mine, **layout).report))
    me.attempt("newest, memory", lambda: is_now(0))
    me.attempt("newest, report", lambda: [reports[0].tag, list(reports[0].corrupt_tags)])
    return me.told


def test_ranks_that_disagree(tmp_path: Path) -> None:
    """About what can be stored, which tag it is, whether it was written, and whether it can be read."""
    root = tmp_path / "tags"
    outcome = job(disagrees, root)
    for which in (3, 0):
        assert outcome.values(f"unsupported on {which}, async") == [None] * RANKS, "the call itself returns"
        for name in (f"unsupported on {which}", f"unsupported on {which}, result"):
            error = outcome.error(name)
            assert (error["kind"], error["rank"], error["leaf"]) == ("UnsupportedStateError", which, "deep/w")

    error = outcome.error("other tag")
    assert (error["kind"], error["rank"]) == ("UsageError", 1)
    assert "stray" in error["text"]

    assert outcome.values("async") == [None] * RANKS
    assert outcome.values("unasked") == ["a handle"] * RANKS
    for name in ("async, result", "unasked, next"):
        error = outcome.error(name)
        assert (error["kind"], error["rank"], error["errno"], error["tag"]) == ("StorageError", 2, 28, "good")

    # Nothing of all that is left.
    assert outcome.values("stored") == [1] * RANKS
    assert outcome.values("tags") == [["good"]] * RANKS
    assert outcome.values("fine") == ["good"] * RANKS
    assert names_in(root) == ["good"], "litter"
    holds(root, "good", 3)

    # A byte that only rank 3 reads.
    error = outcome.error("damaged")
    assert (error["kind"], error["rank"], error["tag"]) == ("CorruptCheckpointError", 3, "newer")
    assert error["leaf"] == "model/w"
    assert outcome.values("damaged, memory") == [True] * RANKS, "nothing was changed, on no rank"
    assert outcome.values("newest") == [None] * RANKS
    assert outcome.values("newest, memory") == [True] * RANKS
    assert outcome.values("newest, report") == [["older", ["newer"]]] * RANKS
