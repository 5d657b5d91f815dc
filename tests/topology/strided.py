"""A fused weight in interleaved DTensor shards, as one rank of two saves it and loads it."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import xla_ckpt

ROWS, COLUMNS, PARTS = 12, 5, 3


def fused() -> torch.Tensor:
    """Query, key and value, one above the other."""
    return torch.arange(float(ROWS * COLUMNS)).reshape(ROWS, COLUMNS)


def sharded(whole: torch.Tensor, placement: object) -> DTensor:
    """This rank's part; of an interleaved one its half of query, of key and of value.

    Never the result of arithmetic: that of a strided DTensor of torch 2.9 claims to be plainly sharded.
    """
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    blocks = whole.chunk(2 * PARTS if isinstance(placement, _StridedShard) else 2)
    mine = torch.cat(blocks[torch.distributed.get_rank() :: 2]).clone()
    return DTensor.from_local(mine, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())  # type: ignore[list-item]


def model_of(weight: DTensor) -> torch.nn.Module:
    """A module with this weight."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(weight)
    return model


def save(root: str, tag: str, *, interleaved: bool, async_save: bool) -> None:
    """Save weight and moments."""
    placement = _StridedShard(0, split_factor=PARTS) if interleaved else Shard(0)
    model = model_of(sharded(fused(), placement))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    optimizer.state[model.weight]["momentum_buffer"] = sharded(fused() * 2, placement)
    xla_ckpt.save_checkpoint(
        root, tag, model, optimizer, async_save=async_save, options=xla_ckpt.SaveOptions(timeout=60)
    ).result()


def load(root: str, tag: str, *, interleaved: bool) -> None:
    """Load into blank parts, moments that are there and moments that are not, and compare."""
    placement = _StridedShard(0, split_factor=PARTS) if interleaved else Shard(0)
    wanted, moments = sharded(fused(), placement), sharded(fused() * 2, placement)
    for has_state in (False, True):
        model = model_of(sharded(torch.full((ROWS, COLUMNS), -7.0), placement))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.1)
        if has_state:
            optimizer.state[model.weight]["momentum_buffer"] = sharded(torch.zeros(ROWS, COLUMNS), placement)
        xla_ckpt.load_checkpoint(root, tag, model, optimizer, options=xla_ckpt.LoadOptions(timeout=60))
        moment = optimizer.state[model.weight]["momentum_buffer"]
        for found, want in ((model.weight, wanted), (moment, moments)):
            assert isinstance(found, DTensor)
            assert found.placements == (placement,)
            assert torch.equal(found.to_local(), want.to_local()), (found, want)
    tree = xla_ckpt.restore(root, tag, {"model": {"weight": sharded(torch.zeros(ROWS, COLUMNS), placement)}}).tree
    assert torch.equal(tree["model"]["weight"].to_local(), wanted.to_local())
