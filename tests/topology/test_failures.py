"""One verdict: whatever happens to one rank, all others raise the same error, in time, and no tag is harmed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.jobs import finish, start_ranks
from xla_ckpt.job.verdict import LEAD

RANKS = 4
TIMEOUT = 5.0
"""Given to the saves that must run into it."""

SLACK = 3.0
"""Seconds that an error may come later than the timeout: two busy cores, four processes."""

AT_ONCE = 20.0
"""Seconds within which comes what needs no timeout (the saves that meet it have a far longer one)."""

PRELUDE = f"""
import json, os, threading, time
from pathlib import Path
from xla_ckpt.engine import save as engine

from xla_ckpt.job import process_group as lines

TIMEOUT, LONG = {TIMEOUT}, 120.0
lines.REACH = TIMEOUT
root = sys.argv[1]
write_files = engine.write_files

def state(number):
    return {{f"w{{i}}": torch.arange(20_000, dtype=torch.float64) + 1000 * number + i for i in range(8)}}

def save(number, tag="good", timeout=LONG, **options):
    return xla_ckpt.save(root, tag, state(number), timeout=timeout, **options)

def stored(tag="good"):
    # The number of the state that is stored under a tag, if it is that in every bit. All ranks call it.
    tree = xla_ckpt.restore(root, tag, timeout=LONG).tree
    number = int(tree["w0"][0]) // 1000
    whole = tree.keys() == state(0).keys() and all(torch.equal(tree[n], w) for n, w in state(number).items())
    return number if whole else "a mixture"

def attempt(name, action):
    # Do it, and print what came of it.
    began = time.monotonic()
    try:
        value = action()
        told = {{"value": value.tag if isinstance(value, xla_ckpt.SaveHandle) else value}}
    except Exception as error:
        facts = ("rank", "errno", "leaf", "tag")
        told = {{"kind": type(error).__name__, "text": str(error), **{{f: getattr(error, f, None) for f in facts}}}}
    print("@" + json.dumps([name, told | {{"seconds": time.monotonic() - began}}]), flush=True)

def on(which, action):
    # One rank writes in a way of its own from now on; None: nobody does.
    dist.barrier()
    engine.write_files = action if rank == which else write_files

def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)

def die(*args, **kwargs):
    os.kill(os.getpid(), 9)

def full(*args, **kwargs):
    raise OSError(28, "No space left on device")
"""

Told = dict[str, Any]
"""What a rank printed about an attempt: its value, or the facts of the error."""


def state(number: int) -> dict[str, torch.Tensor]:
    """What the programs save."""
    return {f"w{i}": torch.arange(20_000, dtype=torch.float64) + 1000 * number + i for i in range(8)}


def holds(root: Path, tag: str, number: int) -> None:
    """Check that every bit of a tag is that of the state with this number."""
    report = xla_ckpt.verify(root, tag)
    assert report.ok, report.problems
    tree = xla_ckpt.restore(root, tag).tree
    assert tree.keys() == state(number).keys()
    for name, whole in state(number).items():
        assert torch.equal(tree[name], whole), name


class Outcome:
    """What the ranks of a job printed, by attempt."""

    def __init__(self, ended: Sequence[tuple[int, str, str]], killed: int | None = None) -> None:
        for rank, (code, out, err) in enumerate(ended):
            expected = -signal.SIGKILL if rank == killed else 0
            assert code == expected, f"rank {rank}: exit code {code}\n{out[-4000:]}\n{err[-8000:]}"
        self._told: list[dict[str, Told]] = [
            dict(json.loads(line[1:]) for line in out.splitlines() if line.startswith("@")) for _, out, _ in ended
        ]

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


def job(code: str, *args: object, killed: int | None = None, env: dict[str, str] | None = None) -> Outcome:
    """Run a program of four ranks, one of which may be killed by itself."""
    return Outcome(finish(start_ranks(PRELUDE + code, RANKS, *args, env={r: env or {} for r in range(RANKS)})), killed)


# --- ranks that die ------------------------------------------------------------------------------------------------

KILLED = """
save(1, tag="old")
save(2)
on(int(sys.argv[2]), die)
attempt("save", lambda: save(3, timeout=TIMEOUT))
if sys.argv[3:]:
    attempt("load", lambda: xla_ckpt.restore(root, timeout=TIMEOUT).tree and "loaded")
"""

FRESH = """
for root in sys.argv[1:]:
    attempt(root, lambda: save(4))
