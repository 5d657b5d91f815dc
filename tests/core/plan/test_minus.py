"""A plan without some leaves: a part of the plan with them, in which nobody's part of the other leaves changes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.boxes import is_partition
from xla_ckpt.core import dtypes
from xla_ckpt.core.files.torch_file import TorchFile
from xla_ckpt.core.plan.leaf import MIN_SPLIT_BYTES, ArrayLeaf, create_leaf
from xla_ckpt.core.plan.save_plan import FileEntry, FilePlan, RegionSource, SavePlan, collect_shards, plan_save
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.local_array import create_unsharded
from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.core.sharding.sharding import Sharding

MESHES = [Mesh(pp=2, dp=2), Mesh(pp=3, dp=3), Mesh(pp=2, dp=2, tp=2), Mesh(pp=2, cp=2, tp=2), Mesh(pp=2, dp=4, ep=2)]
SPECS = [(), ("tp",), (None, "tp"), ("ep",), (("dp", "tp"),)]
DTYPES = ["uint8", "bfloat16", "float32", "complex128"]
ROWS = st.integers(1, 6) | st.integers(1, MIN_SPLIT_BYTES // 16)  # a shard is dealt out whole, or split by rows
LEAVES = st.dictionaries(
    st.builds("{}/{}".format, st.sampled_from(["model", "optimizer", "extras", "w"]), st.integers(0, 9)),
    st.tuples(st.sampled_from(DTYPES), st.tuples(ROWS, st.integers(1, 4)), st.sampled_from(SPECS)),
    min_size=1, max_size=8,
)  # fmt: skip


@st.composite
def stages(draw: st.DrawFn) -> tuple[Mesh, dict[str, frozenset[int]], list[list[ArrayLeaf]]]:
    """A mesh, the stages that have each leaf (of a tied one several), and the leaves of each rank."""
    mesh, arrays = draw(st.sampled_from(MESHES)), draw(LEAVES)
    which = st.frozensets(st.integers(0, mesh.pp - 1), min_size=1)
    held = {path: draw(which, label=path) for path in arrays}
    ranks = []
    for rank in range(mesh.size):
        here = mesh.coordinates(rank)["pp"]
        leaves = []
        for path, (dtype, local, spec) in arrays.items():
            if here in held[path]:
                leaves.append(
                    create_leaf(path, dtypes.get_dtype(dtype), Sharding.parse(spec).map_local_shape(local, mesh, rank))
                )
        ranks.append(leaves)
    return mesh, held, ranks


@given(stages())
def test_stages_write_every_element_once_and_nothing_that_was_not_planned(
    case: tuple[Mesh, dict[str, frozenset[int]], list[list[ArrayLeaf]]],
) -> None:
    mesh, held, ranks = case
    written: dict[str, list[Box]] = {path: [] for path in held}
    for rank, leaves in enumerate(ranks):
        stage = mesh.coordinates(rank)["pp"]
        tied = frozenset(path for path, having in held.items() if min(having) < stage)
        plan = plan_save(leaves, rank, mesh.size)
        rest = plan.exclude_leaves(tied)
        planned = [(file.path, source) for file in plan.files for source in file.sources]
        kept = [(file.path, source) for file in rest.files for source in file.sources]
        assert kept == [(path, source) for path, source in planned if source.leaf not in tied]
        for file in rest.files:
            assert file.sources
            assert [nbytes for _, nbytes in file.layout.region_ranges] == [source.nbytes for source in file.sources]
            assert [file.sources[entry.region].leaf for entry in file.entries] == [e.leaf for e in file.entries]
            assert collect_shards([file]).leaf == [source.leaf for source in file.sources]
            for entry in file.entries:
                written[entry.leaf].append(entry.box)
    for leaf in (leaf for leaves in ranks for leaf in leaves):
        assert is_partition(written[leaf.path], Box.from_shape(leaf.shape)), leaf.path


@given(stages(), st.data())
def test_it_is_the_plan_of_those_who_write_the_rest(
    case: tuple[Mesh, dict[str, frozenset[int]], list[list[ArrayLeaf]]], data: st.DataObject
) -> None:
    """Also of a rank that writes nothing: no file of no regions is left, and twice is the same as once."""
    mesh, held, ranks = case
    some = data.draw(st.frozensets(st.sampled_from(sorted(held))))
    for rank, leaves in enumerate(ranks):
        plan = plan_save(leaves, rank, mesh.size)
        rest = plan.exclude_leaves(some)
        assert rest.exclude_leaves(some) == rest
        assert plan.exclude_leaves(frozenset()) == plan
        assert plan.exclude_leaves(frozenset(held)) == SavePlan(())
        one_by_one = plan
        for path in sorted(some):
            one_by_one = one_by_one.exclude_leaves(frozenset({path}))
        assert one_by_one == rest


def test_the_header_of_a_file_names_what_is_left() -> None:
    leaves = [
        create_leaf(f"model/{name}", dtypes.get_dtype("float32"), create_unsharded((n,)))
        for name, n in (("a", 3), ("b", 5), ("c", 7))
    ]
    rest = plan_save(leaves).exclude_leaves(frozenset({"model/b"}))
    assert rest == plan_save([leaves[0], leaves[2]])
    assert rest.nbytes == 4 * 10
    (_, header), *_ = rest.files[0].layout.build_framing([0, 0], [])
    assert b'"a"' in header
    assert b'"b"' not in header


def test_a_file_that_needs_its_regions_keeps_them_as_copies() -> None:
    """torch.load wants every storage that the pickle names; the manifest finds the leaf in another file."""
    sources = (
        RegionSource(leaf="model/a", shard_index=0, offset=0, nbytes=8),
        RegionSource(leaf="model/b", shard_index=0, offset=0, nbytes=4),
        RegionSource(leaf="model/b", shard_index=0, offset=4, nbytes=4),
    )
    entries = (
        FileEntry(leaf="model/a", box=Box((0,), (2,)), region=0),
        FileEntry(leaf="model/b", box=Box((0,), (1,)), region=1),
        FileEntry(leaf="model/b", box=Box((1,), (2,)), region=2),
    )
    file = FilePlan(
        path="model/x.pt",
        layout=TorchFile(archive_name="x", pickled=b"", storages=((8,), (4, 4))),
        sources=sources,
        entries=entries,
    )
    plan = SavePlan((file,))
    (rest,) = plan.exclude_leaves(frozenset({"model/b"})).files
    assert rest == replace(file, entries=(entries[0], *(replace(e, is_copy=True) for e in entries[1:])))
    assert collect_shards([rest]).leaf == ["model/a"]
    (nothing,) = plan.exclude_leaves(frozenset({"model/a", "model/b"})).files
    assert (nothing.layout, nothing.sources, collect_shards([nothing]).leaf) == (file.layout, sources, [])
