"""Conservation, in memory: what any layout writes, any other layout reads, every element once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory import MemoryDirectory
from tests.strategies import boxes_in, cuts_of
from xla_ckpt.core import checksum, dtypes
from xla_ckpt.core.manifest import manifest_json
from xla_ckpt.core.manifest.manifest import ManifestHeader
from xla_ckpt.core.plan.leaf import ArrayLeaf, LocalLayout, LocalShard, create_leaf
from xla_ckpt.core.plan.merge import merge_records
from xla_ckpt.core.plan.rank_record import RankRecord
from xla_ckpt.core.plan.restore_plan import ReadRequest, plan_restore
from xla_ckpt.core.plan.save_plan import get_item_and_key, plan_save
from xla_ckpt.core.sharding.box import Box, Grid
from xla_ckpt.core.sharding.local_array import create_unsharded
from xla_ckpt.core.sharding.mesh import Mesh
from xla_ckpt.errors import CorruptCheckpointError, IncompatibleCheckpointError
from xla_ckpt.loading.read import read_into, verify_reads
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.loading.verify import verify_tag
from xla_ckpt.progress import IoContext
from xla_ckpt.saving.write import write_files

Arrays = dict[str, Any]


def numpy_of(dtype: dtypes.DType) -> Any:
    return np.dtype(f"V{dtype.itemsize}") if dtype.itemsize not in (1, 2, 4, 8) else np.dtype(f"u{dtype.itemsize}")


def region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def bytes_view(array: Any) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8)) if array.nbytes else memoryview(bytearray())


def store(ranks: list[list[tuple[ArrayLeaf, list[Any]]]], segment_bytes: int = 4096) -> MemoryDirectory:
    """Save what each rank holds: (leaf, array of each shard)."""
    directory, records = MemoryDirectory(), []
    for rank, held in enumerate(ranks):
        plan = plan_save([leaf for leaf, _ in held], rank, len(ranks))
        memory = {(leaf.path, i): bytes_view(a) for leaf, arrays in held for i, a in enumerate(arrays)}
        written = write_files(directory, plan, memory, IoContext(workers=2), segment_bytes=segment_bytes)
        arrays = {leaf.path: (leaf.dtype.name, leaf.shape, leaf.spec, None) for leaf, _ in held}
        records.append(
            RankRecord.from_shards(
                written.shards, rank=rank, files=written.files, arrays=arrays, aliases={}, skeleton=None
            )
        )
    mesh = Mesh(dp=len(ranks))
    merged = merge_records(records, mesh)
    assert not merged.duplicates
    manifest = merged.build_manifest(ManifestHeader(tag="t", sequence=1, pinned=False, created=""), mesh)
    directory.objects["manifest.json"] = manifest_json.dump_manifest(manifest)
    return directory


def fetch(directory: MemoryDirectory, wants: list[tuple[str, Box]]) -> tuple[list[Any], Any]:
    reader = TagReader(directory, "root", "t")
    arrays = []
    for path, box in wants:
        record = reader.manifest.find_array(path)
        assert record is not None
        arrays.append(np.zeros(box.shape, numpy_of(record.dtype)))
    plan = plan_restore(reader.manifest, [ReadRequest(p, b, i) for i, (p, b) in enumerate(wants)])
    verify_reads(reader, plan)
    read_into(reader, plan, [bytes_view(a) for a in arrays], IoContext(workers=2))
    return arrays, plan


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Arrays, list[list[tuple[ArrayLeaf, list[Any]]]]]:
    """Some arrays, each split by a grid whose cells have one or more holders among the ranks."""
    world = draw(st.integers(1, 4))
    ranks: list[list[tuple[ArrayLeaf, list[Any]]]] = [[] for _ in range(world)]
    whole: Arrays = {}
    for n in range(draw(st.integers(1, 4))):
        dtype = dtypes.get_dtype(draw(st.sampled_from(["uint8", "bfloat16", "float32", "complex128"])))
        shape = draw(st.lists(st.integers(1, 40), max_size=3).map(tuple))
        rng = np.random.default_rng(n)
        array = rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8).view(numpy_of(dtype))[..., 0]
        path = f"{draw(st.sampled_from(['model', 'optimizer', 'misc']))}/{n}"
        whole[path] = array
        grid = Grid(draw(cuts_of(shape)))
        copies = draw(st.integers(1, world))
        mine: list[list[LocalShard]] = [[] for _ in range(world)]
        for i in range(grid.cell_count):
            first = draw(st.integers(0, world - 1))
            holders = sorted((first + k) % world for k in range(copies))
            for replica, rank in enumerate(holders):
                mine[rank].append(LocalShard(box=grid.get_cell(i), replica=replica, replicas=copies, group=(path, i)))
        for rank in range(world):
            leaf = ArrayLeaf(path, dtype, LocalLayout(shape=shape, shards=tuple(mine[rank])))
            ranks[rank].append((leaf, [np.ascontiguousarray(array[region(s.box)]) for s in mine[rank]]))
    return whole, ranks


@settings(deadline=None)
@given(layouts(), st.data())
def test_any_layout_to_any_box(
    case: tuple[Arrays, list[list[tuple[ArrayLeaf, list[Any]]]]], data: st.DataObject
) -> None:
    whole, ranks = case
    directory = store(ranks)
    written = sum(len(d) for p, d in directory.objects.items() if p != "manifest.json")
    heads = sum(f.framing_bytes for f in manifest_json.parse_manifest(directory.objects["manifest.json"]).files)
    assert written - heads == sum(a.nbytes for a in whole.values())  # every byte once
    wants = [(p, data.draw(boxes_in(a.shape), label=p)) for p, a in whole.items() for _ in range(2)]
    arrays, plan = fetch(directory, wants)
    for (path, box), found in zip(wants, arrays, strict=True):
        assert found.tobytes() == whole[path][region(box)].tobytes()
    assert plan.needed_bytes == sum(a.nbytes for a in arrays)
    report = verify_tag(TagReader(directory, "root", "t"))
    assert (report.ok, report.nbytes) == (True, sum(a.nbytes for a in whole.values()))


@settings(deadline=None, max_examples=50)
@given(layouts(), st.data())
def test_every_flipped_bit_is_found(case: Any, data: st.DataObject) -> None:
    whole, ranks = case
    directory = store(ranks)
    name = data.draw(st.sampled_from([p for p in directory.list_files() if p != "manifest.json"]))
    content = bytearray(directory.objects[name])
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    directory.objects[name] = bytes(content)
    report = verify_tag(TagReader(directory, "root", "t"))
    assert not report.ok
    assert {p.file for p in report.problems} == {name}
    with pytest.raises(CorruptCheckpointError):
        fetch(directory, [(p, Box.from_shape(a.shape)) for p, a in whole.items()])


def one(shape: tuple[int, ...], dtype: str = "float32") -> tuple[Any, MemoryDirectory]:
    array = np.random.default_rng(0).random(shape).astype(dtype)
    leaf = create_leaf("model/w", dtypes.get_dtype(dtype), create_unsharded(shape))
    return array, store([[(leaf, [array])]], segment_bytes=1 << 20)


@pytest.mark.parametrize("cut", [(0, 2), (1, 3), (0, 3)])
def test_row_cuts_read_hardly_more_than_they_need(cut: tuple[int, int]) -> None:
    array, directory = one((999, 1024))
    rows = Box((999 * cut[0] // 4, 0), (999 * cut[1] // 4 + 1, 1024))
    directory.read_counts.clear()
    (found,), plan = fetch(directory, [("model/w", rows)])
    assert (found == array[region(rows)].view(found.dtype)).all()
    assert plan.read_bytes <= 1.05 * plan.needed_bytes


def test_the_plan_says_what_is_really_read() -> None:
    array, directory = one((512, 4096))
    reader = TagReader(directory, "root", "t")
    for box in (
        Box.from_shape(array.shape),
        Box((100, 0), (300, 4096)),
        Box((0, 1000), (512, 2000)),
        Box((3, 5), (4, 6)),
    ):
        plan = plan_restore(reader.manifest, [ReadRequest("model/w", box, 0)])
        slot = np.zeros(box.shape, np.uint32)
        reader.get_digests(0, 4096, array.nbytes)
        directory.read_counts.clear()
        read_into(reader, plan, [bytes_view(slot)], IoContext(workers=1))
        assert sum(directory.read_counts) == plan.read_bytes
        assert slot.tobytes() == array[region(box)].tobytes()


def test_long_rows_are_cut_without_reading_what_lies_between() -> None:
    array, directory = one((4, 1 << 20))
    (found,), plan = fetch(directory, [("model/w", Box((0, 0), (4, 1 << 18)))])
    assert found.tobytes() == array[:, : 1 << 18].tobytes()
    assert plan.read_bytes == plan.needed_bytes


def test_a_subtree_reads_only_its_own_bytes() -> None:
    arrays = {f"model/{i}": np.full((100, 100), i, np.float32) for i in range(50)}
    leaves = [create_leaf(p, dtypes.get_dtype("float32"), create_unsharded(a.shape)) for p, a in arrays.items()]
    directory = store([[(leaf, [arrays[leaf.path]]) for leaf in leaves]])
    _, plan = fetch(directory, [("model/7", Box.from_shape((100, 100)))])
    assert plan.read_bytes == 40000


def test_unknown_leaves_and_boxes_outside_are_refused() -> None:
    _, directory = one((4, 4))
    manifest = TagReader(directory, "root", "t").manifest
    with pytest.raises(IncompatibleCheckpointError, match="no such array"):
        plan_restore(manifest, [ReadRequest("model/v", Box((0,), (1,)), 0)])
    with pytest.raises(IncompatibleCheckpointError, match="lies outside"):
        plan_restore(manifest, [ReadRequest("model/w", Box((0, 0), (5, 4)), 0)])


def test_missing_and_cut_off_files_are_named() -> None:
    _, directory = one((4, 4))
    name = "model/00001-of-00001.safetensors"
    whole = directory.objects[name]
    directory.objects[name] = whole[:-1]
    with pytest.raises(CorruptCheckpointError, match="ends too early") as caught:
        fetch(directory, [("model/w", Box.from_shape((4, 4)))])
    assert (caught.value.file, caught.value.expected, caught.value.found) == (name, "4160 bytes", "4159")
    del directory.objects[name]
    with pytest.raises(CorruptCheckpointError, match="is missing"):
        fetch(directory, [("model/w", Box.from_shape((4, 4)))])


def test_a_second_box_of_a_name_goes_to_a_second_file() -> None:
    a = np.arange(8, dtype=np.float32)
    shards = tuple(LocalShard(box=Box((i,), (i + 2,))) for i in (0, 4))
    leaf = ArrayLeaf("model/w", dtypes.get_dtype("float32"), LocalLayout(shape=(8,), shards=shards))
    shards = tuple(LocalShard(box=Box((i,), (i + 2,))) for i in (2, 6))
    other = ArrayLeaf("model/w", dtypes.get_dtype("float32"), LocalLayout(shape=(8,), shards=shards))
    directory = store([[(leaf, [a[0:2], a[4:6]])], [(other, [a[2:4], a[6:8]])]])
    assert directory.list_files() == ["manifest.json", *(
        f"model/0000{r}-of-00002{k}.safetensors" for r in (1, 2) for k in ("-2", "")
    )]  # fmt: skip
    assert fetch(directory, [("model/w", Box.from_shape((8,)))])[0][0].view(np.float32).tolist() == a.tolist()


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [("model/a.b", ("model", "a.b")), ("extras/rng/x", ("extras", "rng/x")), ("w", ("tree", "w")),
     ("model", ("tree", "model")), ("", ("tree", "~")), ("model/__metadata__", ("model", "~__metadata__"))],
)  # fmt: skip
def test_where_leaves_are_stored(leaf: str, expected: tuple[str, str]) -> None:
    assert get_item_and_key(leaf) == expected


def test_block_sizes_are_part_of_the_format() -> None:
    assert [checksum.compute_block_size(n) for n in (1, 1 << 18, (1 << 18) + 1, 1 << 22, 1 << 28, 1 << 33)] == [
        4096, 4096, 8192, 65536, 4194304, 4194304,
    ]  # fmt: skip
