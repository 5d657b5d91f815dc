"""The buffers of a crew of threads."""

from __future__ import annotations

import numpy as np

from tests.mappings import flags_of, needs_huge_pages
from xla_ckpt.storage.pool import BUFFER_BYTES, work_off


@needs_huge_pages
def test_the_buffers_that_disks_write_from_are_of_huge_pages() -> None:
    flags = []

    def work(_: int, buffer: memoryview) -> None:
        flags.append(flags_of(np.frombuffer(buffer, np.uint8).ctypes.data))

    work_off(range(2), work, workers=1, buffer_bytes=BUFFER_BYTES, name="crew")
    assert all("hg" in each for each in flags)
    assert len(flags) == 2
