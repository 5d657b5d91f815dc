"""The mathematics of boxes: what is cut apart is put together, and nothing is counted twice."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.boxes import is_partition
from tests.strategies import boxes_in, cuts_of, full_shapes, shapes
from xla_ckpt.core.plan.leaf import MIN_SPLIT_BYTES, LocalShard, assign_owners, split_rows
from xla_ckpt.core.sharding.box import Box, BoxArray, Grid, find_overlap, fit_grid, fit_grids
from xla_ckpt.core.sharding.memory_layout import compute_runs, split_by_span
from xla_ckpt.core.sharding.mesh import Mesh


def region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def counts(boxes: Any, shape: tuple[int, ...]) -> Any:
    hits = np.zeros(shape, int)
    for box in boxes:
        hits[region(box)] += 1
    return hits


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    shape = draw(full_shapes)
    return shape, draw(boxes_in(shape, empty=True)), draw(boxes_in(shape, empty=True))


@given(two_boxes())
def test_intersection_is_that_of_index_sets(case: tuple[tuple[int, ...], Box, Box]) -> None:
    shape, a, b = case
    common = a.intersect(b)
    hits = counts([a, b], shape)
    assert (hits == 2).sum() == (0 if common is None else common.size)
    if common is not None:
        assert (hits[region(common)] == 2).all()
        assert a.contains(common)
        assert common == b.intersect(a)


@given(two_boxes())
def test_coordinates_move_there_and_back(case: tuple[tuple[int, ...], Box, Box]) -> None:
    _, a, b = case
    inner = a.intersect(b)
    if inner is not None:
        assert inner.relative_to(a).translate(a.start) == inner


def test_boxes_refuse_nonsense() -> None:
    with pytest.raises(ValueError, match="tensor dim 1 of a box runs from 3 to 2"):
        Box((0, 3), (1, 2))
    with pytest.raises(ValueError, match="zip"):
        Box((0,), (1, 2))


@st.composite
def gridded(draw: st.DrawFn) -> tuple[tuple[int, ...], Grid]:
    shape = draw(full_shapes)
    return shape, Grid(draw(cuts_of(shape)))


@given(gridded(), st.data())
def test_a_grid_is_a_partition_and_finds_its_cells(case: tuple[tuple[int, ...], Grid], data: st.DataObject) -> None:
    shape, grid = case
    cells = [grid.get_cell(i) for i in range(grid.cell_count)]
    assert is_partition(cells, Box.from_shape(shape))
    assert find_overlap(cells) is None
    wanted = data.draw(boxes_in(shape))
    assert [i for i, _ in grid.find_overlapping(wanted)] == [
        i for i, c in enumerate(cells) if c.intersect(wanted) is not None
    ]


@given(gridded(), st.randoms())
def test_a_grid_is_recognised_in_any_order(case: tuple[tuple[int, ...], Grid], random: Any) -> None:
    _, grid = case
    cells = [grid.get_cell(i) for i in range(grid.cell_count)]
    random.shuffle(cells)
    corners = BoxArray.from_boxes(cells)
    found = fit_grid(corners.start, corners.stop)
    assert found is not None
    again, order = found
    assert [cells[i] for i in order] == [again.get_cell(i) for i in range(again.cell_count)]


@given(gridded(), st.data())
def test_a_missing_or_doubled_cell_is_no_partition(case: tuple[tuple[int, ...], Grid], data: st.DataObject) -> None:
    shape, grid = case
    cells = [grid.get_cell(i) for i in range(grid.cell_count)]
    one = data.draw(st.sampled_from(cells))
    assert not is_partition([c for c in cells if c != one], Box.from_shape(shape))
    assert not is_partition([*cells, one], Box.from_shape(shape))
    assert find_overlap([*cells, one]) is not None


def test_boxes_that_are_no_grid_stay_single() -> None:
    boxes = [Box((0, 0), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (2, 2))]
    assert [(g.cell_count, order) for g, order in fit_grids(BoxArray.from_boxes(boxes))] == [
        (1, [0]),
        (1, [1]),
        (1, [2]),
    ]


@given(st.tuples(*(st.integers(1, 3) for _ in range(3))), st.integers(1, 3), st.integers(1, 2))
def test_mesh_coordinates_are_one_to_one(sizes: tuple[int, int, int], edp: int, ep: int) -> None:
    mesh = Mesh(pp=sizes[0], dp=edp * ep, ep=ep, cp=sizes[1], tp=sizes[2])
    at = [mesh.coordinates(rank) for rank in range(mesh.size)]
    assert [mesh.rank(c) for c in at] == list(range(mesh.size))
    assert all(c["dp"] == c["edp"] * ep + c["ep"] for c in at)
    assert Mesh.parse(str(mesh)) == mesh


@pytest.mark.parametrize("text", ["tp", "tp=x", "xx=2", "tp=2,tp=2", "tp=0", "dp=3,ep=2", "tp=-1"])
def test_a_mesh_refuses_nonsense(text: str) -> None:
    with pytest.raises(ValueError, match="mesh|divide"):
        Mesh.parse(text)


@given(full_shapes, st.integers(1, 6))
def test_rows_of_all_replicas_are_the_shard(shape: tuple[int, ...], replicas: int) -> None:
    whole = Box.from_shape(shape)
    parts = [split_rows(whole, r, replicas) for r in range(replicas)]
    assert is_partition([p for p in parts if p is not None], whole)


def parts_of(held: list[LocalShard]) -> list[tuple[int, Box]]:
    """(index, part) of each shard, of elements of 4 bytes, of which its holder writes something."""
    kinds = list(dict.fromkeys(held))
    parts, rows = assign_owners(
        [(shard, 4) for shard in kinds], np.array([kinds.index(shard) for shard in held], np.int64)
    )
    written = [(int(i), parts[kinds.index(held[i])]) for i in rows]
    return [(i, part) for i, part in written if part is not None]


@given(st.lists(st.tuples(st.lists(st.integers(0, 300), max_size=3).map(tuple), st.integers(0, 2)), max_size=12))
def test_every_byte_has_one_owner(shards: list[tuple[tuple[int, ...], int]]) -> None:
    """Groups: 0 is held by one, 1 by three, 2 by four holders."""
    for group, replicas in ((0, 1), (1, 3), (2, 4)):
        mine = [shape for shape, g in shards if g == group]
        written: list[list[Box]] = [[] for _ in mine]
        for replica in range(replicas):
            held = [LocalShard(box=Box.from_shape(s), replica=replica, replicas=replicas, group=group) for s in mine]
            for i, part in parts_of(held):
                written[i].append(part)
        for shape, parts in zip(mine, written, strict=True):
            assert is_partition(parts, Box.from_shape(shape))


def test_replicas_share_the_bytes_evenly() -> None:
    shapes_ = [(1024, 256), (256,), (1000, 999), (7, 100000), *[(64,)] * 400]
    for replicas in (2, 3, 4, 8):
        load = [
            sum(
                part.size * 4
                for _, part in parts_of(
                    [LocalShard(box=Box.from_shape(s), replica=r, replicas=replicas) for s in shapes_]
                )
            )
            for r in range(replicas)
        ]
        assert max(load) <= 1.15 * sum(load) / replicas, load
    assert prod((1024, 256)) * 4 > MIN_SPLIT_BYTES


@st.composite
def region_in_buffer(draw: st.DrawFn) -> tuple[Box, Box, int]:
    shape = draw(full_shapes)
    buffer = draw(boxes_in(shape))
    low = [draw(st.integers(a, b - 1)) for a, b in zip(buffer.start, buffer.stop, strict=True)]
    high = [draw(st.integers(a + 1, b)) for a, b in zip(low, buffer.stop, strict=True)]
    return Box(tuple(low), tuple(high)), buffer, draw(st.sampled_from([1, 2, 8]))


@given(region_in_buffer())
def test_runs_are_the_bytes_of_the_region(case: tuple[Box, Box, int]) -> None:
    part, buffer, itemsize = case
    data = np.arange(buffer.size * itemsize, dtype=np.int64).reshape(*buffer.shape, itemsize)
    wanted = data[region(part.relative_to(buffer))].reshape(-1)
    how = compute_runs(part, buffer, itemsize)
    starts = np.full((), how.offset)
    for count, stride in zip(how.counts, how.strides, strict=True):
        starts = starts[..., None] + np.arange(count) * stride
    found = (starts.reshape(-1, 1) + np.arange(how.run_bytes)).reshape(-1)
    assert (found == wanted).all()
    assert how.total_bytes == len(wanted)
    assert how.span == wanted.max() - wanted.min() + 1
    assert how.is_contiguous == (how.span == how.total_bytes)


@given(region_in_buffer(), st.integers(1, 200))
def test_pieces_are_the_region_within_the_span(case: tuple[Box, Box, int], max_span: int) -> None:
    part, buffer, itemsize = case
    parts = list(split_by_span(part, buffer, itemsize, max_span))
    assert is_partition(parts, part)
    for piece in parts:
        assert compute_runs(piece, buffer, itemsize).span <= max_span or piece.size == 1
    offsets = [compute_runs(p, buffer, itemsize).offset for p in parts]
    assert offsets == sorted(offsets)


@given(shapes)
def test_whole_boxes_are_contiguous(shape: tuple[int, ...]) -> None:
    whole = Box.from_shape(shape)
    if whole.size:
        assert compute_runs(whole, whole, 4).is_contiguous
