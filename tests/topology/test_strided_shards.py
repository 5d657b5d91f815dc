"""DTensors that several mesh dims cut, on every rank of a mesh in turn: what is stored of them, and what is loaded.

It needs neither processes nor torch_xla nor orbax, and runs on every version of torch that has DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.boxes import is_partition
from xla_ckpt.arrays.registry import require_adapter
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.local_array import LocalArray
from xla_ckpt.errors import UnsupportedStateError
from xla_ckpt.snapshot.memory import SlabAllocator

TORCH_2_9 = issubclass(_StridedShard, Shard)
"""Whether this is the torch of the pinned environment, which cuts uneven strided shards in another way than 2.13."""

Split = Callable[[torch.Tensor, tuple[int, ...], Sequence[int]], torch.Tensor]
"""(whole tensor, sizes of the mesh, coordinates of a rank) -> its local tensor."""


def strided(dim: int, factor: int) -> Any:
    return _StridedShard(dim, split_factor=factor)


@contextmanager
def on_rank(rank: int, sizes: tuple[int, ...]) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=prod(sizes))
    try:
        yield init_device_mesh("cpu", sizes, mesh_dim_names=tuple("abc"[: len(sizes)]))
    finally:
        dist.destroy_process_group()


def part(placement: Any, tensor: torch.Tensor, parts: int, index: int) -> torch.Tensor:
    """What torch puts on one coordinate of a mesh dim."""
    found: torch.Tensor = placement._split_tensor(tensor, parts, with_padding=False, contiguous=True)[0][index]
    return found


def by_torch(placements: Sequence[Any]) -> Split:
    """The placements one after another, each as torch applies it."""

    def split(whole: torch.Tensor, sizes: tuple[int, ...], at: Sequence[int]) -> torch.Tensor:
        for d, placement in enumerate(placements):
            if not isinstance(placement, Replicate):
                whole = part(placement, whole, sizes[d], at[d])
        return whole

    return split


def by_fsdp(*order: int) -> Split:
    """Rows cut by these mesh dims in this order: `fully_shard` cuts what tensor parallelism has left."""

    def split(whole: torch.Tensor, sizes: tuple[int, ...], at: Sequence[int]) -> torch.Tensor:
        for d in order:
            whole = part(Shard(0), whole, sizes[d], at[d])
        return whole

    return split


def region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def stored(value: DTensor, local: LocalArray) -> torch.Tensor:
    """The global array as this rank's files would have it; -1 where it has nothing."""
    found = torch.full(value.shape, -1.0)
    shards = require_adapter(value).get_host_shards([(value, local)])[0]
    for piece, shard in zip(local.pieces, shards, strict=True):
        held = torch.frombuffer(bytearray(shard.data), dtype=torch.float32) if piece.global_box.size else torch.empty(0)
        found[region(piece.global_box)] = held.reshape(piece.global_box.shape)
    return found


def loaded(value: DTensor, local: LocalArray, whole: torch.Tensor, *, new: bool) -> DTensor:
    """The DTensor after a load of the whole array."""
    adapter = require_adapter(value)
    target = (
        adapter.create_target_like(value, local) if new else adapter.create_in_place_target(value, local, owned=True)
    )
    for box, memory in zip(target.boxes, target.allocate(SlabAllocator()), strict=True):
        memory[:] = whole[region(box)].contiguous().numpy().tobytes()
    made = target.install()
    assert isinstance(made, DTensor)
    return made


R, S0, S1 = Replicate(), Shard(0), Shard(1)
OVER_TP = [strided(0, 2), S0]
HSDP_OVER_TP = [R, strided(0, 2), S0]
BEHIND_TWO = [strided(0, 4), S0, S0]
BETWEEN = [S0, strided(0, 2), S0]
BOTH_DIMS = [S1, S0]
TWO_STRIDED = [strided(0, 4), strided(0, 2), S0]
FUSED_3 = [strided(0, 3)]
FUSED_2 = [strided(0, 2)]
FUSED_INSIDE = [S0, strided(0, 2)]
FUSED_COLUMNS = [S0, strided(1, 3)]

CASES = [
    *((OVER_TP, (2, 2), rows, by_fsdp(1, 0)) for rows in (16, 13, 5, 3, 1, 0)),
    *((OVER_TP, (3, 2), rows, by_fsdp(1, 0)) for rows in (12, 13)),
    *((HSDP_OVER_TP, (2, 2, 2), rows, by_fsdp(2, 1)) for rows in (16, 13, 5)),
    *((BEHIND_TWO, (2, 2, 2), rows, by_fsdp(1, 2, 0)) for rows in (16, 13, 5)),
    *((BETWEEN, (2, 2, 2), rows, by_fsdp(0, 2, 1)) for rows in (16, 13, 5)),
    *((TWO_STRIDED, (2, 2, 2), rows, by_fsdp(2, 1, 0)) for rows in (16, 13, 5)),
    *((BOTH_DIMS, (2, 2), rows, by_torch(BOTH_DIMS)) for rows in (16, 13, 5, 1)),
    *((FUSED_3, (2,), rows, by_torch(FUSED_3)) for rows in (12, 6, 11, 0)),
    *((FUSED_2, (2,), rows, by_torch(FUSED_2)) for rows in (16, 4, 15)),
    *((FUSED_INSIDE, (2, 2), rows, by_torch(FUSED_INSIDE)) for rows in (16, 8)),
    *((FUSED_COLUMNS, (2, 2), rows, by_torch(FUSED_COLUMNS)) for rows in (4, 5)),
    *((p, (2, 2, 2), 16, by_torch(p)) for p in (HSDP_OVER_TP, BEHIND_TWO, BETWEEN, TWO_STRIDED)),
]


