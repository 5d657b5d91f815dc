"""Arrays made of parts of stored ones: whatever the cuts are, their bytes are those of the parts, and are verified."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.plan.test_round_trip import bytes_view, region, store
from tests.memory import MemoryDirectory
from tests.strategies import boxes_in, cuts_of
from xla_ckpt.core import dtypes
from xla_ckpt.core.manifest.arrays import ArrayTable
from xla_ckpt.core.plan.leaf import ArrayLeaf, LocalLayout, LocalShard
from xla_ckpt.core.plan.manifest_views import DerivedArray, SourceRegion, derive_array
from xla_ckpt.core.plan.restore_plan import ReadRequest, plan_restore
from xla_ckpt.core.sharding.box import Box, Grid, ParentBox
from xla_ckpt.errors import CorruptCheckpointError, FormatError, IncompatibleCheckpointError
from xla_ckpt.loading.read import read_into, verify_reads
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.progress import IoContext


def stored(arrays: dict[str, np.ndarray], cuts: dict[str, tuple[tuple[int, ...], ...]]) -> MemoryDirectory:
    """A tag in memory in which two ranks hold the cells of each array in turn."""
    ranks: list[list[tuple[ArrayLeaf, list[np.ndarray]]]] = [[], []]
    for name, array in arrays.items():
        grid = Grid(cuts[name])
        boxes = [grid.get_cell(i) for i in range(grid.cell_count)]
        for rank in (0, 1):
            mine = boxes[rank::2]
            holding = LocalLayout(shape=array.shape, shards=tuple(LocalShard(box=b) for b in mine))
            leaf = ArrayLeaf(name, dtypes.get_dtype("uint32"), holding)
            ranks[rank].append((leaf, [np.ascontiguousarray(array[region(b)]) for b in mine]))
    return store(ranks)


def read(reader: TagReader, leaf: str, box: Box) -> np.ndarray:
    found = np.zeros(box.shape, np.uint32)
    plan = plan_restore(reader.manifest, [ReadRequest(leaf, box, 0)])
    verify_reads(reader, plan)
    read_into(reader, plan, [bytes_view(found)], IoContext(workers=1))
    return found


@st.composite
def slices_of(draw: st.DrawFn, sizes: dict[str, int]) -> list[tuple[str, int, int]]:
    """(array, first, last) of the parts of a dim of several arrays, one behind the other, in any order."""
    found = []
    for name, n in sizes.items():
        ((*ends,),) = draw(cuts_of((n,)))
        found += [(name, a, b) for a, b in zip(ends, ends[1:], strict=False)]
    return draw(st.permutations(found))


def put_together(chosen: list[tuple[str, int, int]], dim: int, other: int) -> DerivedArray:
    """The array whose parts these are, along one of its two dims."""
    total = sum(b - a for _, a, b in chosen)
    whole = Box.from_shape((total, other) if dim == 0 else (other, total))
    at, parts = 0, []
    for name, a, b in chosen:
        parts.append(SourceRegion(whole.slice_dim(dim, at, at + b - a), name, whole.slice_dim(dim, a, b)))
        at += b - a
    return DerivedArray(shape=whole.shape, regions=tuple(parts), spec=("tp", None))


@given(st.data())
def test_any_parts_in_any_order_and_once_more(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 6))
    more = data.draw(st.integers(1, 8))
    arrays = {
        "a": np.arange(rows * columns, dtype=np.uint32).reshape(rows, columns),
        "b": np.arange(1000, 1000 + more * columns, dtype=np.uint32).reshape(more, columns),
    }
    directory = stored(arrays, {name: data.draw(cuts_of(array.shape)) for name, array in arrays.items()})
    by_rows = data.draw(slices_of({"a": rows, "b": more}))
    by_columns = data.draw(slices_of({"new": columns}))
    expected = np.concatenate([arrays[name][a:b] for name, a, b in by_rows])
    again = np.concatenate([expected[:, a:b] for _, a, b in by_columns], axis=1)
    with TagReader(directory, "root", "t") as reader:
        old = reader.manifest
        new = derive_array("new", put_together(by_rows, 0, columns), old)
        assert (new.dtype, new.spec) == (old.arrays["a"].dtype, ("tp", None))
        first = replace(old, arrays=ArrayTable.from_records({"new": new}))
        split = derive_array("again", put_together(by_columns, 1, len(expected)), first)
        reader.manifest = replace(first, arrays=ArrayTable.from_records({"new": new, "again": split}))
        for leaf, truth in (("new", expected), ("again", again)):
            box = data.draw(boxes_in(truth.shape))
            assert np.array_equal(read(reader, leaf, box), truth[region(box)])


def small() -> tuple[MemoryDirectory, np.ndarray]:
    array = np.arange(24, dtype=np.uint32).reshape(6, 4)
    return stored({"a": array}, {"a": ((0, 6), (0, 4))}), array


def test_a_part_of_a_region_is_verified_with_all_of_it() -> None:
    directory, array = small()
    reader = TagReader(directory, "root", "t")
    lower = DerivedArray(shape=(3, 4), regions=(SourceRegion(Box.from_shape((3, 4)), "a", Box((3, 0), (6, 4))),))
    manifest = replace(
        reader.manifest, arrays=ArrayTable.from_records({"low": derive_array("low", lower, reader.manifest)})
    )
    reader.manifest = manifest
    (shard,) = manifest.arrays["low"]
    assert shard.parent_box == ParentBox((-3, 0), (3, 4))
    assert np.array_equal(read(reader, "low", Box.from_shape((3, 4))), array[3:])
    path = next(name for name in directory.objects if name.endswith(".safetensors"))
    data = bytearray(directory.objects[path])
    data[-array.nbytes] ^= 1  # in the other half
    directory.objects[path] = bytes(data)
    with pytest.raises(CorruptCheckpointError, match="stored bytes are damaged"):
        read(TagReader(directory, "root", "t", manifest), "low", Box.from_shape((3, 4)))


def test_what_makes_no_array() -> None:
    directory, _ = small()
    half, whole = Box.from_shape((3, 4)), Box.from_shape((6, 4))
    with TagReader(directory, "root", "t") as reader:
        manifest = reader.manifest
    bits = manifest.arrays["a"].replace_metadata(dtype=dtypes.get_dtype("int32"))
    mixed = replace(manifest, arrays=ArrayTable.from_records({"a": manifest.arrays["a"], "b": bits}))
    low = SourceRegion(half, "a", half)
    for parts, of, error, said in (
        ((low,), manifest, FormatError, "shards are missing"),
        ((low, SourceRegion(half, "a", half)), manifest, FormatError, "hold the same elements"),
        ((SourceRegion(whole, "x", whole),), manifest, IncompatibleCheckpointError, "no such array"),
        (
            (low, SourceRegion(Box((3, 0), (6, 4)), "b", half)),
            mixed,
            IncompatibleCheckpointError,
            "uint32 in a, int32 in b",
        ),
    ):
        with pytest.raises(error, match=said):
            derive_array("new", DerivedArray(shape=(6, 4), regions=parts), of)
    with pytest.raises(ValueError, match="cannot be"):
        SourceRegion(half, "a", whole)
    with pytest.raises(ValueError, match="of a frame runs from 2 to 1"):
        ParentBox((2,), (1,))
