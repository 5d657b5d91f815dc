"""Faults at every request of saves to a bucket: what is there afterwards, and whether the save has told the truth.

python -m tests.buckets.crash [--faults N] [--only OPERATION] [--seed SEED]

Each run is a fork of this process, which has imported what is needed and never used obstore, on a bucket that looks as
it did before. First there is one fault at each request, then there are pairs at random, until `--faults` were tried.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import logging
import os
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import obstore.store  # noqa: F401  # it starts its threads when a store is made, and so in each fork anew
import torch
import torch.distributed as dist
from moto.s3 import models

import xla_ckpt
from tests.buckets.s3_server import Fault, S3Server
from tests.crash.injection import Fork
from xla_ckpt.storage import remote, remote_client
from xla_ckpt.storage.resolve import open_store
from xla_ckpt.tags.entry import LEASE_NAME, LEDGER_NAME
from xla_ckpt.tags.ledger_root import LedgerRoot

ROOT = "s3://bucket/run"
KINDS = ("kill", "drop", "after500", "before503", "refuse409", "refuse403", "cut")
FOR_EVER = 1_000_000
LENGTHS = (1, 2, FOR_EVER)
"""How many requests in a row a fault hits. The last: the server is never there again."""

SECONDS = 60.0
"""A run that takes longer hangs."""

SECONDS_FOR_RANKS = 4.0
"""How long a rank waits for another one, which may have been killed."""

State = dict[str, int]
"""Tags and what they hold."""


@dataclass(frozen=True)
class Operation:
    """A save that is tried."""

    name: str
    tag: str
    after: State
    ranks: int = 1
    num_kept: int | None = None
    parts: bool = False
    """Its file goes up in several requests."""

    asynchronous: bool = False


BEFORE: State = {"a": 1, "b": 2}
NEW = 7
OPERATIONS = (
    Operation("new", "c", {**BEFORE, "c": NEW}),
    Operation("replace", "a", {"b": 2, "a": NEW}),
    Operation("kept", "c", {"b": 2, "c": NEW}, num_kept=2),
    Operation("parts", "c", {**BEFORE, "c": NEW}, parts=True),
    Operation("asynchronous", "c", {**BEFORE, "c": NEW}, asynchronous=True),
    Operation("two ranks", "c", {**BEFORE, "c": NEW}, ranks=2),
)


@dataclass(frozen=True)
class Blow:
    """A fault at a request."""

    number: int
    kind: str
    length: int = 1
    rank: int = 0
    """Which is killed."""

    def __str__(self) -> str:
        return f"{self.kind} at request {self.number}" + (f", {self.length} times" if self.length > 1 else "")


def tree(number: int, parts: bool = False) -> dict[str, Any]:
    return {"w": torch.full((600_000 if parts else 300,), float(number)), "number": number}


def save(operation: Operation, meeting: Path, rank: int) -> dict[str, Any]:
    """Do it, in a process that is only for that; what it said."""
    hurry()
    if operation.parts:
        remote.MIN_PART_BYTES = 64 * 1024
    if operation.ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=operation.ranks)
    told: dict[str, Any] = {}
    try:
        handle = xla_ckpt.save(
            ROOT,
            operation.tag,
            tree(NEW, operation.parts),
            num_kept_ckpts=operation.num_kept,
            async_save=operation.asynchronous,
            options=xla_ckpt.SaveOptions(timeout=SECONDS_FOR_RANKS),
        )
        if operation.asynchronous:
            handle.result()
    except xla_ckpt.CheckpointError as error:
        told = {"error": type(error).__name__, "text": str(error)[:500]}
        told["committed"] = getattr(error, "committed", False)
    xla_ckpt.finalize_checkpoint()
    return told


def hurry() -> None:
    """Have faults that last be given up soon."""
    logging.getLogger("xla_ckpt").setLevel(logging.ERROR)
    remote_client.RETRY_TIMEOUT = datetime.timedelta(seconds=0.25)
    remote_client.BACKOFF = dict.fromkeys(("init_backoff", "max_backoff"), datetime.timedelta(seconds=0.02))


def begin() -> None:
    hurry()
    for tag, number in BEFORE.items():
        xla_ckpt.save(ROOT, tag, tree(number))
    xla_ckpt.finalize_checkpoint()


def found() -> State:
    """What is there, every byte compared."""
    state = {}
    for tag in xla_ckpt.list_tags(ROOT):
        stored = xla_ckpt.restore(ROOT, tag).tree
        number = int(stored["number"])
        # A load compares the digests, so that what it returns is verified.
        if not torch.equal(stored["w"], torch.full_like(stored["w"], float(number))):
            raise AssertionError(f"{tag} holds other bytes than were saved")
        state[tag] = number
    return state


def look() -> dict[str, Any]:
    """What a process that knows nothing of the fault finds, and what is left when it has saved and cleaned up."""
    hurry()
    seen: dict[str, Any] = {"found": found()}
    xla_ckpt.save(ROOT, "next", tree(9))
    xla_ckpt.finalize_checkpoint()
    objects = open_store(ROOT).object_store
    assert objects is not None
    root = LedgerRoot(objects)
    root.clean()
    ledger = root.read()
    known = {tag.attempt for tag in ledger.tags.values()} | set(ledger.doomed)
    keys = objects.get_directory("").list_files()
    seen["rest"] = [
        k
        for k in keys
        if k not in (LEASE_NAME, LEDGER_NAME, remote_client.PROBE_FILE) and not k.startswith(tuple(known))
    ]
    seen["rest"] += [f"the ledger: {attempt} is open" for attempt in ledger.open]
    seen["then"] = xla_ckpt.list_tags(ROOT)
    return seen


class Bench:
    """The server, and the bucket as it is before each run."""

    def __init__(self, folder: Path) -> None:
        self.server, self._folder = S3Server(), folder
        os.environ.update(self.server.environment)
        os.environ.update(XLA_CKPT_LEASE="take")
        models.S3_UPLOAD_PART_MIN_SIZE = 1
        self._bucket = self.server.bucket("bucket")
        self._count = itertools.count()
        self.run(begin)
        self._start = {key.key: key.get()["Body"].read() for key in self._bucket.objects.all()}

    def run(self, *work: Callable[[], Any]) -> list[tuple[int, Any]]:
        """Call functions, each in a fork."""
        return [fork.wait(SECONDS) for fork in self.fork(*work)]

    def fork(self, *work: Callable[[], Any]) -> list[Fork]:
        # Where they print, for those that end with an error.
        self._printed = self._folder / f"printed-{next(self._count)}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the server's threads wait, and hold no lock
            return [Fork.of(one, self._printed) for one in work]

    def reset(self) -> None:
        self._bucket.objects.all().delete()
        for upload in self._bucket.multipart_uploads.all():
            upload.abort()
        for key, data in self._start.items():
            self._bucket.put_object(Key=key, Body=data)
        self.server.forget()

    def requests(self, operation: Operation) -> int:
        """How many it has without a fault."""
        problems = self.attempt(operation, [])
        if problems or not self.done:
            raise RuntimeError(f"{operation.name} fails without a fault: {problems}")
        return self.asked

    def attempt(self, operation: Operation, blows: list[Blow]) -> list[str]:
        """Do it with these faults; what is wrong afterwards."""
        self.reset()
        faults = [Fault("", "", blow.kind, blow.length, number=blow.number) for blow in blows]
        self.server.faults.extend(faults)
        meeting = self._folder / f"meeting-{next(self._count)}"
        forks = self.fork(*(functools.partial(save, operation, meeting, rank) for rank in range(operation.ranks)))
        for blow, fault in zip(blows, faults, strict=True):
            fault.clients.put(forks[blow.rank % operation.ranks].pid)
        ends = [fork.wait(SECONDS) for fork in forks]
        self.asked = self.server.asked
        self.server.forget()
        code, seen = self.run(look)[0]
        if code or seen is None:
            return [f"who comes next ends with {code}: {self._printed.read_text()[-1500:]}"]
        self.done = seen["found"] == operation.after
        return judged(operation, ends, seen)


def judged(operation: Operation, ends: list[tuple[int, Any]], seen: dict[str, Any]) -> list[str]:
    """What is wrong in what is there, and in what the ranks said of it."""
    state, problems = seen["found"], []
    done = list(state.items()) == list(operation.after.items())
    if not done and list(state.items()) != list(BEFORE.items()):
        problems.append(f"lost: found {state}")
    killed = any(code == -9 for code, _ in ends)
    for code, told in ends:
        if code == -9:
            continue
        if code or told is None:
            problems.append(f"a rank ended with {code}")
        elif told.get("error") == "hangs":
            problems.append(f"hangs: {told['text'][-2000:]}")
        elif not told and not done:
            problems.append("wrong: the save returned, and nothing is committed")
        elif told and told["committed"] != done and told["error"] != "UnknownOutcomeError" and not killed:
            problems.append(
                f"wrong: {told['error']} was raised, and it {'is' if done else 'is not'} there: {told['text']}"
            )
    if seen["rest"]:
        problems.append(f"rest: {seen['rest']}")
    if seen["then"] != [*state, "next"]:
        problems.append(f"lost: {seen['then']} is there after the next save, and there was {state}")
    return problems


def single(requests: int, ranks: int) -> Iterator[list[Blow]]:
    """One fault at each request."""
    for number, kind, length in itertools.product(range(1, requests + 1), KINDS, LENGTHS):
        if kind == "kill":
            if length <= ranks:
                yield [Blow(number, kind, rank=length)]
        else:
            yield [Blow(number, kind, length)]


def pairs(requests: int, chance: random.Random) -> Iterator[list[Blow]]:
    while True:
        first = Blow(chance.randint(1, requests), chance.choice(KINDS), chance.choice((1, 1, 2, 3, 8)))
        second = Blow(first.number + chance.randint(1, 8), chance.choice(KINDS), rank=chance.randint(0, 1))
        yield [replace(first, rank=chance.randint(0, 1)), second]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=3000)
    parser.add_argument("--only", choices=[operation.name for operation in OPERATIONS])
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    chance, counts, begun = random.Random(asked.seed), Counter[str](), time.monotonic()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        tries: list[tuple[Operation, list[Blow]]] = []
        endless: list[tuple[Operation, Iterator[list[Blow]]]] = []
        for operation in OPERATIONS:
            if asked.only in (None, operation.name):
                requests = bench.requests(operation)
                print(f"{operation.name}: {requests} requests", flush=True)
                tries += [(operation, blows) for blows in single(requests, operation.ranks)]
                endless.append((operation, pairs(requests, chance)))
        chance.shuffle(tries)  # a part of them is a sample of all
        more = ((operation, next(blows)) for operation, blows in itertools.cycle(endless))
        for operation, blows in itertools.islice(itertools.chain(tries, more), asked.faults):
            problems = bench.attempt(operation, blows)
            counts["faults"] += 1
            counts[operation.name] += 1
            for problem in problems:
                counts[problem.partition(":")[0]] += 1
                print(f"{operation.name}, {' and '.join(map(str, blows))}: {problem}", flush=True)
            if counts["faults"] % 200 == 0:
                print(f"{counts['faults']} faults in {time.monotonic() - begun:.0f} s", flush=True)
        bench.server.close()
    bad = {name: n for name, n in counts.items() if name not in ("faults", *(o.name for o in OPERATIONS))}
    print(json.dumps({"faults": counts["faults"], "problems": bad}), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
