"""Copies within host memory."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from xla_ckpt.snapshot.memory import Bytes
from xla_ckpt.storage.pool import work_off

COPIERS = 2
"""Threads that copy."""

COPY_BYTES = 16 * 1024 * 1024
"""Largest single copy: so that the copiers finish together."""


def copy_all(pairs: Iterable[tuple[Bytes, Bytes]]) -> None:
    """Copy memory: (target, source) of equal length each, which the caller keeps until then."""
    pieces = [
        (target[at : at + COPY_BYTES], source[at : at + COPY_BYTES])
        for target, source in pairs
        for at in range(0, len(source), COPY_BYTES)
    ]
    # A thread takes longer to start than a few small copies.
    workers = COPIERS if sum(len(target) for target, _ in pieces) > COPY_BYTES else 1
    work_off(pieces, lambda pair, _: np.copyto(*pair), workers=workers, buffer_bytes=0, name="xla_ckpt-copy")
