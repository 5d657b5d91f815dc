"""The groups about an object store: saves, loads, loads of a part, and a training loop beside a save."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.peers import bucket_calls, measures
from benchmarks.peers.machine import Peak
from benchmarks.peers.rows import Group, Row
from tests.runs import ROOT

TENSORS = 60
SHARE = 4
"""Of so many tensors a load of a part reads one."""
ADDRESS, TAG = "s3://bucket/run", "a"
BARE = "obstore alone"
CONTENDERS = {
    "xla_ckpt": bucket_calls.Ours, BARE: bucket_calls.Bare, "boto3": bucket_calls.Boto,
    "`dcp`, s3torchconnector": bucket_calls.Connector, "`dcp`, s3fs": bucket_calls.Fsspec,
    "neuronx-distributed's S3 code": bucket_calls.Nxd,
}  # fmt: skip


def on_buckets(gb: float) -> tuple[Group, ...]:
    """All of them, for states of this size."""

    def rows(function: Callable[..., object], *args: object, rounds: int = 1) -> tuple[Row, ...]:
        return tuple(
            Row(name, function, (name, gb, *args), xla=False, short=True, rounds=3)
            if name in ("xla_ckpt", BARE)
            else Row(name, function, (name, gb, *args), xla=False, rounds=rounds)
            for name in CONTENDERS
        )

    where = "an object store"
    return (
        Group("bucket-save", f"Save of {TENSORS} CPU tensors to {where}", rows(save, rounds=2), rate=True, plot=True),
        Group("bucket-load", f"Load of {TENSORS} tensors from {where}", rows(load, 1, rounds=2), rate=True, plot=True),
        Group("bucket-part", f"Load of one in {SHARE} of these tensors from {where}", rows(load, SHARE), rate=True),
        Group("bucket-loop", f"What a training loop on the CPU loses by a save to {where}", rows(loop)),
    )


def save(name: str, gb: float, _directory: str) -> measures.Figures:
    """A save: its seconds, the processor time of this process, and the requests that came to the server."""
    state = measures.fresh_state("cpu", gb, TENSORS)
    with _server() as asked:
        contender = CONTENDERS[name]()
        peak = Peak()
        measured = _measured(lambda: contender.save(state.state_dict(), ADDRESS, TAG), asked)
        return {**measured, "rss": peak.rise(), "nbytes": state.nbytes}


def load(name: str, gb: float, share: int, _directory: str) -> measures.Figures:
    """Likewise a load of what the same contender has saved before, of one in so many tensors."""
    state = measures.fresh_state("cpu", gb, TENSORS)
    saved = state.state_dict()
    wanted = dict(list(saved.items())[::share])
    expected, nbytes = _digest(wanted), sum(value.nbytes for value in wanted.values())
    with _server() as asked:
        contender = CONTENDERS[name]()
        contender.save(saved, ADDRESS, TAG)
        asked()
        shapes = {name: value.shape for name, value in wanted.items()}
        found: dict[str, Any] = {}
        measured = _measured(lambda: found.update(contender.load(shapes, ADDRESS, TAG)), asked)
        if _digest(found) != expected:
            raise measures.WrongError("what was loaded is not what was saved")
        return {**measured, "nbytes": nbytes}


def loop(name: str, gb: float, _directory: str) -> measures.Figures:
    """How many seconds a training loop with one thread loses while a save runs: of its own steps, and to the server."""
    state = measures.fresh_state("cpu", gb, TENSORS)
    with _server():
        contender = CONTENDERS[name]()
        values = state.state_dict()
        figures = measures.beside(1, 2, lambda number: contender.begin(values, ADDRESS, f"{number}"), lambda _: None)
        return {"seconds": figures["lost"], "save": figures["save"], "cpu": figures["cpu"], "nbytes": state.nbytes}


def _measured(work: Callable[[], object], asked: Callable[[], int]) -> measures.Figures:
    began, worked = time.perf_counter(), time.process_time()
    work()
    seconds, worked = time.perf_counter() - began, time.process_time() - worked
    return {"seconds": seconds, "worked": worked, "requests": asked()}


@contextmanager
def _server() -> Iterator[Callable[[], int]]:
    """A server with nothing in it, named by the environment. What it is given says how many requests came since."""
    command = [sys.executable, str(ROOT / "benchmarks/sink_s3.py"), "0"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = f"http://127.0.0.1:{int(server.stdout.readline())}"
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": bucket_calls.REGION}
    os.environ.update(AWS_ENDPOINT_URL=url, **keys)

    def asked() -> int:
        with urllib.request.urlopen(f"{url}/.requests") as answer:
            methods: Mapping[str, int] = json.load(answer)
        return sum(methods.values())

    try:
        yield asked
        _give_back()
    finally:
        server.kill()
        server.communicate()


def _give_back() -> None:
    """End what a save of ours leaves for later, while there is a server."""
    import xla_ckpt
    from xla_ckpt.tags.lease import LEASES

    xla_ckpt.finalize_checkpoint()
    LEASES.release_all()


def _digest(values: Mapping[str, Any]) -> str:
    """A digest of tensors, in the order of their names."""
    import torch
    import xxhash

    hashed = xxhash.xxh3_64()
    for _, value in sorted(values.items()):
        hashed.update(value.detach().view(-1).view(torch.uint8).numpy())
    return str(hashed.hexdigest())
