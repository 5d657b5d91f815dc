"""What a reviewer found who attacked the calls of torch.distributed.checkpoint: each was silently wrong before."""

from __future__ import annotations

import collections
import types
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.staging import AsyncStager

import xla_ckpt
import xla_ckpt.dcp as dcp
from xla_ckpt.errors import LoadError, SaveError, UnsupportedStateError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


class Kept(MutableMapping[str, Any]):
    """A mapping that is no dict, and of which a shallow copy shares its members."""

    def __init__(self, held: dict[str, Any]) -> None:
        self.held = held

    def __getitem__(self, key: str) -> Any:
        return self.held[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.held[key] = value

    def __delitem__(self, key: str) -> None:
        del self.held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


class MadeAnew(Mapping[str, Any]):
    """A mapping that makes its values each time that it is asked."""

    def __getitem__(self, key: str) -> Any:
        return torch.full((2,), float(key))

    def __iter__(self) -> Iterator[str]:
        return iter(["1", "2"])

    def __len__(self) -> int:
        return 2


class Broken:
    """A `Stateful` whose state cannot be had."""

    def state_dict(self) -> dict[str, Any]:
        raise KeyError("lost")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("it has no state to load into")


class Late(AsyncStager):
    """A stager that copies only when it is waited for."""

    _synchronize_after_execute = True

    def stage(self, state_dict: Any, **_: Any) -> Any:
        self.source = state_dict
        self.buffers = {key: torch.zeros_like(value) for key, value in state_dict.items()}
        return self.buffers

    def synchronize_staging(self) -> None:
        for key, value in self.source.items():
            self.buffers[key].copy_(value)

    def close(self) -> None:
        pass


def test_a_counter_is_not_counted_twice(tmp_path: Path) -> None:
    counter = collections.Counter("aab")
    stock.save({"x": (counter,)}, checkpoint_id=tmp_path / "a", no_dist=True)
    found: dict[str, Any] = {"x": None}
    dcp.load(found, checkpoint_id=tmp_path / "a", no_dist=True)
    assert found["x"] == (counter,)
    dcp.async_save({"c": counter, "size": torch.Size([1, 2])}, checkpoint_id=tmp_path / "b", no_dist=True).result()
    found = {"c": {"a": 0, "b": 0}, "size": None}
    dcp.load(found, checkpoint_id=tmp_path / "b", no_dist=True)
    assert found["c"] == {"a": 2, "b": 1}
    assert type(found["size"]) is torch.Size


def test_a_save_in_the_background_leaves_a_mapping_of_the_program_alone(tmp_path: Path) -> None:
    weight = torch.ones(2)
    held = Kept({"w": weight})
    dcp.async_save({"m": held}, checkpoint_id=tmp_path / "a", no_dist=True).result()
    assert held["w"] is weight
    assert torch.equal(xla_ckpt.restore(tmp_path / "a").tree["m"]["w"], weight)


def test_a_stager_of_the_program_is_waited_for(tmp_path: Path) -> None:
    dcp.async_save(
        {"w": torch.full((4,), 7.0)}, checkpoint_id=tmp_path / "a", no_dist=True, async_stager=Late()
    ).result()
    found = {"w": torch.zeros(4)}
    dcp.load(found, checkpoint_id=tmp_path / "a", no_dist=True)
    assert found["w"].tolist() == [7.0] * 4


def test_a_load_is_an_in_place_operation_to_autograd(tmp_path: Path) -> None:
    dcp.save({"w": torch.full((4,), 7.0)}, checkpoint_id=tmp_path / "a", no_dist=True)
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * weight).sum()
    dcp.load({"w": weight}, checkpoint_id=tmp_path / "a", no_dist=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_ranks_that_found_different_versions_load_neither(tmp_path: Path) -> None:
    plans = []
    for value in (1.0, 2.0):
        dcp.save({"w": torch.full((4,), value)}, checkpoint_id=tmp_path / "a", no_dist=True)
        reader, planner = dcp.StorageReader(tmp_path / "a"), DefaultLoadPlanner()
        planner.set_up_planner({"w": torch.zeros(4)}, reader.read_metadata(), is_coordinator=True)
        plans.append(reader.prepare_local_plan(planner.create_local_plan()))
        reader.close()
    assert dcp.StorageReader(tmp_path / "a").prepare_global_plan(plans[:1] * 2) == plans[:1] * 2
    with pytest.raises(xla_ckpt.StorageError, match="replaced while the ranks opened it"):
        dcp.StorageReader(tmp_path / "a").prepare_global_plan(plans)


def test_a_mapping_that_makes_its_values_is_saved_in_the_background(tmp_path: Path) -> None:
    state = {"m": MadeAnew(), "frozen": types.MappingProxyType({"w": torch.ones(2)})}
    dcp.async_save(state, checkpoint_id=tmp_path / "a").result()  # type: ignore[union-attr]
    target = {"m": {"1": torch.zeros(2), "2": torch.zeros(2)}, "frozen": {"w": torch.zeros(2)}}
    stock.load(target, checkpoint_id=tmp_path / "a")
    assert [t.tolist() for t in (*target["m"].values(), target["frozen"]["w"])] == [[1, 1], [2, 2], [1, 1]]


def test_the_directory_in_which_the_program_works_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (".", tmp_path, tmp_path / "x" / ".."):
        with pytest.raises(UsageError, match="in which this program works"):
            dcp.save({"w": torch.ones(2)}, checkpoint_id=path)
    assert Path.cwd() == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_containers_without_end(tmp_path: Path) -> None:
    """What is too deep to be read again is not written; and no walk meets the end of python's stack."""
    deep: Any = {"w": torch.ones(2)}
    for _ in range(200):
        deep = {"d": deep}
    for save in (
        lambda: dcp.save(deep, checkpoint_id=tmp_path / "a"),
        lambda: xla_ckpt.save(tmp_path, "b", deep),
        lambda: xla_ckpt.save_checkpoint(tmp_path, "c", user_content=deep, layout="dcp"),
    ):
        with pytest.raises(UnsupportedStateError, match="nested deeper"):
            save()
    assert xla_ckpt.list_tags(tmp_path) == []


def test_a_state_that_cannot_be_had_fails_the_call_that_asks_for_it(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a")
    target = {"w": torch.zeros(2), "broken": Broken()}
    with pytest.raises(SaveError, match="lost"):
        dcp.save(target, checkpoint_id=tmp_path / "b")
    with pytest.raises(LoadError, match="lost") as caught:
        dcp.load(target, checkpoint_id=tmp_path / "a")
    assert caught.value.leaf == "broken"
    assert target["w"].tolist() == [0, 0]
