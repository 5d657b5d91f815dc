"""Two hosts: network namespaces with a cable between them, and directories that both see, or only one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.jobs import finish, program, start_ranks
from tests.runs import environment

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root makes network namespaces"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="needs iproute2's ip"),
]

ADDRESSES = ("10.201.77.1", "10.201.77.2")
PORT = 29511
TIMEOUT = 5.0
SLACK = 4.0


@dataclass(frozen=True)
class Hosts:
    """Two network namespaces."""

    names: tuple[str, str]

    def on(self, host: int) -> list[str]:
        """What runs a command on a host. Its mounts are its own."""
        return ["ip", "netns", "exec", self.names[host]]

    def cut(self) -> None:
        """Pull out the cable: nothing that is sent arrives, and nobody is told."""
        ip("-n", self.names[1], "link", "set", "cable", "down")


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True, timeout=30)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    names = (f"xla-ckpt-a-{os.getpid()}", f"xla-ckpt-b-{os.getpid()}")
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("-n", names[0], "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield Hosts(names)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=30)


PRELUDE = """
import json, os, time
shared, private = sys.argv[1:3]

def state(number):
    return {f"w{i}": torch.arange(20_000, dtype=torch.float64) + 1000 * number + i for i in range(8)}

def attempt(name, action):
    # Do it, and write down what came of it: torchrun mixes what its ranks print.
    began = time.monotonic()
    try:
        told = {"value": action()}
    except Exception as error:
        told = {"kind": type(error).__name__, "text": str(error), "rank": error.rank}
    told["seconds"] = time.monotonic() - began
    with open(f"{shared}.{name}.{rank}", "w") as file:
        json.dump(told, file)
"""

TWO = """
def stored(root):
    tree = xla_ckpt.restore(root, "a").tree
    return all(torch.equal(tree[name], value) for name, value in state(1).items())

attempt("save", lambda: xla_ckpt.save(shared, "a", state(1)).tag)
attempt("load", lambda: stored(shared))
attempt("private", lambda: xla_ckpt.save(private, "a", state(2)).tag)
if rank == world - 1:   # what a killed save of another job has left on the disk of this host
    os.mkdir(f"{private}/a.orbax-checkpoint-tmp")
dist.barrier()
attempt("stale", lambda: xla_ckpt.save(private, "a", state(3)).tag)
if rank == 0:
    xla_ckpt.finalize_checkpoint()
    attempt("litter", lambda: os.listdir(private))
attempt("load of private", lambda: stored(private))
"""


def told(shared: Path, name: str) -> list[dict[str, Any]]:
    """What all ranks wrote down about an attempt."""
    return [json.loads(Path(f"{shared}.{name}.{rank}").read_text()) for rank in range(4)]


def same_error(shared: Path, name: str) -> dict[str, Any]:
    errors = told(shared, name)
    assert all("kind" in e for e in errors), errors
    assert len({(e["kind"], e["text"], e["rank"]) for e in errors}) == 1, errors
    return errors[0]


def test_two_hosts(hosts: Hosts, tmp_path: Path) -> None:
    """Under torchrun: a directory that both see works; one that is another on each host is refused."""
    shared, private = tmp_path / "shared", tmp_path / "private"
    private.mkdir()
    script = tmp_path / "program.py"
    script.write_text(program(PRELUDE + TWO))
    agents = []
    for host in (0, 1):
        own = ["sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(private)] if host == 1 else []
        agents.append(
            subprocess.Popen(
                [
                    *hosts.on(host),
                    *own,
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--nnodes=2",
                    "--nproc-per-node=2",
                    f"--node-rank={host}",
                    f"--master-addr={ADDRESSES[0]}",
                    f"--master-port={PORT}",
                    f"--local-addr={ADDRESSES[host]}",
                    str(script),
                    str(shared),
                    str(private),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
                env=environment({"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable"}),
            )  # fmt: skip
        )
    for code, out, err in finish(agents):
        assert code == 0, f"exit code {code}\n{out[-4000:]}\n{err[-8000:]}"

    assert [t.get("value") for t in told(shared, "save")] == ["a"] * 4
    assert [t.get("value") for t in told(shared, "load")] == [True] * 4
    report = xla_ckpt.verify(shared, "a")
    assert report.ok, report.problems
    written = sorted(p.name for p in (shared / "a/tree").iterdir())
    assert written == [f"{rank:05d}-of-00004.safetensors" for rank in range(1, 5)]
    tree = xla_ckpt.restore(shared).tree
    for i in range(8):
        assert torch.equal(tree[f"w{i}"], torch.arange(20_000, dtype=torch.float64) + 1000 + i)

    for name in ("private", "stale"):
        error = same_error(shared, name)
        assert error["kind"] == "StorageError"
        assert error["rank"] == 2, "the first of the second host"
        assert "All hosts must see the same directory" in error["text"]
    assert json.loads(Path(f"{shared}.litter.0").read_text())["value"] == []
    assert same_error(shared, "load of private")["kind"] == "NoCheckpointError"


CUT = """
from xla_ckpt.job import process_group as lines
from xla_ckpt.engine import save as engine
lines.REACH = 2.0
xla_ckpt.save(shared, "a", state(1))
write_files, cut = engine.write_files, f"{shared}.cut"

def hold(*args, **kwargs):
    # Until the cable is pulled out.
    open(f"{shared}.holds.{rank}", "w").close()
    end = time.monotonic() + 60
    while not os.path.exists(cut):
        assert time.monotonic() < end
        time.sleep(0.01)
    return write_files(*args, **kwargs)

engine.write_files = hold
attempt("save", lambda: xla_ckpt.save(shared, "a", state(2), timeout=TIMEOUT).tag)
while rank == 0 and not os.path.exists(f"{shared}.save.1"):
    time.sleep(0.01)   # the store, from which the other rank of this host hears, is here
os._exit(0)   # gloo would wait for its peers
"""


def test_the_network_between_them_fails(hosts: Hosts, tmp_path: Path) -> None:
    """In mid-save: both sides give up in time, and nothing is committed."""
    shared = tmp_path / "shared"
    place = {"MASTER_ADDR": ADDRESSES[0], "GLOO_SOCKET_IFNAME": "cable"}
    ranks = start_ranks(
        PRELUDE + f"TIMEOUT = {TIMEOUT}" + CUT, 4, shared, tmp_path,
        env=dict.fromkeys(range(4), place), inside={rank: hosts.on(rank // 2) for rank in range(4)},
    )  # fmt: skip
    try:
        held = [Path(f"{shared}.holds.{rank}") for rank in range(4)]
        while not all(p.exists() for p in held) and all(p.poll() is None for p in ranks):
            time.sleep(0.02)
        hosts.cut()
        Path(f"{shared}.cut").touch()
    finally:
        ended = finish(ranks, timeout=60)
    for rank, (code, out, err) in enumerate(ended):
        assert code == 0, f"rank {rank}: exit code {code}\n{out[-4000:]}\n{err[-8000:]}"
    errors = told(shared, "save")
    assert [e["kind"] for e in errors] == ["RankFailedError"] * 4
    assert [e["rank"] for e in errors] == [2, 2, 0, 0]
    assert max(e["seconds"] for e in errors) < TIMEOUT + 4 + SLACK, errors
    assert xla_ckpt.list_tags(shared) == ["a"]
    assert torch.equal(xla_ckpt.restore(shared).tree["w0"], torch.arange(20_000, dtype=torch.float64) + 1000)
