"""Two hosts: network namespaces with a cable between them, and directories that both see, or only one."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import xla_ckpt
from tests.jobs import finish, places, read_values, torchrun_command, write_call
from tests.nursery import Call, bear
from tests.runs import environment, names_in
from xla_ckpt.distributed import torch_store as lines
from xla_ckpt.saving import run as engine

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


def state(number: int) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.arange(20_000, dtype=torch.float64) + 1000 * number + i for i in range(8)}


def attempt(action: Callable[[], Any]) -> dict[str, Any]:
    """Do it; what came of it."""
    began = time.monotonic()
    try:
        told = {"value": action()}
    except xla_ckpt.CheckpointError as error:
        told = {"kind": type(error).__name__, "text": str(error), "rank": error.rank}
    return {**told, "seconds": time.monotonic() - began}


def stored(root: Path) -> bool:
    tree = xla_ckpt.restore(root, "a").tree
    return all(torch.equal(tree[name], value) for name, value in state(1).items())


def saves_on_two_hosts(rank: int, shared: Path, private: Path) -> dict[str, Any]:
    told = {
        "save": attempt(lambda: xla_ckpt.save(shared, "a", state(1)).tag),
        "load": attempt(lambda: stored(shared)),
        "private": attempt(lambda: xla_ckpt.save(private, "a", state(2)).tag),
    }
    if rank == 3:  # what a killed save of another job has left on the disk of this host
        (private / ".new-a").mkdir()
    dist.barrier()
    told["stale"] = attempt(lambda: xla_ckpt.save(private, "a", state(3)).tag)
    if rank == 0:
        xla_ckpt.finalize_checkpoint()
        told["litter"] = names_in(private)
    told["load of private"] = attempt(lambda: stored(private))
    return told


def same_error(errors: Sequence[dict[str, Any]]) -> dict[str, Any]:
    assert all("kind" in e for e in errors), errors
    assert len({(e["kind"], e["text"], e["rank"]) for e in errors}) == 1, errors
    return errors[0]


def test_two_hosts(hosts: Hosts, tmp_path: Path) -> None:
    """Under torchrun: a directory that both see works; one that is another on each host is refused."""
    shared, private = tmp_path / "shared", tmp_path / "private"
    private.mkdir()
    write_call(tmp_path, saves_on_two_hosts, shared, private)
    agents = []
    for host in (0, 1):
        own = ["sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(private)] if host == 1 else []
        place = (
            "--nnodes=2", "--nproc-per-node=2", f"--node-rank={host}", f"--master-addr={ADDRESSES[0]}",
            f"--master-port={PORT}", f"--local-addr={ADDRESSES[host]}",
        )  # fmt: skip
        agents.append(
            subprocess.Popen(
                [*hosts.on(host), *own, *torchrun_command(tmp_path, *place)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
                env=environment({"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable"}),
            )
        )
    for code, out, err in finish(agents):
        assert code == 0, f"exit code {code}\n{out[-4000:]}\n{err[-8000:]}"

    told = read_values(tmp_path, 4)
    assert [t["save"].get("value") for t in told] == ["a"] * 4
    assert [t["load"].get("value") for t in told] == [True] * 4
    report = xla_ckpt.verify(shared, "a")
    assert report.ok, report.problems
    written = names_in(shared / "a/tree")
    assert written == [f"{rank:05d}-of-00004.safetensors" for rank in range(1, 5)]
    tree = xla_ckpt.restore(shared).tree
    for i in range(8):
        assert torch.equal(tree[f"w{i}"], torch.arange(20_000, dtype=torch.float64) + 1000 + i)

    for name in ("private", "stale"):
        error = same_error([t[name] for t in told])
        assert error["kind"] == "StorageError"
        assert error["rank"] == 2, "the first of the second host"
        assert "All hosts must see the same directory" in error["text"]
    assert told[0]["litter"] == []
    assert same_error([t["load of private"] for t in told])["kind"] == "NoCheckpointError"


def saves_while_the_cable_is_pulled_out(shared: str, namespaces: Sequence[str]) -> dict[str, Any]:
    """What a rank is, that joins its job on one of the hosts; told by what `attempt` found."""
    rank = int(os.environ["RANK"])
    enter(namespaces[rank // 2])
    dist.init_process_group("gloo")
    lines.STORE_TIMEOUT_SECONDS = 2.0
    xla_ckpt.save(shared, "a", state(1))
    write_files, cut, written = engine.write_files, f"{shared}.cut", f"{shared}.written"

    def hold(*args: Any, **kwargs: Any) -> Any:
        """Until the cable is pulled out. Rank 0 writes first: who waits before it does may give it up first, too."""
        open(f"{shared}.holds.{rank}", "w").close()
        end = time.monotonic() + 60
        while not os.path.exists(cut if rank == 0 else written):
            assert time.monotonic() < end
            time.sleep(0.01)
        result = write_files(*args, **kwargs)
        open(written, "w").close()
        return result

    engine.write_files = hold  # type: ignore[assignment]
    told = attempt(lambda: xla_ckpt.save(shared, "a", state(2), options=xla_ckpt.SaveOptions(timeout=TIMEOUT)).tag)
    open(f"{shared}.told.{rank}", "w").close()
    while rank == 0 and not os.path.exists(f"{shared}.told.1"):
        time.sleep(0.01)  # the store, from which the other rank of this host hears, is here
    return told


def enter(namespace: str) -> None:
    """Move this process, which has opened no socket yet, to a host."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def test_the_network_between_them_fails(hosts: Hosts, tmp_path: Path) -> None:
    """In mid-save: both sides give up in time, and nothing is committed."""
    shared = tmp_path / "shared"
    call = Call.of(saves_while_the_cable_is_pulled_out, str(shared), hosts.names)
    env = {"GLOO_SOCKET_IFNAME": "cable"}
    ranks = [bear(call, env=place, end="at once") for place in places(4, env, ADDRESSES[0])]
    try:
        held = [Path(f"{shared}.holds.{rank}") for rank in range(4)]
        while not all(p.exists() for p in held) and all(not p.has_ended() for p in ranks):
            time.sleep(0.02)
        hosts.cut()
        Path(f"{shared}.cut").touch()
    finally:
        ended = finish(ranks, timeout=60)
    for rank, (code, out, err) in enumerate(ended):
        assert code == 0, f"rank {rank}: exit code {code}\n{out[-4000:]}\n{err[-8000:]}"
    errors = [rank.value() for rank in ranks]
    assert [e.get("kind") for e in errors] == ["RankFailedError"] * 4, errors
    assert [e["rank"] for e in errors] == [2, 2, 0, 0]
    assert max(e["seconds"] for e in errors) < TIMEOUT + 4 + SLACK, errors
    assert xla_ckpt.list_tags(shared) == ["a"]
    assert torch.equal(xla_ckpt.restore(shared).tree["w0"], torch.arange(20_000, dtype=torch.float64) + 1000)