"""


def untouched(root: Path) -> None:
    assert xla_ckpt.list_tags(root) == ["old", "good"]
    holds(root, "old", 1)
    holds(root, "good", 2)


@pytest.mark.crash
def test_kill_nine(tmp_path: Path) -> None:
    """Of one rank in mid-save, in three kinds of jobs; then a fresh job goes on in all of their directories."""
    one, zero, alone = (tmp_path / name for name in ("one", "zero", "alone"))

    outcome = job(KILLED, one, 2, "load", killed=2)
    error = outcome.error("save", ranks=3, within=TIMEOUT + SLACK)
    assert (error["kind"], error["rank"], error["tag"]) == ("RankFailedError", 2, "good")
    assert f"rank 2 did not answer within {LEAD * TIMEOUT:g} s" in error["text"]
    error = outcome.error("load", ranks=3, within=TIMEOUT + SLACK)  # of which rank 2 is dead from the start
    assert (error["kind"], error["rank"]) == ("RankFailedError", 2)
    untouched(one)

    # Rank 0 commits; here it holds the store, too.
    outcome = job(KILLED, zero, 0, "load", killed=0)
    for name in ("save", "load"):
        error = outcome.error(name, ranks=3, within=TIMEOUT + SLACK)
        assert error["kind"] == "RankFailedError"
        assert "the store through which the ranks of the job meet is gone" in error["text"]
    untouched(zero)

    # Under torchrun its agent holds the store: played by this process.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    outcome = job(KILLED, alone, 0, killed=0, env=agent)
    error = outcome.error("save", ranks=3, within=TIMEOUT + SLACK)
    assert (error["kind"], error["rank"]) == ("RankFailedError", 0)
    untouched(alone)

    assert [bool(list(root.glob("*.orbax-checkpoint-tmp*"))) for root in (one, zero, alone)] == [False, True, True]
    outcome = job(FRESH, one, zero, alone)
    for root in (one, zero, alone):
        assert outcome.values(str(root)) == ["good"] * RANKS
        assert sorted(os.listdir(root)) == ["good", "old"], "litter"
        holds(root, "old", 1)
        holds(root, "good", 4)


# --- ranks that fail or hang, and live -----------------------------------------------------------------------------

WRITING = """
def lazy(which):
    # Writes when all the others have given up.
    gone = [Path(f"{root}.{which}.{other}") for other in range(world) if other != which]
    def write(*args, **kwargs):
        wait_for(lambda: all(p.exists() for p in gone))
        return write_files(*args, **kwargs)
    return write

attempt("first", lambda: save(1))

for which in (2, 0):
    on(which, full)
    attempt(f"full on {which}", lambda: save(2))
    attempt(f"after full on {which}", stored)
on(None, None)
attempt("again", lambda: save(3))
attempt("after again", stored)

for which in (2, 0):
    on(which, lazy(which))
    attempt(f"hang of {which}", lambda: save(4, timeout=TIMEOUT))
    Path(f"{root}.{which}.{rank}").touch()
    attempt(f"after hang of {which}", stored)
on(None, None)
attempt("once more", lambda: save(5))
attempt("after once more", stored)
"""


def test_ranks_that_cannot_write(tmp_path: Path) -> None:
    """Because the disk is full, or because they hang and wake up too late: one job goes through all of it."""
    root = tmp_path / "tags"
    outcome = job(WRITING, root)
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
    assert os.listdir(root) == ["good"], "litter"
    holds(root, "good", 5)


# --- ranks that disagree, errors of saves in flight ----------------------------------------------------------------

CALLS = """
import warnings
warnings.filterwarnings("ignore", message=".*[Ss]parse.*")
save(1)

def odd(which):
    arrays = state(2)
    return {"deep": {"w": arrays["w1"].to_sparse() if rank == which else arrays["w1"]}}

handles = []
for which in (3, 0):
    attempt(f"unsupported on {which}", lambda: xla_ckpt.save(root, "good", odd(which), timeout=LONG))
    start = lambda: handles.append(xla_ckpt.save(root, "good", odd(which), timeout=LONG, async_save=True))
    attempt(f"unsupported on {which}, async", start)
    attempt(f"unsupported on {which}, result", lambda: handles[-1].result())
attempt("other tag", lambda: save(2, tag="stray" if rank == 1 else "good"))
on(2, full)
attempt("async", lambda: handles.append(save(2, async_save=True)))
attempt("async, result", lambda: handles[-1].result())
attempt("unasked", lambda: save(2, async_save=True) and "a handle")
attempt("unasked, next", lambda: save(2, tag="next"))
on(None, None)
attempt("stored", stored)
attempt("tags", lambda: xla_ckpt.list_tags(root))
attempt("fine", lambda: save(3, async_save=True).result().tag)

def split(number):
    return {"w": torch.arange(1000.0) + 1000 * rank + 10_000 * number, "c": torch.full((10,), float(number))}

root += ".split"
layout = {"mesh": xla_ckpt.Mesh(tp=world), "shardings": [("w", ("tp",))], "timeout": LONG}
for number, tag in enumerate(("older", "newer")):
    xla_ckpt.save_checkpoint(root, tag, model=split(number), **layout)
if rank == 0:
    with open(f"{root}/newer/model/00004-of-00004.safetensors", "r+b") as file:
        file.seek(-5, 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
dist.barrier()
mine, report = split(7), xla_ckpt.LoadReport()
is_now = lambda number: all(torch.equal(mine[n], v) for n, v in split(number).items())
attempt("damaged", lambda: xla_ckpt.load_checkpoint(root, "newer", model=mine, **layout).user_content)
attempt("damaged, memory", lambda: is_now(7))
attempt("newest", lambda: xla_ckpt.load_checkpoint(root, model=mine, report=report, **layout).user_content)
attempt("newest, memory", lambda: is_now(0))
attempt("newest, report", lambda: [report.tag, report.corrupt_tags])
"""


def test_ranks_that_disagree(tmp_path: Path) -> None:
    """About what can be stored, which tag it is, whether it was written, and whether it can be read."""
    root = tmp_path / "tags"
    outcome = job(CALLS, root)
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
    assert os.listdir(root) == ["good"], "litter"
    holds(root, "good", 3)

    # A byte that only rank 3 reads.
    error = outcome.error("damaged")
    assert (error["kind"], error["rank"], error["tag"]) == ("CorruptCheckpointError", 3, "newer")
    assert error["leaf"] == "model/w"
    assert outcome.values("damaged, memory") == [True] * RANKS, "nothing was changed, on no rank"
    assert outcome.values("newest") == [None] * RANKS
    assert outcome.values("newest, memory") == [True] * RANKS
    assert outcome.values("newest, report") == [["older", ["newer"]]] * RANKS
