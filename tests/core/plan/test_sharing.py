"""What a save shares and what it writes: together all of it, each element once, and no file that has old bytes, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xla_ckpt.core import dtypes
from xla_ckpt.core.manifest.manifest import FileRecord, Manifest, ManifestHeader
from xla_ckpt.core.plan import file_sharing
from xla_ckpt.core.plan.leaf import ArrayLeaf, LeafTable, create_leaf
from xla_ckpt.core.plan.merge import merge_records
from xla_ckpt.core.plan.rank_record import RankRecord
from xla_ckpt.core.plan.save_plan import SavePlan, WriteResult, collect_shards, plan_save
from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.core.sharding.sharding import Sharding

Values = dict[str, int]
"""Leaf path -> what stands for the bytes of all of its regions."""

NAMES = [f"{member}/{n}" for member in ("model", "optimizer", "w") for n in range(4)]
SHAPE = (6, 2)


def leaves_of(values: Values, mesh: Mesh, rank: int, dtype: str = "float32") -> list[ArrayLeaf]:
    place = Sharding.parse(("tp",)).map_local_shape((SHAPE[0] // mesh.tp, SHAPE[1]), mesh, rank)
    return [create_leaf(path, dtypes.get_dtype(dtype), place) for path in values]


def recorded(files: list[WriteResult], ranks: list[list[ArrayLeaf]], mesh: Mesh) -> Manifest:
    """The manifest of what all ranks have; raises if that is not every element once."""
    records = [
        RankRecord.from_shards(
            written.shards, rank=rank, files=written.files, aliases={}, skeleton={} if rank == 0 else None,
            arrays={leaf.path: (leaf.dtype.name, leaf.shape, None, None) for leaf in ranks[rank]},
        )
        for rank, written in enumerate(files)
    ]  # fmt: skip
    head = ManifestHeader(tag="t", sequence=1, pinned=False, created="")
    return merge_records(records, mesh).build_manifest(head, mesh)


def wrote(plan: SavePlan) -> WriteResult:
    records = [
        FileRecord(path=f.path, size=f.layout.size, framing_bytes=f.layout.size - f.data_bytes, framing_digest=0)
        for f in plan.files
    ]
    return WriteResult(tuple(records), collect_shards(plan.files))


class Run:
    """Saves of one job, of which each shares with the one before it."""

    def __init__(self) -> None:
        self.manifest: Manifest | None = None
        self.bytes: dict[tuple[str, int, str], int] = {}
        """(path of a file, offset, leaf path) -> the value of each region of each file of the newest tag."""

    def save(self, values: Values, mesh: Mesh, fixed: frozenset[str] = frozenset()) -> int:
        """The number of bytes that were written."""
        ranks = [leaves_of(values, mesh, rank) for rank in range(mesh.size)]
        parts, now, nbytes = [], {}, 0
        for rank, leaves in enumerate(ranks):
            plan = plan_save(leaves, rank, mesh.size)
            result, shared_values = self._share(plan, LeafTable.from_leaves(leaves), values, fixed)
            now |= shared_values
            for file in result.plan.files:
                for entry, (offset, _) in zip(file.entries, file.layout.region_ranges, strict=True):
                    now[file.path, offset, entry.leaf] = values[entry.leaf]
            nbytes += result.plan.nbytes
            parts.append(wrote(result.plan).add_shared(result.shared_files))
            assert result.plan.nbytes + result.nbytes == plan.nbytes
        self.manifest, self.bytes = recorded(parts, ranks, mesh), now
        paths = [record.path for record in self.manifest.files]
        assert len(paths) == len(set(paths))
        self.check(values)
        return nbytes

    def _share(
        self, plan: SavePlan, leaves: LeafTable, values: Values, fixed: frozenset[str]
    ) -> tuple[file_sharing.SharedPlan, dict[tuple[str, int, str], int]]:
        base = self.manifest
        if base is None:
            return file_sharing.split_shared(plan, file_sharing.create_no_matches(plan), {}, fixed), {}
        twins = file_sharing.match_base_regions(plan, leaves, base)
        for file, its in zip(plan.files, twins, strict=True):
            its.is_equal[:] = [
                number >= 0 and self.bytes[base.files[number].path, offset, entry.leaf] == values[entry.leaf]
                for entry, number, offset in zip(file.entries, its.file.tolist(), its.offset.tolist(), strict=True)
            ]
        counts = {n: sum(path == f.path for path, _, _ in self.bytes) for n, f in enumerate(base.files)}
        names = file_sharing.name_shared_files(plan, twins, file_sharing.find_fully_matching_files(twins, counts))
        shared = {file: replace(base.files[file], path=name) for file, name in names.items()}
        moved = {base.files[file].path: name for file, name in names.items()}
        bytes_of = {(moved[path], at, leaf): v for (path, at, leaf), v in self.bytes.items() if path in moved}
        return file_sharing.split_shared(plan, twins, shared, fixed), bytes_of

    def check(self, values: Values) -> None:
        """Every region that the manifest names has the value that was saved, and no file has anything besides."""
        assert self.manifest is not None
        named = {
            (self.manifest.files[shard.file].path, shard.offset, leaf)
            for leaf, record in self.manifest.arrays.items()
            for shard in record
        }
        assert named == set(self.bytes)
        assert all(value == values[leaf] for (_, _, leaf), value in self.bytes.items())


STATES = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 1), min_size=1)
MESHES = st.sampled_from([Mesh(), Mesh(tp=2), Mesh(tp=3), Mesh(dp=2)])


@given(st.lists(st.tuples(STATES, MESHES, st.frozensets(st.sampled_from(NAMES))), min_size=1, max_size=5))
def test_a_tag_has_what_was_saved_and_nothing_else(saves: list[tuple[Values, Mesh, frozenset[str]]]) -> None:
    run = Run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_sharing, "MIN_SEPARATE_BYTES", 1)
        for values, mesh, fixed in saves:
            run.save(values, mesh, fixed)


@given(STATES, STATES, st.sampled_from([Mesh(), Mesh(tp=2), Mesh(tp=3)]))
def test_from_the_third_save_on_only_what_changes_is_written(still: Values, trained: Values, mesh: Mesh) -> None:
    run = Run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_sharing, "MIN_SEPARATE_BYTES", 1)
        for step in range(5):
            nbytes = run.save({**{k: v + 10 * step + 10 for k, v in trained.items()}, **still}, mesh)
            changes = len(trained.keys() - still.keys()) * SHAPE[0] * SHAPE[1] * 4
            assert step < 2 or nbytes == changes


@given(STATES, st.frozensets(st.sampled_from(NAMES)))
def test_what_is_declared_as_fixed_is_written_once(values: Values, fixed: frozenset[str]) -> None:
    run = Run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_sharing, "MIN_SEPARATE_BYTES", 1)
        for step in range(3):
            now = {k: v if k in fixed else v + 10 * step for k, v in values.items()}
            nbytes = run.save(now, Mesh(), fixed)
            assert step == 0 or nbytes == len(values.keys() - fixed) * SHAPE[0] * SHAPE[1] * 4


@pytest.mark.parametrize("other", ["int32", "complex64"])
def test_another_type_is_no_twin(other: str) -> None:
    values = dict.fromkeys(NAMES, 0)
    run = Run()
    run.save(values, Mesh())
    leaves = leaves_of(values, Mesh(), 0, other)
    assert run.manifest is not None
    twins: list[Any] = file_sharing.match_base_regions(plan_save(leaves), LeafTable.from_leaves(leaves), run.manifest)
    assert all((its.file == -1).all() for its in twins)


def test_small_things_get_no_file_apart() -> None:
    run = Run()
    values = dict.fromkeys(NAMES[:4], 0)
    run.save(values, Mesh())
    run.save({**values, NAMES[0]: 1}, Mesh())
    assert run.manifest is not None
    assert [record.path for record in run.manifest.files] == ["model/00001-of-00001.safetensors"]
