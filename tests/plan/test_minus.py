"""A plan without some leaves: a part of the plan with them, in which nobody's part of the other leaves changes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.boxes import is_partition
from xla_ckpt import dtypes
from xla_ckpt.files.torch_file import TorchFile
from xla_ckpt.plan.file_plan import Entry, FilePlan, RegionSource, shards_of
from xla_ckpt.plan.leaf import Leaf, leaf_of
from xla_ckpt.plan.save_plan import SavePlan, plan_save
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.local_array import whole
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.owners import SPLIT_BYTES
from xla_ckpt.sharding.sharding import Sharding

MESHES = [Mesh(pp=2, dp=2), Mesh(pp=3, dp=3), Mesh(pp=2, dp=2, tp=2), Mesh(pp=2, cp=2, tp=2), Mesh(pp=2, dp=4, ep=2)]
SPECS = [(), ("tp",), (None, "tp"), ("ep",), (("dp", "tp"),)]
DTYPES = ["uint8", "bfloat16", "float32", "complex128"]
ROWS = st.integers(1, 6) | st.integers(1, SPLIT_BYTES // 16)  # a shard is dealt out whole, or split by rows
LEAVES = st.dictionaries(
    st.builds("{}/{}".format, st.sampled_from(["model", "optimizer", "extras", "w"]), st.integers(0, 9)),
    st.tuples(st.sampled_from(DTYPES), st.tuples(ROWS, st.integers(1, 4)), st.sampled_from(SPECS)),
    min_size=1, max_size=8,
)  # fmt: skip


@st.composite
def stages(draw: st.DrawFn) -> tuple[Mesh, dict[str, frozenset[int]], list[list[Leaf]]]:
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
                leaves.append(leaf_of(path, dtypes.dtype(dtype), Sharding.parse(spec).place(local, mesh, rank)))
        ranks.append(leaves)
    return mesh, held, ranks


@given(stages())
def test_stages_write_every_element_once_and_nothing_that_was_not_planned(
    case: tuple[Mesh, dict[str, frozenset[int]], list[list[Leaf]]],
) -> None:
    mesh, held, ranks = case
    written: dict[str, list[Box]] = {path: [] for path in held}
    for rank, leaves in enumerate(ranks):
        stage = mesh.coordinates(rank)["pp"]
        tied = frozenset(path for path, having in held.items() if min(having) < stage)
        plan = plan_save(leaves, rank, mesh.size)
        rest = plan.minus(tied)
        planned = [(file.path, source) for file in plan.files for source in file.sources]
        kept = [(file.path, source) for file in rest.files for source in file.sources]
        assert kept == [(path, source) for path, source in planned if source.leaf not in tied]
        for file in rest.files:
            assert file.sources
            assert [nbytes for _, nbytes in file.codec.places] == [source.nbytes for source in file.sources]
            assert [file.sources[entry.region].leaf for entry in file.entries] == [e.leaf for e in file.entries]
            assert shards_of([file]).leaf == [source.leaf for source in file.sources]
            for entry in file.entries:
                written[entry.leaf].append(entry.box)
    for leaf in (leaf for leaves in ranks for leaf in leaves):
        assert is_partition(written[leaf.path], Box.whole(leaf.shape)), leaf.path


@given(stages(), st.data())
def test_it_is_the_plan_of_those_who_write_the_rest(
    case: tuple[Mesh, dict[str, frozenset[int]], list[list[Leaf]]], data: st.DataObject
) -> None:
    """Also of a rank that writes nothing: no file of no regions is left, and twice is the same as once."""
    mesh, held, ranks = case
    some = data.draw(st.frozensets(st.sampled_from(sorted(held))))
    for rank, leaves in enumerate(ranks):
        plan = plan_save(leaves, rank, mesh.size)
        rest = plan.minus(some)
        assert rest.minus(some) == rest
        assert plan.minus(frozenset()) == plan
        assert plan.minus(frozenset(held)) == SavePlan(())
        one_by_one = plan
        for path in sorted(some):
            one_by_one = one_by_one.minus(frozenset({path}))
        assert one_by_one == rest


def test_the_header_of_a_file_names_what_is_left() -> None:
    leaves = [
        leaf_of(f"model/{name}", dtypes.dtype("float32"), whole((n,))) for name, n in (("a", 3), ("b", 5), ("c", 7))
    ]
    rest = plan_save(leaves).minus(frozenset({"model/b"}))
    assert rest == plan_save([leaves[0], leaves[2]])
    assert rest.nbytes == 4 * 10
    (_, header), *_ = rest.files[0].codec.glue([0, 0], [])
    assert b'"a"' in header
    assert b'"b"' not in header


def test_a_file_that_needs_its_regions_keeps_them_as_copies() -> None:
    """torch.load wants every storage that the pickle names; the manifest finds the leaf in another file."""
    sources = (
        RegionSource(leaf="model/a", shard=0, offset=0, nbytes=8),
        RegionSource(leaf="model/b", shard=0, offset=0, nbytes=4),
        RegionSource(leaf="model/b", shard=0, offset=4, nbytes=4),
    )
    entries = (
        Entry(leaf="model/a", box=Box((0,), (2,)), region=0),
        Entry(leaf="model/b", box=Box((0,), (1,)), region=1),
        Entry(leaf="model/b", box=Box((1,), (2,)), region=2),
    )
    file = FilePlan(
        path="model/x.pt",
        codec=TorchFile(stem="x", pickled=b"", storages=((8,), (4, 4))),
        sources=sources,
        entries=entries,
    )
    plan = SavePlan((file,))
    (rest,) = plan.minus(frozenset({"model/b"})).files
    assert rest == replace(file, entries=(entries[0], *(replace(e, copy=True) for e in entries[1:])))
    assert shards_of([rest]).leaf == ["model/a"]
    (nothing,) = plan.minus(frozenset({"model/a", "model/b"})).files
    assert (nothing.codec, nothing.sources, shards_of([nothing]).leaf) == (file.codec, sources, [])
