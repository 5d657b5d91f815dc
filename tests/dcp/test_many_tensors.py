"""What is done for many tensors at once: the collector's pause, shared metadata, and one reading of small states."""

from __future__ import annotations

import gc
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

import xla_ckpt.dcp as dcp
from xla_ckpt.errors import CheckpointError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class WatchedSave(dcp.DefaultSavePlanner):
    """Notes whether the collector runs while it plans."""

    fails = False
    enabled: bool | None = None

    def create_local_plan(self) -> Any:
        self.enabled = gc.isenabled()
        if self.fails:
            raise ValueError("no plan")
        return super().create_local_plan()


class WatchedLoad(dcp.DefaultLoadPlanner):
    enabled: bool | None = None

    def create_local_plan(self) -> Any:
        self.enabled = gc.isenabled()
        return super().create_local_plan()


def test_the_collector_is_paused_while_stock_plans(tmp_path: Path) -> None:
    saver, loader = WatchedSave(), WatchedLoad()
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "a", planner=saver)
    dcp.load({"w": torch.zeros(4)}, checkpoint_id=tmp_path / "a", planner=loader)
    assert (saver.enabled, loader.enabled) == (False, False)
    assert gc.isenabled()


def test_the_collector_runs_again_after_a_failed_plan(tmp_path: Path) -> None:
    saver = WatchedSave()
    saver.fails = True
    with pytest.raises(CheckpointError, match="no plan"):
        dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "a", planner=saver)
    assert saver.enabled is False
    assert gc.isenabled()


def test_metadata_says_equal_things_once(tmp_path: Path) -> None:
    state = {f"w{i}": torch.full((3, 5), float(i)) for i in range(20)}
    told = dcp.save({**state, "n": torch.ones(2, dtype=torch.int64), "x": 1}, checkpoint_id=tmp_path / "a")
    read: Metadata = pickle.loads((tmp_path / "a" / ".metadata").read_bytes())  # noqa: S301  # as stock reads it
    assert read.state_dict_metadata["x"] == told.state_dict_metadata["x"]
    for key in (*state, "n"):  # the strides that torch 2.15 tells of are not stored: older versions fail on them
        stored, said = read.state_dict_metadata[key], told.state_dict_metadata[key]
        assert isinstance(stored, TensorStorageMetadata)
        assert isinstance(said, TensorStorageMetadata)
        assert (stored.size, stored.chunks, stored.properties.dtype) == (said.size, said.chunks, said.properties.dtype)
    entries: Any = [read.state_dict_metadata[key] for key in state]
    assert len({id(entry.properties) for entry in entries}) == 1
    assert len({id(chunk) for entry in entries for chunk in entry.chunks}) == 1
    assert len({id(entry.chunks) for entry in entries}) == len(entries)  # a list of its own: a program may change it


def test_tensors_of_inference_mode_are_filled(tmp_path: Path) -> None:
    with torch.inference_mode():
        target = {"same": torch.zeros(3), "other": torch.zeros(3, dtype=torch.float64)}
    dcp.save({"same": torch.arange(3.0), "other": torch.arange(3.0)}, checkpoint_id=tmp_path / "a")
    dcp.load(target, checkpoint_id=tmp_path / "a")
    assert [value.tolist() for value in target.values()] == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("read_once", [True, False])
def test_a_tensor_that_cannot_be_written_to_is_found_before_any_other_is(tmp_path: Path, read_once: bool) -> None:
    dcp.save({"a": torch.ones(4), "n": 7, "z": torch.ones(4)}, checkpoint_id=tmp_path / "a")
    target: dict[str, Any] = {"a": torch.zeros(4), "n": 1, "z": torch.zeros(1).expand(4)}
    reader = dcp.StorageReader(tmp_path / "a", read_once=read_once)
    with pytest.raises(UsageError, match="share memory"):
        dcp.load(target, storage_reader=reader)
    assert (target["a"].tolist(), target["n"]) == ([0.0] * 4, 1)
