"""Ranks that are killed or stopped at a message: a job of real processes, and what all of them say of it.

The clock is the victim's messages to the job's store: before the k-th one the fault happens. `python -m
tests.crash.ranks` goes through all messages of all ranks, and prints a table.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import xla_ckpt
from tests.jobs import finish, start_on_ranks
from tests.nursery import ProcessError
from xla_ckpt.job.process_group import StoreCommunicator

TIMEOUT = 2.0
"""Given to the call in which a rank is lost, in seconds."""

LATE = 1.2 * TIMEOUT + 3.0
"""Seconds in which all others must have raised: the stated margin, and 3 s for a busy machine."""

LONG = 60.0
"""The timeout of calls in which nothing happens."""

BEGAN = "began to commit"
"""What the error says if nobody can know whether the tag is there."""

Doing = Literal["save", "async save", "load"]
Told = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One fault."""

    doing: Doing
    victim: int
    signal: int
    at: int
    """The message of the victim before which it happens, from 1."""

    mesh: str

    def __str__(self) -> str:
        name = signal.Signals(self.signal).name
        return f"{self.doing} over {self.mesh}, rank {self.victim}, {name} before message {self.at}"


def model_of(number: int) -> torch.nn.Module:
    """A model all of whose numbers are one: a mixture of two is seen."""
    model = torch.nn.Linear(64, 64)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, number)
    return model


def numbers_in(model: torch.nn.Module) -> list[float]:
    """The different numbers in a model."""
    return sorted({float(n) for parameter in model.parameters() for n in parameter.detach().unique()})


def strike(case: Case) -> list[int]:
    """Have this process struck before its k-th message; the count of messages goes on in the list."""
    count = [0]

    def counted(name: str) -> None:
        original = getattr(StoreCommunicator, name)

        def call(*args: Any) -> Any:
            count[0] += 1
            if count[0] == case.at:
                os.kill(os.getpid(), case.signal)
            return original(*args)

        setattr(StoreCommunicator, name, call)

    for name in ("put", "put_once", "take", "has"):
        counted(name)
    return count


def takes_part(rank: int, root: Path, case: Case) -> Told:
    """What a rank does: a good save, and then the call in which the victim is struck."""
    xla_ckpt.save_checkpoint(root, "old", model_of(1), mesh=case.mesh, timeout=LONG)
    count = strike(case) if rank == case.victim else [0]
    model, told, began = model_of(2), Told(error=None), time.monotonic()
    try:
        if case.doing == "load":
            xla_ckpt.load_checkpoint(root, "old", model=model, mesh=case.mesh, timeout=TIMEOUT)
        else:
            asynchronous = case.doing == "async save"
            handle = xla_ckpt.save_checkpoint(
                root, "new", model, mesh=case.mesh, timeout=TIMEOUT, async_save=asynchronous, stale="ignore"
            )
            handle.result()
    except xla_ckpt.CheckpointError as error:
        told |= {"error": type(error).__name__, "rank": error.rank, "text": str(error)}
    return told | {"seconds": time.monotonic() - began, "numbers": numbers_in(model), "messages": count[0]}


def wrong_with(case: Case, root: Path, world: int) -> tuple[bool, list[str], list[Told]]:
    """Whether the fault happened, what of the promise was broken, and what the surviving ranks told."""
    # Under torchrun its agent holds the store: played by this process, so that rank 0 can be lost without it.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    ranks = start_on_ranks(takes_part, world, root, case, env=env)
    others = [process for rank, process in enumerate(ranks) if rank != case.victim]
    finish(others, timeout=LONG)
    if case.signal == signal.SIGSTOP:
        ranks[case.victim].send_signal(signal.SIGCONT)
    ((code, _, _),) = finish([ranks[case.victim]], timeout=LONG)
    told: list[Told] = [process.value() for process in others]
    victim = None if code == -signal.SIGKILL else ranks[case.victim].value()
    happened = victim is None or victim["messages"] >= case.at
    return happened, [*_of_errors(told), *_of_directory(case, root, told, victim)], told


def _of_errors(told: list[Told]) -> list[str]:
    if len({(t["error"], t.get("rank"), BEGAN in t.get("text", "")) for t in told}) > 1:
        return [f"the ranks say different things: {told}"]
    return [f"a rank was late: {t}" for t in told if t["seconds"] > LATE]


def _of_directory(case: Case, root: Path, told: list[Told], victim: Told | None) -> list[str]:
    wrong = []
    tags = xla_ckpt.list_tags(root)
    for tag, number in (("old", 1), ("new", 2)):
        model = model_of(0)
        if tag in tags:
            xla_ckpt.load_checkpoint(root, tag, model=model)
            wrong += [f"{tag} holds {numbers_in(model)}"] if numbers_in(model) != [number] else []
    wrong += [] if "old" in tags else ["old is lost"]
    known = [t for t in (*told, *([victim] if victim else [])) if BEGAN not in t.get("text", "")]
    if case.doing == "load":
        return wrong + [f"a torn model: {t}" for t in (*told, *([victim] if victim else [])) if len(t["numbers"]) > 1]
    wrong += [f"tags {tags}, and a rank says: {t}" for t in known if (t["error"] is None) != ("new" in tags)]
    xla_ckpt.save_checkpoint(root, "new", model_of(3), stale="ignore")  # the next job
    left = [entry.name for entry in root.iterdir() if entry.name.startswith((".new-", ".old-"))]
    return wrong + [f"left behind: {left}"] * bool(left)


def main() -> int:
    """Go through all messages."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--mesh", default=None)
    options = parser.parse_args()
    mesh = options.mesh or f"dp={options.world}"
    bad = 0
    doings: tuple[Doing, ...] = ("save", "async save", "load")
    for doing, victim, sign in itertools.product(doings, range(options.world), (signal.SIGKILL, signal.SIGSTOP)):
        tried = failed = 0
        for at in itertools.count(1):
            case = Case(doing, victim, sign, at, mesh)
            with tempfile.TemporaryDirectory() as folder:
                try:
                    happened, wrong, _ = wrong_with(case, Path(folder) / "root", options.world)
                except (ProcessError, AssertionError) as error:
                    happened, wrong = True, [str(error)]
            if not happened:
                break
            tried, failed = tried + 1, failed + bool(wrong)
            for line in wrong:
                print(f"{case}: {line}", file=sys.stderr, flush=True)
        bad += failed
        name = signal.Signals(sign).name
        print(f"| {doing} | {mesh} | {victim} | {name} | {tried} | {failed} |", flush=True)
    return bool(bad)


if __name__ == "__main__":
    from tests.crash import ranks  # the ranks find its functions under this name, and not in __main__

    sys.exit(ranks.main())
