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
from tests.layouts.writing import as_job
from tests.memory import MemoryDirectory
from tests.strategies import boxes_in
from xla_ckpt import ArraySpec, Mesh, dtypes
from xla_ckpt.engine import restore
from xla_ckpt.engine.crew import Crew
from xla_ckpt.engine.progress import Progress
from xla_ckpt.engine.read import check_reads, read_into
from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.engine.write import write_files
from xla_ckpt.manifest import manifest_json
from xla_ckpt.manifest.records import Head
from xla_ckpt.plan.leaf import Leaf, holding_of
from xla_ckpt.plan.merge import merge
from xla_ckpt.plan.record import Record
from xla_ckpt.plan.restore_plan import Want, plan_restore
from xla_ckpt.plan.save_plan import plan_save
from xla_ckpt.sharding.box import Box
from xla_ckpt.sharding.local_array import whole

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
    leaf = Leaf("model/w", dtypes.dtype("float32"), holding_of(whole(SHAPE)))
    array = np.arange(leaf.nbytes // 4, dtype=np.float32)
    directory = MemoryDirectory()
    written = write_files(directory, plan_save([leaf]), {("model/w", 0): array.view(np.uint8).data})
    facts = {"model/w": ("float32", SHAPE, None, None)}
    merged = merge(
        [Record.of(written.shards, rank=0, files=written.files, arrays=facts, aliases={}, skeleton=None)], Mesh()
    )
    manifest = merged.manifest(Head(tag="t", sequence=1, pinned=False, created=""), Mesh())
    directory.objects["manifest.json"] = manifest_json.dump(manifest)
    return TagReader(directory, "root", "t")


BOXES = st.lists(boxes_in(SHAPE) | st.builds(lambda box: Box((box.start[0], 0), (box.stop[0], 3500)), boxes_in(SHAPE)),
                 min_size=1, max_size=3)  # fmt: skip


@settings(deadline=None, max_examples=50)
@given(BOXES)
def test_each_byte_is_told_once(tag: TagReader, boxes: list[Box]) -> None:
    """Of whole arrays, of rows that begin and end inside of a block, and of columns."""
    plan = plan_restore(tag.manifest, [Want("model/w", box, i) for i, box in enumerate(boxes)])
    slots = [memoryview(bytearray(4 * box.size)) for box in boxes]
    reading, checking = Count(), Count()
    read_into(tag, plan, slots, Crew(progress=reading))
    check_reads(tag, plan, Crew(progress=checking))
    assert (reading.done, checking.done) == (plan.read_bytes, plan.read_bytes)


@pytest.mark.parametrize("split", [("tp", None), (None, "tp")], ids=["rows", "columns"])
@pytest.mark.parametrize(("live", "staged"), [(False, 0), (True, 0), (True, 1 << 28)])
def test_a_bar_ends_at_its_total(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: tuple[Any, ...], live: bool, staged: int
) -> None:
    """Loads of a part of each array. Of memory that is overwritten, the large array is read twice: verified first."""
    monkeypatch.setattr(restore, "STAGED_BYTES", staged)
    xla_ckpt.save(tmp_path, "a", {"model": {"w": torch.ones(1110, 666), "b": torch.ones(6, 3)}})
    bars: list[Progress] = []
    init = Progress.__init__

    def spy(self: Progress, *args: Any) -> None:
        init(self, *args)
        bars.append(self)

    monkeypatch.setattr(Progress, "__init__", spy)
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
