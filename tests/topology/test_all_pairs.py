"""Every topology to every other, in one process over memory storage: bit for bit, and every byte written once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from tests.covering import covering, pairs_of_values
from tests.memory import MemoryDirectory
from tests.topology.state import WHOLE, known, names_of, part_of, tp_part, whole
from xla_ckpt import Mesh
from xla_ckpt.arrays.torch_elements import get_tensor_bytes, narrow_to_box
from xla_ckpt.arrays.torch_tensor import PieceBuffers
from xla_ckpt.core import dtypes
from xla_ckpt.core.manifest import manifest_json
from xla_ckpt.core.manifest.manifest import ManifestHeader
from xla_ckpt.core.plan.leaf import create_leaf
from xla_ckpt.core.plan.merge import merge_records
from xla_ckpt.core.plan.rank_record import RankRecord
from xla_ckpt.core.plan.restore_plan import ReadRequest, plan_restore
from xla_ckpt.core.plan.save_plan import plan_save
from xla_ckpt.core.sharding.local_array import LocalArray
from xla_ckpt.core.sharding.sharding import DimSharding, Sharding
from xla_ckpt.loading.read import read_into
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.progress import IoContext
from xla_ckpt.saving.write import write_files

FLOAT = dtypes.get_dtype("float32")


@dataclass(frozen=True)
class Topology:
    mesh: Mesh
    zero: bool

    def degrees(self) -> tuple[int, ...]:
        return self.mesh.pp, self.mesh.dp, self.mesh.cp, self.mesh.tp, int(self.zero)

    def __str__(self) -> str:
        m = self.mesh
        return f"pp{m.pp}dp{m.dp}cp{m.cp}tp{m.tp}{'-zero1' if self.zero else ''}"

    def arrays(self, rank: int) -> dict[str, tuple[LocalArray, torch.Tensor]]:
        """Leaf path -> where it lies, and its bytes, on one rank; the second from the test's own code."""
        found = {}
        for name in names_of(self.mesh, rank):
            shape, dim, stride = WHOLE[name]
            dims: list[DimSharding | None] = [None] * len(shape)
            if dim is not None:
                dims[dim] = DimSharding.from_stride(("tp",), stride)
            sharding = Sharding(tuple(dims), shape)
            weight = part_of(whole(name), name, self.mesh, rank)
            found[f"model/{name}"] = sharding.map_local_shape(tuple(weight.shape), self.mesh, rank), weight
            for what in ("exp_avg", "exp_avg_sq"):
                value = part_of(known(name, what), name, self.mesh, rank, zero=self.zero)
                place = sharding.map_local_shape(tuple(weight.shape), self.mesh, rank)
                if self.zero:
                    place = sharding.map_zero1_shape(tuple(weight.shape), self.mesh, rank, ("dp",))
                found[f"optimizer/state/{name}/{what}"] = place, value
        return found


def topologies() -> list[Topology]:
    meshes = [
        Mesh(pp=pp, dp=dp, cp=cp, tp=tp)
        for pp in (1, 2, 3, 4, 8)  # the stages in the middle hold nothing
        for dp in range(1, 9)
        for cp in (1, 2)
        for tp in (1, 2, 3, 4, 6)  # others do not divide the strided projection
        if pp * dp * cp * tp <= 8 and not (cp == 2 and (pp > 1 or tp > 2))
    ]
    return [Topology(m, z) for m in meshes for z in ((False, True) if m.dp > 1 else (False,))]


