"""Tensor dims that several mesh dims cut, one after another: nothing is lost, nothing is held twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xla_ckpt.core.sharding.dtensor import (
    DimShard,
    build_pieces,
    compute_interleaved_intervals,
    compute_local_intervals,
    find_nesting_order,
    find_uneven_shards,
)

meshes = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), max_size=4)
"""(parts, factor) of each cut."""


def every_process(mesh: Sequence[tuple[int, int]]) -> list[list[DimShard]]:
    places = product(*(range(parts) for parts, _ in mesh))
    return [[DimShard(n, i, factor) for (n, factor), i in zip(mesh, place, strict=True)] for place in places]


def elements(intervals: Sequence[tuple[int, int]]) -> list[int]:
    return [i for low, high in intervals for i in range(low, high)]


def chunks(values: list[int], n: int) -> list[list[int]]:
    """As `torch.chunk`, but always `n` of them."""
    size = -(-len(values) // n)
    return [values[i * size : (i + 1) * size] for i in range(n)]


def one_after_another(size: int, cuts: Sequence[DimShard]) -> list[int]:
    """What the placements of a DTensor mean, element by element."""
    left = list(range(size))
    for cut in cuts:
        left = [i for block in chunks(left, cut.split_factor) for i in chunks(block, cut.shard_count)[cut.index]]
    return left


@given(st.integers(0, 60), meshes)
def test_the_processes_of_a_mesh_hold_every_element_once(size: int, mesh: list[tuple[int, int]]) -> None:
    parts = [elements(compute_local_intervals(size, cuts)) for cuts in every_process(mesh)]
    assert sorted(i for part in parts for i in part) == list(range(size))


@given(st.integers(0, 60), meshes)
def test_intervals_are_as_few_as_they_can_be(size: int, mesh: list[tuple[int, int]]) -> None:
    for cuts in every_process(mesh):
        intervals = compute_local_intervals(size, cuts)
        assert all(low < high for low, high in intervals)
        assert all(a[1] < b[0] for a, b in zip(intervals, intervals[1:], strict=False))


@given(st.integers(0, 4), meshes)
def test_even_sizes_mean_one_after_another(blocks: int, mesh: list[tuple[int, int]]) -> None:
    size = blocks * prod(parts * factor for parts, factor in mesh)
    for cuts in every_process(mesh):
        assert list(find_uneven_shards(size, cuts)) == []
        assert elements(compute_local_intervals(size, cuts)) == one_after_another(size, cuts)


@given(st.integers(0, 60), meshes)
def test_interleaved_cuts_of_any_size_mean_one_after_another(size: int, mesh: list[tuple[int, int]]) -> None:
    for cuts in every_process(mesh):
        if find_nesting_order(cuts) is None:
            assert elements(compute_local_intervals(size, cuts)) == one_after_another(size, cuts)


@given(st.integers(0, 60), st.lists(st.integers(1, 4), max_size=4), st.data())
def test_factors_that_name_an_order_are_taken_at_their_word(size: int, sizes: list[int], data: st.DataObject) -> None:
    places = data.draw(st.permutations(range(len(sizes))))
    """The mesh dims in the order in which they cut."""
    mesh = [(n, prod(sizes[j] for j in places[: places.index(i)] if j > i)) for i, n in enumerate(sizes)]
    for cuts in every_process(mesh):
        assert find_nesting_order(cuts) is not None
        plain = [replace(cuts[i], split_factor=1) for i in places]
        assert elements(compute_local_intervals(size, cuts)) == one_after_another(size, plain)


@given(st.integers(0, 60), st.integers(1, 5), st.integers(1, 5))
def test_one_interleaved_cut_deals_out_everything(size: int, parts: int, factor: int) -> None:
    dealt = [elements(compute_interleaved_intervals(size, DimShard(parts, i, factor))) for i in range(parts)]
    assert sorted(i for part in dealt for i in part) == list(range(size))
    assert all(part == one_after_another(size, [DimShard(parts, i, factor)]) for i, part in enumerate(dealt))


@given(st.lists(st.tuples(st.integers(0, 9), meshes.filter(lambda m: len(m) < 3)), max_size=3), st.data())
def test_pieces_put_a_local_array_together(dims: list[tuple[int, list[tuple[int, int]]]], data: st.DataObject) -> None:
    shape = tuple(size for size, _ in dims)
    whole = np.arange(prod(shape)).reshape(shape)
    intervals = [compute_local_intervals(size, data.draw(st.sampled_from(every_process(mesh)))) for size, mesh in dims]
    want = whole[np.ix_(*(np.array(elements(i), int) for i in intervals))] if dims else whole
    pieces, local = build_pieces(intervals)
    assert local == want.shape
    found = np.full(local, -1)
    for piece in pieces:
        region, place = (
            tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
            for box in (piece.local_box, piece.global_box)
        )
        assert (found[region] == -1).all()
        found[region] = whole[place]
    assert (found == want).all()


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ([(2, 2), (2, 1)], (1, 0)),
        ([(2, 4), (2, 2), (2, 1)], (2, 1, 0)),
        ([(2, 4), (2, 1), (2, 1)], (1, 2, 0)),
        ([(2, 1), (2, 2), (2, 1)], (0, 2, 1)),
        ([(2, 2), (2, 2), (2, 1)], (2, 0, 1)),
        ([(2, 3)], None),
        ([(2, 1), (2, 2)], None),
        ([], ()),
    ],
)
def test_orders_that_factors_name(mesh: list[tuple[int, int]], expected: tuple[int, ...] | None) -> None:
    assert find_nesting_order(every_process(mesh)[0]) == expected
