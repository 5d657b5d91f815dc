"""The buffers of a crew of threads."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from xla_ckpt.storage.pool import BUFFER_BYTES, work_off

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _flags(address: int) -> list[str]:
    """What the kernel knows of the mapping at an address."""
    within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            within = int(span[1], 16) <= address < int(span[2], 16)
        elif within and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"nothing is mapped at {address:x}")


@pytest.mark.skipif(not _HUGE_PAGES.exists(), reason="this kernel has no huge pages")
def test_the_buffers_that_disks_write_from_are_of_huge_pages() -> None:
    flags = []

    def work(_: int, buffer: memoryview) -> None:
        flags.append(_flags(np.frombuffer(buffer, np.uint8).ctypes.data))

    work_off(range(2), work, workers=1, buffer_bytes=BUFFER_BYTES, name="crew")
    assert all("hg" in each for each in flags)
    assert len(flags) == 2
