"""The buffers of a crew of threads."""

from __future__ import annotations

import numpy as np

from tests.mappings import flags_of, needs_huge_pages
from xla_ckpt.storage.threads import WORKER_BUFFER_BYTES, run_tasks


@needs_huge_pages
def test_the_buffers_that_disks_write_from_are_of_huge_pages() -> None:
    flags = []

    def work(_: int, buffer: memoryview) -> None:
        flags.append(flags_of(np.frombuffer(buffer, np.uint8).ctypes.data))

    run_tasks(range(2), work, workers=1, buffer_bytes=WORKER_BUFFER_BYTES, name="crew")
    assert all("hg" in each for each in flags)
    assert len(flags) == 2
