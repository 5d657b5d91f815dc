"""Ranks that cannot meet are refused: each would take itself for the whole job, and the last one to save would win."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import neuron_compat.nxd as nxd
import xla_ckpt
from tests.jobs import finish, free_port, places, run_alone
from tests.nursery import Call, bear

W = {"w": torch.ones(2)}


def calls_without_a_group(root: Path) -> list[object]:
    """What is said to a process of a launcher that did not join, and what it may do."""
    told: list[object] = []
    for call in (
        lambda: xla_ckpt.save(root, "b", {"w": torch.full((2,), float(os.environ["RANK"]))}),
        lambda: xla_ckpt.load_checkpoint(root, model={"w": torch.zeros(2)}).user_content,
    ):
        with pytest.raises(xla_ckpt.UsageError) as caught:
            call()
        told.append(str(caught.value))
    looked = xla_ckpt.has_checkpoint(root), xla_ckpt.list_tags(root), xla_ckpt.verify(root).ok
    return [*told, looked, "torch_xla" in sys.modules]


def test_processes_of_a_launcher_that_did_not_join_are_refused(tmp_path: Path) -> None:
    xla_ckpt.save(tmp_path, "a", W)
    ranks = [bear(Call.of(calls_without_a_group, tmp_path), env=place) for place in places(2)]
    assert [code for code, _, _ in finish(ranks)] == [0, 0]
    told, other = (rank.value() for rank in ranks)
    assert told == other  # the same error on all ranks
    saving, loading, looked, has_xla = told
    for error in (saving, loading):
        assert "one of 2 (WORLD_SIZE)" in error
        assert "init_process_group" in error
    assert looked == (True, ["a"], True)
    assert has_xla is False  # XLA is not loaded to find out


CALLS: dict[str, Callable[[Path], object]] = {
    "save": lambda root: xla_ckpt.save(root, "b", W),
    "async": lambda root: xla_ckpt.save(root, "b", W, async_save=True),
    "save_checkpoint": lambda root: xla_ckpt.save_checkpoint(root, "b", W),
    "load_checkpoint": lambda root: xla_ckpt.load_checkpoint(root, model={}).user_content,
    "restore": xla_ckpt.restore,
    "nxd": lambda root: nxd.save_checkpoint(root, "b", W),
    "parallel_state": lambda root: nxd.parallel_layers.parallel_state.initialize_model_parallel(),
}


@pytest.mark.parametrize("call", CALLS)
def test_no_call_takes_a_rank_for_the_whole_job(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    xla_ckpt.save(tmp_path, "a", W)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(xla_ckpt.UsageError, match=r"one of 2 \(WORLD_SIZE\).*init_process_group"):
        CALLS[call](tmp_path)
    assert xla_ckpt.list_tags(tmp_path) == ["a"]
    assert not nxd.parallel_layers.parallel_state.model_parallel_is_initialized()


@pytest.mark.parametrize("size", ["1", "", "many"])
def test_a_process_that_is_alone_saves_and_loads(size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    xla_ckpt.save(tmp_path, "a", W)
    assert xla_ckpt.restore(tmp_path).tree["w"].tolist() == [1, 1]


def alone_by_its_own_word(root: Path) -> list[float]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    xla_ckpt.save(root, "a", W)
    return xla_ckpt.restore(root).tree["w"].tolist()


def alone_by_the_count_of_xla(root: Path) -> str:
    import torch_xla.distributed.xla_backend  # noqa: F401

    torch.distributed.init_process_group("xla", init_method="xla://")
    assert torch.distributed.get_world_size() == 1  # on the CPU, XLA's own group holds one process
    with pytest.raises(xla_ckpt.UsageError) as caught:
        xla_ckpt.save(root, "a", W)
    return str(caught.value)


ONE_OF_TWO = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def test_a_group_of_one_that_the_program_made_is_believed(tmp_path: Path) -> None:
    assert run_alone(alone_by_its_own_word, tmp_path, env=ONE_OF_TWO) == [1, 1]


@pytest.mark.xla
def test_a_group_of_one_that_xla_made_is_not_believed(tmp_path: Path) -> None:
    told = run_alone(alone_by_the_count_of_xla, tmp_path, env=ONE_OF_TWO, xla=True)
    assert "the process group that XLA made has 1 rank" in told
    assert xla_ckpt.list_tags(tmp_path) == []


def launch(root: Path, init_method: str | None = None) -> None:
    import torch_xla

    from tests.topology.thread_ranks import train

    # A fork has done its imports; an interpreter that is spawned takes nine seconds for them.
    torch_xla.launch(train, args=(str(root), init_method), start_method="fork")


@pytest.mark.xla
@pytest.mark.parametrize("init_method", [None, "xla://"])
def test_ranks_that_are_threads_are_refused_at_once(init_method: str | None, tmp_path: Path) -> None:
    env = {"CPU_NUM_DEVICES": "2", "MASTER_PORT": str(free_port())}
    run_alone(launch, tmp_path, init_method, env=env, xla=True)
    said = [(tmp_path / f"said.{rank}").read_text().splitlines() for rank in range(2)]
    assert said[0] == said[1]
    save, load, looked, when = said[0]
    for error in (save, load):
        assert "runs the ranks of this job as threads" in error
        assert "2 ranks in 1 process." in error
        assert "torchrun" in error
    assert (looked, when) == ("False []", "in time")


@pytest.mark.xla
def test_one_device_under_launch_saves_and_loads(tmp_path: Path) -> None:
    run_alone(launch, tmp_path, env={"CPU_NUM_DEVICES": "1"}, xla=True)
    saved, loaded, looked, _ = (tmp_path / "said.0").read_text().splitlines()
    assert saved == "saved"
    assert loaded.startswith("loaded {'x': tensor(")
    assert looked == "True ['a']"


def saves_for_its_devices(root: Path, how: str) -> list[float]:
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    if how == "spmd":
        xr.use_spmd()
    else:
        # As torch_xla's DataParallel leaves it: the devices replicate, and the main thread goes on alone.
        devices = xm.get_xla_supported_devices()
        xm.set_replication(devices[0], devices)
    xla_ckpt.save(root, "a", {"w": torch.ones(2, device="xla")})
    return xla_ckpt.restore(root).tree["w"].tolist()


@pytest.mark.xla
@pytest.mark.parametrize("how", ["spmd", "main thread"])
def test_one_process_that_saves_for_its_devices_goes_on_working(how: str, tmp_path: Path) -> None:
    assert run_alone(saves_for_its_devices, tmp_path, how, env={"CPU_NUM_DEVICES": "2"}, xla=True) == [1, 1]
