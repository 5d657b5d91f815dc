"""Adapters alone over several ranks: a base is known again however its rows are split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.jobs import run_on_ranks
from xla_ckpt import Mesh

ROWS = [("base|wide", ("tp", None)), ("scale", ("tp",))]
COLUMNS = [("base|wide", (None, "tp"))]


class Layer(torch.nn.Module):
    """What a rank has of two arrays that are not trained, and an adapter that all ranks have whole."""

    def __init__(self, rank: int, world: int, columns: bool = False, value: float = 0.0) -> None:
        super().__init__()
        base, scale = torch.arange(64 * 8.0).reshape(64, 8) + value, torch.arange(256.0)
        rows, wide, few = 64 // world, 8 // world, 256 // world
        own = base[:, rank * wide : (rank + 1) * wide] if columns else base[rank * rows : (rank + 1) * rows]
        self.base = torch.nn.Parameter(own.clone(), requires_grad=False)
        own_scale = scale if columns else scale[rank * few : (rank + 1) * few]
        self.scale = torch.nn.Parameter(own_scale.clone(), requires_grad=False)
        self.lora_A = torch.nn.Parameter(torch.full((3, 6), 1.0 + value))


def where(world: int, columns: bool = False) -> dict[str, Any]:
    return {"mesh": Mesh(tp=world), "shardings": COLUMNS if columns else ROWS}


def saves(rank: int, root: Path, world: int) -> None:
    xla_ckpt.save_checkpoint(root, f"tp={world}", Layer(rank, world), only="adapters", **where(world))
    xla_ckpt.save_checkpoint(root, f"dp={world}", Layer(0, 1), only="adapters", mesh=Mesh(dp=world))
    if world == 2:
        layer = Layer(rank, world, columns=True)
        xla_ckpt.save_checkpoint(root, "columns", layer, only="adapters", **where(world, columns=True))


def loads(rank: int, root: Path, world: int) -> list[Any]:
    """What each rank says of loads over its own base, and over one that differs on the last rank alone."""
    said: list[Any] = []
    for tag in ("tp=2", "tp=1", "dp=2", "columns"):
        layer = Layer(rank, world)
        with torch.no_grad():
            layer.lora_A.zero_()
        xla_ckpt.load_checkpoint(root, tag, layer, **where(world))
        said.append(float(layer.lora_A.detach().sum()))
        if rank == world - 1:
            layer.base.data[-1, -1] += 1
        try:
            xla_ckpt.load_checkpoint(root, tag, layer, **where(world))
            said.append("loaded")
        except xla_ckpt.IncompatibleCheckpointError as error:
            said.append(error.details)
    return said


@pytest.mark.parametrize("world", [1, 2])
def test_a_base_is_known_again_over_other_ranks(tmp_path: Path, world: int) -> None:
    for ranks in (1, 2):
        run_on_ranks(saves, ranks, tmp_path, ranks)
    tags = [xla_ckpt.restore(tmp_path, tag).tree["base"]["ranks"] for tag in ("tp=1", "tp=2", "dp=2")]
    assert [len(ranks) for ranks in tags] == [1, 2, 2]
    assert [len(said) for said in tags[2].values()] == [2, 0]  # the second replica says nothing
    of_ranks = run_on_ranks(loads, world, tmp_path, world)
    assert of_ranks == [of_ranks[0]] * world  # all say the same
    *compared, columns, unknown = of_ranks[0]
    assert compared[::2] == [18.0] * 3
    assert all("model/base: the adapters belong to another base model: digest" in text for text in compared[1::2])
    # Columns of rows have no digest: names, types and shapes are all that is compared, and what is stored of the rest.
    assert (columns, unknown) == (18.0, "loaded")


def replicas(rank: int, root: Path) -> str | None:
    """What is said of a load by two replicas, of which the second has another base."""
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError) as caught:
        xla_ckpt.load_checkpoint(root, "tp=2", Layer(0, 1, value=float(rank)), mesh=Mesh(dp=2))
    return caught.value.details


def test_each_replica_has_to_have_the_base(tmp_path: Path) -> None:
    run_on_ranks(saves, 2, tmp_path, 2)
    one, other = run_on_ranks(replicas, 2, tmp_path)
    assert one == other
    assert "is named, that differs between ranks is here" in str(one)


def fsdp2(rank: int, root: Path) -> list[Any]:
    """A base that FSDP2 has split, and then a base of another rank's."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))

    def split(layer: Layer) -> Layer:
        for name in ("base", "scale"):
            whole = getattr(layer, name).data
            setattr(layer, name, torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]), requires_grad=False))
        return layer

    xla_ckpt.save_checkpoint(root, "fsdp", split(Layer(0, 1)), only="adapters")
    xla_ckpt.load_checkpoint(root, "fsdp", Layer(0, 1))
    xla_ckpt.load_checkpoint(root, "dp=2", split(Layer(0, 1)))
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError) as caught:
        xla_ckpt.load_checkpoint(root, "dp=2", split(Layer(0, 1, value=1.0)))
    return [caught.value.details]


def test_a_base_that_fsdp_has_split_is_the_same(tmp_path: Path) -> None:
    run_on_ranks(saves, 2, tmp_path, 2)
    one, other = run_on_ranks(fsdp2, 2, tmp_path)
    assert one == other
    assert "model/base: the adapters belong to another base model" in one[0]