@cache
def stored(topology: Topology) -> TagReader:
    directory, records = MemoryDirectory(), []
    world = topology.mesh.size
    names_of_stage: dict[int, set[str]] = {}
    for rank in range(world):
        arrays = topology.arrays(rank)
        leaves = [create_leaf(path, FLOAT, local) for path, (local, _) in arrays.items()]
        stage = topology.mesh.coordinates(rank)["pp"]
        assert names_of_stage.setdefault(stage, set(arrays)) == set(arrays)
        plan = plan_save(leaves, rank, world)
        pieces = {(p, i): narrow_to_box(v, piece.local_box).contiguous() for p, (local, v) in arrays.items()
                  for i, piece in enumerate(local.pieces)}  # fmt: skip
        written = write_files(
            directory, plan, {k: get_tensor_bytes(v) for k, v in pieces.items()}, IoContext(workers=1)
        )
        facts = {leaf.path: (leaf.dtype.name, leaf.shape, leaf.spec, None) for leaf in leaves}
        records.append(
            RankRecord.from_shards(
                written.shards, rank=rank, files=written.files, arrays=facts, aliases={}, skeleton=None
            )
        )
    merged = merge_records(records, topology.mesh)
    assert not merged.duplicates
    manifest = merged.build_manifest(ManifestHeader(tag="t", sequence=1, pinned=False, created=""), topology.mesh)
    directory.objects["manifest.json"] = manifest_json.dump_manifest(manifest)
    payload = sum(f.size - f.framing_bytes for f in manifest.files)
    assert payload == manifest.nbytes == sum(4 * whole(n).numel() for n in WHOLE) * 3  # every byte, once
    return TagReader(directory, "memory", "t")


def restored(reader: TagReader, arrays: dict[str, tuple[LocalArray, torch.Tensor]]) -> dict[str, Any]:
    """The arrays of one rank, read anew."""
    wants, slots, fills = [], [], {}
    for path, (local, like) in arrays.items():
        made, spread = torch.zeros_like(like), PieceBuffers(local)
        wants += [ReadRequest(path, box, len(slots) + i) for i, box in enumerate(local.boxes)]
        slots += spread.get_memory(made)
        fills[path] = spread, made
    plan = plan_restore(reader.manifest, wants)
    assert plan.needed_bytes == 4 * sum(w.box.size for w in wants)
    read_into(reader, plan, slots, IoContext(workers=1))
    return {path: spread.copy_into(made) for path, (spread, made) in fills.items()}


@cache
def some_pairs() -> list[tuple[Topology, Topology]]:
    """(who saved, who loads) such that each topology does both, and each pair of degrees comes.

    A plan is made of one array's boxes at a time: how an axis cut it for those who saved, and for those who load. So
    what can be wrong is shown by a pair of degrees: any of who saved with any of who loads, and any two of one side.
    """

    def shown_by(pair: tuple[Topology, Topology]) -> Iterator[Hashable]:
        source, target = pair
        yield from pairs_of_values((*source.degrees(), *target.degrees()))
        yield from (("saves", str(source)), ("loads", str(target)))

    return covering(list(product(topologies(), topologies())), shown_by)


@pytest.mark.parametrize("pairs", ["some", pytest.param("all", marks=pytest.mark.rest)])
@pytest.mark.parametrize("target", topologies(), ids=str)
def test_every_topology_resumes_as_this_one(target: Topology, pairs: str) -> None:
    """Those of `some_pairs`, or what each topology saved."""
    sources = topologies() if pairs == "all" else [source for source, loads in some_pairs() if loads == target]
    assert sources
    by_place = {}  # replicas want the same: one of them is enough
    for rank in range(target.mesh.size):
        arrays = target.arrays(rank)
        by_place[tuple((path, local.pieces) for path, (local, _) in arrays.items())] = rank, arrays
    for source in sources:
        reader = stored(source)
        for rank, wanted in by_place.values():
            for path, found in restored(reader, wanted).items():
                assert torch.equal(found, wanted[path][1]), (str(source), rank, path)


def test_the_tests_own_split_is_a_split() -> None:
    """The reference is checked, too: the parts of all ranks hold every element of the whole."""
    for name, (shape, dim, _) in WHOLE.items():
        for tp in (1, 2, 3, 4):
            parts = [tp_part(whole(name), name, tp, i) for i in range(tp)]
            held = torch.cat([p.reshape(-1) for p in parts]) if dim is not None else parts[0].reshape(-1)
            assert sorted(held[held != 0].tolist()) == sorted(whole(name).reshape(-1).tolist())
