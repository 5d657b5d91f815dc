"""Reading together: whatever ranks want, each byte of it is read by one of them and reaches all who want it."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from tests.boxes import is_partition
from tests.strategies import boxes_in
from xla_ckpt.core.plan.restore_plan import ReadRequest
from xla_ckpt.core.plan.shared_reads import OverlappingReads, ReadGroups, assign_readers, group_reads
from xla_ckpt.core.sharding.box import Box


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("ab"), boxes_in((6, 5))), max_size=3, unique=True), min_size=1, max_size=5
    )
)
def test_every_wish_is_fulfilled_once(wants: list[list[tuple[str, Box]]]) -> None:
    wants = [[(leaf, box) for leaf, box in mine if box.size] for mine in wants]
    common = group_reads(wants)
    assert ReadGroups.from_json(json.loads(json.dumps(common.to_json()))) == common
    for rank, mine in enumerate(wants):
        share = assign_readers(rank, common, [ReadRequest(leaf, box, i) for i, (leaf, box) in enumerate(mine)])
        for slot, (leaf, box) in enumerate(mine):
            mixed = [
                m for m in common.overlapping if m.leaf == leaf and any(b == box and rank in r for b, r in m.boxes)
            ]
            if mixed:
                (one,) = mixed
                parts = [rows.intersect(box) for member in one.members if (rows := one.assign_rows(member)) is not None]
                assert is_partition([p for p in parts if p is not None], box)
                assert slot not in share.readers
            elif slot in share.readers:
                reader, ranks = share.readers[slot]
                assert rank in ranks
                others = [
                    assign_readers(r, common, [ReadRequest(x, b, i) for i, (x, b) in enumerate(wants[r])])
                    for r in ranks
                ]
                where = [wants[r].index((leaf, box)) for r in ranks]
                assert {o.readers[w] for o, w in zip(others, where, strict=True)} == {(reader, ranks)}  # all agree
            else:
                assert sum((leaf, box) in theirs for theirs in wants) == 1


def test_columns_of_the_same_rows_are_read_by_rows() -> None:
    left, right = Box((0, 0), (8, 2)), Box((0, 2), (8, 4))
    (mixed,) = group_reads([[("w", left)], [("w", right)], [("w", left)]]).overlapping
    assert mixed == OverlappingReads("w", ((left, (0, 2)), (right, (1,))))
    assert [str(mixed.assign_rows(r)) for r in mixed.members] == ["[0:2, 0:4]", "[2:5, 0:4]", "[5:8, 0:4]"]


def test_rows_that_nobody_shares_are_left_alone() -> None:
    common = group_reads([[("w", Box((0, 0), (4, 4)))], [("w", Box((4, 0), (8, 4)))]])
    assert common == ReadGroups((), ())
