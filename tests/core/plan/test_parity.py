"""What is lost can be worked out, as far as the plan of a repair says so, and never further than bytes allow."""

from __future__ import annotations

import functools
import operator

from hypothesis import given
from hypothesis import strategies as st

from xla_ckpt.core.files.parity import (
    MAX_RECOVERY_CHAIN,
    PARITY_BLOCK_BYTES,
    BlockId,
    FileBlocks,
    ParitySum,
    assign_locations,
    compute_file_sizes,
    plan_recovery,
    split_range,
)

SIZES = st.lists(st.integers(0, 5 * PARITY_BLOCK_BYTES), min_size=1, max_size=6)


def total(values: list[int]) -> int:
    return functools.reduce(operator.xor, values, 0)


def cells(blocks: FileBlocks) -> list[BlockId]:
    return [(file, block) for file in range(len(blocks.sizes)) for block in range(blocks.count_blocks(file))]


@given(SIZES, st.data())
def test_the_steps_give_every_block_back(sizes: list[int], data: st.DataObject) -> None:
    blocks = FileBlocks(tuple(sizes))
    values = {at: data.draw(st.integers(0, 255)) for at in cells(blocks)}
    parity = data.draw(st.sampled_from(["block", "file"]))
    sums = {sum_: total([values[at] for at in blocks.list_members(sum_)]) for sum_ in blocks.list_sums(parity)}
    bad = {at for at in values if data.draw(st.booleans())}
    sound = {sum_ for sum_ in sums if data.draw(st.integers(0, 3))}
    steps, left = plan_recovery(bad, sound)
    assert set(steps) | left == bad
    assert not set(steps) & left
    known = {at: value for at, value in values.items() if at not in bad}
    for at, sum_ in steps.items():
        assert sum_ in sound
        known[at] = sums[sum_] ^ total([known[other] for other in blocks.list_members(sum_) if other != at])
    assert all(known[at] == values[at] for at in steps)
    # Every sum that could go on lacks two blocks or more: nothing that one step gives back is left out.
    if len(steps) < MAX_RECOVERY_CHAIN:
        assert all(len(left & set(blocks.list_members(sum_))) != 1 for sum_ in sound)


@given(SIZES, st.data())
def test_a_lost_file_and_then_a_bad_block_in_each_other_file(sizes: list[int], data: st.DataObject) -> None:
    blocks = FileBlocks(tuple(sizes))
    lost = data.draw(st.integers(0, len(sizes) - 1))
    bad = {at for at in cells(blocks) if at[0] == lost}
    steps, left = plan_recovery(bad, blocks.list_sums("file"))
    assert not left
    for file in range(len(sizes)):
        if file != lost and sizes[file]:
            bad.add((file, data.draw(st.integers(0, blocks.count_blocks(file) - 1))))
    assert not plan_recovery(bad, blocks.list_sums("file"))[1]
    one_each = {at for at in bad if at[0] != lost}
    assert not plan_recovery(one_each, blocks.list_sums("block"))[1]


def test_two_bad_blocks_in_each_of_two_files_at_the_same_places_are_lost() -> None:
    bad = {(file, block) for file in (0, 1) for block in (1, 2)}
    assert plan_recovery(bad, FileBlocks((4 * PARITY_BLOCK_BYTES,) * 3).list_sums("file")) == ({}, bad)


@given(SIZES, st.integers(1, 5), st.sampled_from(["block", "file"]))
def test_ranks_share_the_sums_and_their_places_do_not_overlap(sizes: list[int], world: int, parity: str) -> None:
    blocks = FileBlocks(tuple(sizes))
    found: list[ParitySum] = []
    for rank in range(world):
        placed = assign_locations(blocks, parity, rank, world)  # type: ignore[arg-type]
        found += placed
        ends: dict[str, int] = {}
        for sum_, place in placed.items():
            assert place.offset == ends.get(place.file, 0)
            ends[place.file] = place.offset + blocks.get_sum_length(sum_)
        assert compute_file_sizes(blocks, placed) == {path: end for path, end in ends.items() if end}
    assert sorted(found) == sorted(blocks.list_sums(parity))  # type: ignore[arg-type]
    assert [n for rank in range(world) for n in split_range(7, rank, world)] == list(range(7))
