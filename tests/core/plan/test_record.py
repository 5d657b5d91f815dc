"""What a rank tells rank 0 arrives as it was, and ranks of a stage say their common names once."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from xla_ckpt.core.json_data import pack_ints, unpack_ints
from xla_ckpt.core.manifest.arrays import Shard
from xla_ckpt.core.manifest.manifest import FileRecord
from xla_ckpt.core.plan.rank_record import RankRecord, ReplicaSample
from xla_ckpt.core.plan.save_plan import LeafShardTable
from xla_ckpt.core.sharding.box import Box

NAMES = ["model/a", "model/b", "optimizer/state/a/step", "extras/own/ranks/1/x"]
SAMPLE_COLUMNS = ("leaf", "layout_fingerprint", "content_fingerprint", "warn_only")


@st.composite
def shards_of(draw: st.DrawFn) -> Shard:
    start = draw(st.lists(st.integers(0, 5), max_size=3))
    box = Box(tuple(start), tuple(low + draw(st.integers(0, 1 << 40)) for low in start))
    frame = draw(st.sampled_from([None, Box((0,) * len(start), tuple(high + 1 for high in box.stop))]))
    return Shard(box, draw(st.integers(0, 9)), draw(st.integers(0, 1 << 60)), frame)


SHARDS = st.lists(st.tuples(st.sampled_from(NAMES), shards_of()), max_size=8)
DIGESTS = st.integers(0, (1 << 64) - 1)
SAMPLES = st.dictionaries(
    st.sampled_from(NAMES), st.lists(st.builds(ReplicaSample, DIGESTS, DIGESTS, st.booleans()), max_size=3)
)


def described(record: RankRecord) -> dict[str, Any]:
    """What is in the columns, row by row, with names. Boxes of fewer dims than others have zeros at their ends."""
    frames = record.shards.get_parent_boxes() or [None] * len(record.leaf)
    return {
        "shards": [
            (record.names[record.leaf[i]], record.shards.box.get_box(i), record.shards.file[i], record.shards.offset[i],
             frames[i])
            for i in range(len(record.leaf))
        ],
        "samples": [
            (record.names[leaf], place, content, loose)
            for leaf, place, content, loose in zip(
                *(getattr(record.samples, name).tolist() for name in SAMPLE_COLUMNS), strict=True
            )
        ],
    }  # fmt: skip


def record(shards: Any, samples: Any, *, says_common: bool) -> RankRecord:
    return RankRecord.from_shards(
        LeafShardTable.from_shards(shards), samples, common_leaves=NAMES[1::-1], reports_common=says_common, rank=1,
        aliases={}, skeleton={"a": 1}, objects=(0,), parts={"model": "x"},
        files=(FileRecord(path="f", size=9, framing_bytes=9, framing_digest=(1 << 64) - 1),),
        arrays={"model/a": ("float32", (2, 3), (None, ("tp",)), None)} if says_common else {},
    )  # fmt: skip


def told(one: RankRecord) -> RankRecord:
    return RankRecord.from_json(json.loads(json.dumps(one.to_json())))


@given(SHARDS, SAMPLES)
def test_a_record_arrives_as_it_was(shards: Any, samples: Any) -> None:
    first, other = record([], {}, says_common=True), record(shards, samples, says_common=False)
    assert not set(told(other).names) & set(NAMES[:2])  # the first rank of the stage says these
    arrived = told(other).resolve_names(told(first))
    assert arrived.names == other.names
    assert described(arrived) == described(other)
    assert (arrived.rank, arrived.files, arrived.objects, arrived.parts) == (1, other.files, (0,), {"model": "x"})
    widest = max((len(shard.box.start) for _, shard in shards), default=0)
    for (name, box, file, offset, frame), (wanted, shard) in zip(described(arrived)["shards"], shards, strict=True):
        assert (name, file, offset, frame is None) == (wanted, shard.file, shard.offset, shard.parent_box is None)
        assert box.start == (*shard.box.start, *(0,) * widest)[: max(widest, len(box.start))]
    assert told(first).resolve_names(told(first)).names[:2] == ("model/a", "model/b")
    assert told(first).arrays == {"model/a": ("float32", (2, 3), [None, ["tp"]], None)}


def packed_one_by_one(values: list[int]) -> Any:
    """What `pack_ints` gives, worked out number by number."""
    if values and len(set(values)) == 1:
        return values[0]
    packed: list[Any] = []
    i = 0
    while i < len(values):
        end = i + 1
        while end < len(values) and values[end] - values[end - 1] == values[i + 1] - values[i]:
            end += 1
        packed.append([values[i], values[i + 1] - values[i], end - i] if end - i > 3 else values[i])
        i = end if end - i > 3 else i + 1
    return packed


@given(st.lists(st.one_of(st.integers(0, 3), st.integers(0, (1 << 62) - 1)), max_size=30))
def test_numbers_are_packed_as_they_always_were(values: list[int]) -> None:
    assert pack_ints(values) == packed_one_by_one(values)
    assert unpack_ints(pack_ints(values), len(values)) == tuple(values)
