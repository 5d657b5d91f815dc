"""Small pieces of a file, of which neighbours are read together."""

from __future__ import annotations

from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.storage.base import Source

FEW_AHEAD = 4096
"""Bytes that are read at once from a file of one zip: beside the header of a large storage there is nothing to see."""

AHEAD = 64 * 1024
"""Bytes that are read at once from a file of many zips: most of them are small, or lie beside one that is."""


class Ahead:
    """A file of which small pieces are read, in ascending order as a rule. Each read takes along what comes next.

    Args:
        ahead: Bytes that a read takes at least.
    """

    def __init__(self, source: Source, file: str, ahead: int = AHEAD) -> None:
        self.source = source
        self.file = file
        self.size = source.size
        self._ahead = ahead
        self._start = 0
        self._held = memoryview(b"")

    def take(self, offset: int, nbytes: int) -> memoryview:
        """Bytes of the file.

        Raises:
            CorruptCheckpointError: The file ends before them.
        """
        at = offset - self._start
        if at < 0 or at + nbytes > len(self._held):
            wanted = bytearray(max(min(max(nbytes, self._ahead), self.size - offset), 0))
            got = self.source.read_into(memoryview(wanted), offset)
            self._start, self._held, at = offset, memoryview(wanted)[:got], 0
            if got < nbytes:
                raise CorruptCheckpointError(
                    "the file is cut off", file=self.file, expected=f"{offset + nbytes} bytes", found=self.size
                )
        return self._held[at : at + nbytes]
