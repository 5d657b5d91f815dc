"""Killed processes, killed ranks and full disks: there is the old checkpoint or the new one, and never a mixture."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock

import xla_ckpt
import xla_ckpt.dcp as dcp
from tests.jobs import finish, start_on_ranks
from tests.nursery import Call, bear

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ELEMENTS = 1_500_000


def state(number: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((ELEMENTS,), number), "b": torch.full((7,), number), "number": torch.tensor(number)}


def number_in(path: Path) -> int:
    """The number that a checkpoint was saved with, after looking at all of it, also by stock DCP."""
    for library in (dcp, stock):
        held = state(-5.0)
        library.load(held, checkpoint_id=path)
        number = held["number"].item()
        assert (held["w"] == number).all(), f"{path} is a mixture"
        assert (held["b"] == number).all()
    return int(number)


def saves_for_ever(root: Path) -> None:
    warnings.simplefilter("ignore")
    number = 0
    while True:
        number += 1
        if number % 2:
            dcp.save(state(float(number)), checkpoint_id=root / "a")
        else:
            dcp.async_save(state(float(number)), checkpoint_id=root / "a").result()
        print(number, flush=True)


@pytest.mark.crash
def test_kill_nine_over_a_checkpoint_that_is_there(
    tmp_path: Path, kill_instant: float, request: pytest.FixtureRequest
) -> None:
    process = bear(Call.of(saves_for_ever, tmp_path), live=True)
    times, last = [], 0
    for _ in range(3 + round(kill_instant * 10) % 2):
        last = int(process.stdout.readline())
        times.append(time.monotonic())
    length = max(b - a for a, b in zip(times, times[1:], strict=False))
    instants = request.config.getoption("--kill-instants")
    end = times[-1] + (kill_instant + random.Random(kill_instant).random() / instants) * 1.2 * length
    while time.monotonic() < end:
        pass
    process.kill()
    rest = process.communicate()[0].split()
    assert process.returncode == -signal.SIGKILL
    last = max([last, *map(int, rest)])
    assert number_in(tmp_path / "a") >= last
    dcp.save(state(-1.0), checkpoint_id=tmp_path / "a")
    assert number_in(tmp_path / "a") == -1
    assert [p.name for p in tmp_path.iterdir()] == ["a"], "litter"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mountpoint = tmp_path / "disk"
    mountpoint.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mountpoint)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    yield mountpoint
    subprocess.run(["umount", "-l", str(mountpoint)], check=True)


def test_a_full_disk(small_disk: Path) -> None:
    path = small_disk / "a"
    small = {"w": torch.ones(500_000)}
    dcp.save(small, checkpoint_id=path)
    large = {"w": torch.zeros(500_000), "more": torch.zeros(4_000_000)}
    for save in (
        lambda: dcp.save(large, checkpoint_id=path),
        lambda: dcp.async_save(large, checkpoint_id=path).result(),
    ):
        with pytest.raises(xla_ckpt.StorageError, match="No space left on device") as caught:
            save()
        assert caught.value.errno == 28
        assert [p.name for p in small_disk.iterdir()] == ["a"]
    with pytest.raises(dcp.CheckpointException, match="No space left on device"):
        stock.save(large, storage_writer=dcp.StorageWriter(path))
    assert [p.name for p in small_disk.iterdir()] == ["a"]
    target = {"w": torch.zeros(500_000)}
    dcp.load(target, checkpoint_id=path)
    assert target["w"].all()
    dcp.save({"w": torch.zeros(500_000)}, checkpoint_id=path)
    stock.load(target, checkpoint_id=path)
    assert not target["w"].any()


class Dies(dcp.DefaultSavePlanner):
    def resolve_data(self, item: object) -> object:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(item)


def a_rank_dies(rank: int, root: Path) -> str:
    held = {"w": torch.ones(3), "own": {f"{rank}": torch.full((5,), float(rank))}}
    dcp.save(held, checkpoint_id=root / "a")
    try:
        dcp.save({"w": torch.zeros(3), "own": held["own"]}, checkpoint_id=root / "a", planner=Dies())
    except xla_ckpt.CheckpointError as error:
        return type(error).__name__
    return "nothing"


def test_a_rank_is_killed(tmp_path: Path) -> None:
    ranks = start_on_ranks(a_rank_dies, 3, tmp_path)
    ended = finish(ranks)
    assert [code for code, _, _ in ended] == [0, -signal.SIGKILL, 0]
    assert [ranks[rank].value() for rank in (0, 2)] == ["RankFailedError"] * 2
    target = {"w": torch.zeros(3), "own": {"1": torch.zeros(5)}}
    dcp.load(target, checkpoint_id=tmp_path / "a")
    assert target["w"].all()
    assert target["own"]["1"].all()
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=tmp_path / "a")
    assert [p.name for p in tmp_path.iterdir()] == ["a"], "litter"
