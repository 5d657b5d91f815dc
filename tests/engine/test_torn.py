"""A thread of the program that writes to the state while it is saved."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import xla_ckpt
from tests.core.plan.test_round_trip import bytes_view
from tests.memory import MemoryDirectory
from xla_ckpt.core import dtypes
from xla_ckpt.core.checksum import compute_block_size, compute_digest, unpack_digests
from xla_ckpt.core.plan.leaf import create_leaf
from xla_ckpt.core.plan.save_plan import plan_save
from xla_ckpt.core.sharding.local_array import create_unsharded
from xla_ckpt.progress import IoContext
from xla_ckpt.saving.write import write_files
from xla_ckpt.snapshot.snapshot import Snapshot


def test_digests_are_those_of_the_bytes_that_were_written() -> None:
    array = np.zeros(64 * 1024, np.uint8)
    directory = MemoryDirectory()
    plan = plan_save([create_leaf("w", dtypes.get_dtype("uint8"), create_unsharded(array.shape))], 0, 1)

    def written(nbytes: int) -> None:
        array[...] += 1  # between two segments, which cut a block of digests in two

    write_files(
        directory, plan, {("w", 0): bytes_view(array)}, IoContext(workers=1, progress=written), segment_bytes=6144
    )
    (data,) = directory.objects.values()
    codec = plan.files[0].layout
    ((at, nbytes),) = codec.region_ranges
    block = compute_block_size(nbytes)
    blocks = [compute_digest(bytes(data[start : start + block])) for start in range(at, at + nbytes, block)]
    assert len(set(data[at : at + nbytes])) > 1
    head = json.loads(bytes(data[8:at]))
    assert list(unpack_digests(head["__metadata__"]["xla_ckpt_digests"], len(blocks))) == blocks


@pytest.mark.parametrize("background", [False, True])
def test_a_tensor_that_changes_in_a_save_is_named_and_can_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    changing, still = torch.zeros(1 << 22), torch.ones(4)
    over, wrote = threading.Event(), threading.Event()

    def writes() -> None:
        while not over.is_set():
            changing.add_(1)
            wrote.set()

    def ends_after_a_write(snapshot: Snapshot) -> None:
        for _ in range(2):  # on a busy machine the thread may not run in the whole save, or end what it began before
            wrote.clear()
            assert wrote.wait(60)
        end_watch(snapshot)

    end_watch = Snapshot.detect_torn_writes
    monkeypatch.setattr(Snapshot, "detect_torn_writes", ends_after_a_write)
    thread = threading.Thread(target=writes)
    thread.start()
    try:
        assert wrote.wait(60)
        with caplog.at_level(logging.WARNING, "xla_ckpt"):
            handle = xla_ckpt.save_checkpoint(tmp_path, "a", {"w": changing, "still": still}, async_save=background)
            handle.result()
    finally:
        over.set()
        thread.join()
    (warning,) = [r.getMessage() for r in caplog.records if "wrote to" in r.getMessage()]
    assert "model/w" in warning
    assert "still" not in warning
    assert xla_ckpt.verify(tmp_path, "a").ok
    xla_ckpt.load_checkpoint(tmp_path, "a", model={"w": torch.zeros(1 << 22), "still": torch.zeros(4)})
