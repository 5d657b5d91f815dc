"""What a bar is told while a tag is read: in the end, all that it announced, and no byte more."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import xla_ckpt
from tests.formats.writing import as_job
from tests.memory import MemoryDirectory
from tests.strategies import boxes_in
from xla_ckpt import ArraySpec, Mesh
from xla_ckpt.core import dtypes
from xla_ckpt.core.manifest import manifest_json
from xla_ckpt.core.manifest.manifest import ManifestHeader
from xla_ckpt.core.plan.leaf import ArrayLeaf, create_local_layout
from xla_ckpt.core.plan.merge import merge_records
from xla_ckpt.core.plan.rank_record import RankRecord
from xla_ckpt.core.plan.restore_plan import ReadRequest, plan_restore
from xla_ckpt.core.plan.save_plan import plan_save
from xla_ckpt.core.sharding.box import Box
from xla_ckpt.core.sharding.local_array import create_unsharded
from xla_ckpt.loading import restore
from xla_ckpt.loading.read import read_into, verify_reads
from xla_ckpt.loading.tag_reader import TagReader
from xla_ckpt.progress import IoContext, ProgressBar
from xla_ckpt.saving.write import write_files

SHAPE = (700, 3500)
"""9.8 MB of float32: more than a reader's buffer, and so read in several pieces."""


class Count:
    """A bar that only counts."""

    def __init__(self) -> None:
        self.done = 0
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> None:
        with self._lock:
            self.done += nbytes


@pytest.fixture(scope="module")
def tag() -> TagReader:
    leaf = ArrayLeaf("model/w", dtypes.get_dtype("float32"), create_local_layout(create_unsharded(SHAPE)))
    array = np.arange(leaf.nbytes // 4, dtype=np.float32)
    directory = MemoryDirectory()
    written = write_files(directory, plan_save([leaf]), {("model/w", 0): array.view(np.uint8).data})
    facts = {"model/w": ("float32", SHAPE, None, None)}
    merged = merge_records(
        [RankRecord.from_shards(written.shards, rank=0, files=written.files, arrays=facts, aliases={}, skeleton=None)],
        Mesh(),
    )
    manifest = merged.build_manifest(ManifestHeader(tag="t", sequence=1, pinned=False, created=""), Mesh())
    directory.objects["manifest.json"] = manifest_json.dump_manifest(manifest)
    return TagReader(directory, "root", "t")


BOXES = st.lists(boxes_in(SHAPE) | st.builds(lambda box: Box((box.start[0], 0), (box.stop[0], 3500)), boxes_in(SHAPE)),
                 min_size=1, max_size=3)  # fmt: skip


@settings(deadline=None, max_examples=50)
@given(BOXES)
def test_each_byte_is_told_once(tag: TagReader, boxes: list[Box]) -> None:
    """Of whole arrays, of rows that begin and end inside of a block, and of columns."""
    plan = plan_restore(tag.manifest, [ReadRequest("model/w", box, i) for i, box in enumerate(boxes)])
    slots = [memoryview(bytearray(4 * box.size)) for box in boxes]
    reading, checking = Count(), Count()
    read_into(tag, plan, slots, IoContext(progress=reading))
    verify_reads(tag, plan, IoContext(progress=checking))
    assert (reading.done, checking.done) == (plan.read_bytes, plan.read_bytes)


@pytest.mark.parametrize("split", [("tp", None), (None, "tp")], ids=["rows", "columns"])
@pytest.mark.parametrize(("live", "staged"), [(False, 0), (True, 0), (True, 1 << 28)])
def test_a_bar_ends_at_its_total(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: tuple[Any, ...], live: bool, staged: int
) -> None:
    """Loads of a part of each array. Of memory that is overwritten, the large array is read twice: verified first."""
    monkeypatch.setattr(restore, "MAX_STAGED_BYTES", staged)
    xla_ckpt.save(tmp_path, "a", {"model": {"w": torch.ones(1110, 666), "b": torch.ones(6, 3)}})
    bars: list[ProgressBar] = []
    init = ProgressBar.__init__

    def spy(self: ProgressBar, *args: Any) -> None:
        init(self, *args)
        bars.append(self)

    monkeypatch.setattr(ProgressBar, "__init__", spy)
    mesh = Mesh(tp=3)

    def load(_: int) -> None:
        part = {"w": torch.zeros(370, 666), "b": torch.zeros(2, 3)}
        if split[0] is None:
            part = {"w": torch.zeros(1110, 222), "b": torch.zeros(6, 1)}
        if live:
            found = part
            xla_ckpt.load_checkpoint(tmp_path, "a", model=part, mesh=mesh, shardings=[(".", split)])
        else:
            like = {"w": ArraySpec((1110, 666), "float32", split), "b": ArraySpec((6, 3), "float32", split)}
            found = xla_ckpt.restore(tmp_path, "a", {"model": like}, mesh=mesh).tree["model"]
        assert all(np.array_equal(found[name], torch.ones_like(value)) for name, value in part.items())

    as_job(monkeypatch, mesh, "load", load)
    totals = [bar._total for bar in bars]
    assert len(totals) == mesh.size
    assert min(totals) >= (2 if live else 1) * 4 * 370 * 666
    assert [bar.done for bar in bars] == totals
