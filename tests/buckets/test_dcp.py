"""`xla_ckpt.dcp` with a ``checkpoint_id`` in a bucket, and directories that stock DCP wrote, which lie in one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import xla_ckpt
from tests.buckets.content import download, names_below, upload
from tests.jobs import run_on_ranks
from xla_ckpt import dcp

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


def state(value: float = 1.0, nested: Any = 3) -> dict[str, Any]:
    return {"model": {"w": torch.full((400, 30), value), "b": torch.arange(5.0) * value}, "step": nested}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_saves_and_loads(root: str, asynchronous: bool, tmp_path: Path) -> None:
    for step in (1, 2):
        if asynchronous:
            dcp.async_save(state(step), checkpoint_id=f"{root}/{step}").result()  # type: ignore[union-attr]
        else:
            dcp.save(state(step), checkpoint_id=f"{root}/{step}")
    held = state(0, 0)
    dcp.load(held, checkpoint_id=f"{root}/1")
    assert held["model"]["w"].eq(1).all()
    assert held["step"] == 3
    assert xla_ckpt.list_tags(root) == ["1", "2"]
    assert xla_ckpt.verify(f"{root}/2").ok
    download(f"{root}/2", tmp_path)
    stock.load(held, checkpoint_id=tmp_path)
    assert held["model"]["w"].eq(2).all()


def test_one_that_is_there_is_not_replaced(root: str) -> None:
    dcp.save(state(1), checkpoint_id=f"{root}/a")
    before = names_below(root)
    with pytest.raises(xla_ckpt.UsageError, match="cannot replace it in one step"):
        dcp.save(state(2), checkpoint_id=f"{root}/a")
    assert names_below(root) == before
    held = state(0)
    dcp.load(held, checkpoint_id=f"{root}/a")
    assert held["model"]["w"].eq(1).all()


def saves(rank: int, root: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.full((200, 30), float(rank))
    held = {"w": DTensor.from_local(local, mesh, [Shard(0)]), "step": 7}
    dcp.save(held, checkpoint_id=f"{root}/a")
    dcp.async_save(held, checkpoint_id=f"{root}/b").result()  # type: ignore[union-attr]
    with pytest.raises(xla_ckpt.UsageError, match="cannot replace it in one step"):
        dcp.save(held, checkpoint_id=f"{root}/a")


def loads(rank: int, address: str) -> list[float]:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    held = {"w": DTensor.from_local(torch.zeros(400 // world, 30), mesh, [Shard(0)]), "step": 0}
    dcp.load(held, checkpoint_id=address)
    assert held["step"] == 7
    local = held["w"].to_local()  # type: ignore[attr-defined]
    return [float(local[0, 0]), float(local[-1, 0])]


def test_ranks_save_and_another_number_of_them_loads(root: str) -> None:
    run_on_ranks(saves, 2, root)
    for tag in ("a", "b"):
        assert run_on_ranks(loads, 4, f"{root}/{tag}") == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_what_stock_dcp_wrote(root: str, tmp_path: Path) -> None:
    stock.save(state(5), checkpoint_id=tmp_path / "c")
    upload(tmp_path, root)
    assert xla_ckpt.list_tags(root) == ["c"]
    assert xla_ckpt.verify(root).ok
    held = state(0)
    dcp.load(held, checkpoint_id=f"{root}/c")
    assert held["model"]["w"].eq(5).all()
    assert xla_ckpt.restore(f"{root}/c").tree["model"]["b"].tolist() == [0, 5, 10, 15, 20]
    xla_ckpt.convert(root, f"{root}-native")
    assert xla_ckpt.diff(root, f"{root}-native").same
