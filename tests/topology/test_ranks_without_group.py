"""Ranks that cannot meet are refused: each would take itself for the whole job, and the last one to save would win."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import neuron_compat.nxd as nxd
import xla_ckpt
from tests.jobs import finish, free_port
from tests.nursery import bear
from tests.runs import environment, run

W = {"w": torch.ones(2)}

WITHOUT_GROUP = """
import sys, torch, xla_ckpt
root, rank = sys.argv[1], int(sys.argv[2])
calls = (
    lambda: xla_ckpt.save(root, "b", {"w": torch.full((2,), float(rank))}),
    lambda: xla_ckpt.load_checkpoint(root, model={"w": torch.zeros(2)}).user_content,
)
for call in calls:
    try:
        call()
    except xla_ckpt.UsageError as error:
        print(error)
print(xla_ckpt.has_checkpoint(root), xla_ckpt.list_tags(root), xla_ckpt.verify(root).ok)
print("imported:", [name for name in sys.modules if name.startswith(torch.__name__ + "_")])
"""


def test_processes_of_a_launcher_that_did_not_join_are_refused(tmp_path: Path) -> None:
    xla_ckpt.save(tmp_path, "a", W)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ranks = [bear(WITHOUT_GROUP, (tmp_path, r), environment({**place, "RANK": str(r)})) for r in range(2)]
    told = finish(ranks)
    assert [code for code, _, _ in told] == [0, 0], told
    assert told[0][1] == told[1][1]  # the same error on all ranks
    *errors, looked, imported = told[0][1].splitlines()
    assert len(errors) == 2
    assert all("one of 2 (WORLD_SIZE)" in e and "init_process_group" in e for e in errors), errors
    assert looked == "True ['a'] True"
    assert imported == "imported: []"  # XLA is not loaded to find out


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


ALONE_BY_ITS_OWN_WORD = """
import sys, torch, xla_ckpt
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
xla_ckpt.save(sys.argv[1], "a", {"w": torch.ones(2)})
print(xla_ckpt.restore(sys.argv[1]).tree["w"].tolist())
"""

XLA_COUNTS_ITSELF = """
import sys, torch, torch_xla, torch_xla.distributed.xla_backend, xla_ckpt
torch.distributed.init_process_group("xla", init_method="xla://")
print(torch.distributed.get_world_size())
try:
    xla_ckpt.save(sys.argv[1], "a", {"w": torch.ones(2)})
except xla_ckpt.UsageError as error:
    print(error)
"""


def test_a_group_of_one_is_believed_only_if_the_program_made_it(tmp_path: Path) -> None:
    place = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    programs = (ALONE_BY_ITS_OWN_WORD, XLA_COUNTS_ITSELF)
    told = finish([bear(code, (tmp_path / str(i),), environment(place)) for i, code in enumerate(programs)])
    assert [code for code, _, _ in told] == [0, 0], told
    assert told[0][1].endswith("\n[1.0, 1.0]\n"), told  # gloo prints, too
    assert told[1][1].startswith("1\n"), told  # on the CPU, XLA's own group holds one process
    assert "the process group that XLA made has 1 rank" in told[1][1]
    assert xla_ckpt.list_tags(tmp_path / "1") == []


LAUNCH = """
import sys, torch_xla
from tests.topology.thread_ranks import train
torch_xla.launch(train, args=(sys.argv[1], *(sys.argv[2:] or [None])))
"""


@pytest.mark.parametrize("init_method", [None, "xla://"])
def test_ranks_that_are_threads_are_refused_at_once(init_method: str | None, tmp_path: Path) -> None:
    how = () if init_method is None else (init_method,)
    run(LAUNCH, tmp_path, *how, env={"CPU_NUM_DEVICES": "2", "MASTER_PORT": str(free_port())})
    said = [(tmp_path / f"said.{rank}").read_text().splitlines() for rank in range(2)]
    assert said[0] == said[1]
    save, load, looked, when = said[0]
    for error in (save, load):
        assert "runs the ranks of this job as threads" in error
        assert "2 ranks in 1 process." in error
        assert "torchrun" in error
    assert (looked, when) == ("False []", "in time")


def test_one_device_under_launch_saves_and_loads(tmp_path: Path) -> None:
    run(LAUNCH, tmp_path, env={"CPU_NUM_DEVICES": "1"})
    saved, loaded, looked, _ = (tmp_path / "said.0").read_text().splitlines()
    assert saved == "saved"
    assert loaded.startswith("loaded {'x': tensor(")
    assert looked == "True ['a']"


SEVERAL_DEVICES = """
import sys, torch, torch_xla, torch_xla.runtime as xr, torch_xla.core.xla_model as xm
if sys.argv[2] == "spmd":
    xr.use_spmd()
else:
    # As torch_xla's DataParallel leaves it: the devices replicate, and the main thread goes on alone.
    devices = xm.get_xla_supported_devices()
    xm.set_replication(devices[0], devices)
import xla_ckpt
xla_ckpt.save(sys.argv[1], "a", {"w": torch.ones(2, device="xla")})
assert xla_ckpt.restore(sys.argv[1]).tree["w"].tolist() == [1, 1]
"""


@pytest.mark.parametrize("how", ["spmd", "main thread"])
def test_one_process_that_saves_for_its_devices_goes_on_working(how: str, tmp_path: Path) -> None:
    run(SEVERAL_DEVICES, tmp_path, how, env={"CPU_NUM_DEVICES": "2"})