def named(value: Any) -> str:
    """As torch writes placements; the rest as Python does."""
    return "".join(map(str, value)) if isinstance(value, list) else getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("placements", "sizes", "rows", "split"), CASES, ids=named)
def test_every_rank_stores_and_loads_what_it_holds(
    placements: list[Any], sizes: tuple[int, ...], rows: int, split: Split
) -> None:
    whole = torch.arange(rows * 6).reshape(rows, 6).float()
    copies = prod(n for n, p in zip(sizes, placements, strict=True) if isinstance(p, Replicate))
    boxes: list[Box] = []
    for rank in range(prod(sizes)):
        with on_rank(rank, sizes) as mesh:
            mine = split(whole, sizes, mesh.get_coordinate() or ())
            value = DTensor.from_local(
                mine.clone(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )
            local = require_adapter(value).locate(value, "w")
            assert local is not None
            assert (local.shape, local.replicas) == ((rows, 6), copies)
            found = stored(value, local)
            assert torch.equal(found[found >= 0].sort().values, mine.flatten().sort().values)
            assert torch.equal(found[found >= 0], whole[found >= 0])
            boxes += [piece.global_box for piece in local.pieces if local.replica == 0]
            blank = DTensor.from_local(
                torch.full_like(mine, -7.0), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )
            new = loaded(blank, local, whole, new=True)
            assert torch.equal(new._local_tensor, mine)
            assert (new.placements, new.shape) == (tuple(placements), whole.shape)
            assert torch.equal(blank._local_tensor, torch.full_like(mine, -7.0))
            assert loaded(blank, local, whole, new=False) is blank
            assert torch.equal(blank._local_tensor, mine)
    assert is_partition(boxes, Box.from_shape((rows, 6)))


@pytest.mark.parametrize(
    ("placements", "sizes", "rows"), [(FUSED_2, (2,), 5), (FUSED_3, (2,), 13), (FUSED_INSIDE, (2, 2), 10)]
)
def test_uneven_interleaved_shards_are_stored_where_torch_has_one_meaning_for_them(
    placements: list[Any], sizes: tuple[int, ...], rows: int
) -> None:
    whole = torch.arange(rows * 3).reshape(rows, 3).float()
    for rank in range(prod(sizes)):
        with on_rank(rank, sizes) as mesh:
            mine = by_torch(placements)(whole, sizes, mesh.get_coordinate() or ())
            value = DTensor.from_local(
                mine, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )
            if TORCH_2_9:
                with pytest.raises(UnsupportedStateError, match="two meanings for an interleaved strided") as raised:
                    require_adapter(value).locate(value, "model/w")
                assert "model/w" in str(raised.value)
            else:
                local = require_adapter(value).locate(value, "w")
                assert local is not None
                found = stored(value, local)
                assert torch.equal(found[found >= 0], whole[found >= 0])
                assert (found >= 0).sum() == mine.numel()


class Entry(NamedTuple):
    """As `ShardOrderEntry` of torch 2.13."""

    tensor_dim: int
    mesh_dims: tuple[int, ...]


@pytest.mark.parametrize(("order", "fits"), [((0, 1), True), ((1, 0), False)])
def test_an_order_that_the_placements_do_not_tell_is_refused(order: tuple[int, ...], fits: bool) -> None:
    with on_rank(1, (2, 2)) as mesh:
        value = DTensor.from_local(torch.zeros(2, 3), mesh, [S0, S0], run_check=False, shape=(8, 3), stride=(3, 1))
        value._spec.shard_order = (Entry(0, order),)
        if fits:
            local = require_adapter(value).locate(value, "w")
            assert local is not None
            assert [str(p.global_box) for p in local.pieces] == ["[2:4, 0:3]"]
        else:
            with pytest.raises(UnsupportedStateError, match="another order than that of its mesh dims") as raised:
                require_adapter(value).locate(value, "model/w")
            assert "model/w" in str(raised.value)


class OddShard(Shard):
    """Cuts in a way that nobody here knows."""


def test_a_placement_derived_from_shard_is_refused() -> None:
    with on_rank(0, (2,)) as mesh:
        value = DTensor.from_local(torch.zeros(4, 3), mesh, [OddShard(0)], run_check=False)
        assert type(value.placements[0]) is OddShard
        with pytest.raises(UnsupportedStateError, match="is cut in a way not known here"):
            require_adapter(value).locate(value, "w")


@pytest.mark.parametrize(
    ("placements", "sizes", "spec"),
    [
        (OVER_TP, (2, 2), (("b", "a"), None)),
        (HSDP_OVER_TP, (2, 2, 2), (("c", "b"), None)),
        (FUSED_3, (2,), (("a", 3), None)),
        (FUSED_COLUMNS, (2, 2), (("a",), ("b", 3))),
        (FUSED_INSIDE, (2, 2), (("a", "b"), None)),
    ],
)
def test_the_manifest_names_the_mesh_dims_in_the_order_in_which_they_cut(
    placements: list[Any], sizes: tuple[int, ...], spec: tuple[object, ...]
) -> None:
    whole = torch.zeros(24, 12)
    with on_rank(0, sizes) as mesh:
        mine = by_torch(placements)(whole, sizes, mesh.get_coordinate() or ())
        value = DTensor.from_local(mine, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())
        local = require_adapter(value).locate(value, "w")
    assert local is not None
    assert local.spec == spec
