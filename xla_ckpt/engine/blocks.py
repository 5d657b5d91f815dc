"""The digest blocks of what is read in one go: which come in one piece, and whether they are as they were saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from xla_ckpt.engine.tag_reader import TagReader
from xla_ckpt.errors import CheckpointError
from xla_ckpt.manifest.digest import block_sizes, digest, to_hex
from xla_ckpt.plan.batches import ReadBatch
from xla_ckpt.sharding.corners import Ints


@dataclass(frozen=True, slots=True, eq=False)
class DigestBlocks:
    """The digest blocks of a batch: a row for each."""

    batch: ReadBatch
    extent: Ints
    """Row of the extent that it belongs to."""

    number: Ints
    """Which of the blocks of its shard it is."""

    begin: Ints
    """File offset of the first byte."""

    end: Ints
    """File offset of one past the last byte."""

    @classmethod
    def of(cls, batch: ReadBatch) -> DigestBlocks:
        extents = batch.extents
        counts = extents.last - extents.first
        extent = np.repeat(np.arange(len(extents)), counts)
        # Counted from the first block of the extent.
        block = np.arange(len(extent)) - np.repeat(np.cumsum(counts) - counts, counts)
        size = block_sizes(batch.plan.shard[extents.read])[extent]
        begin = extents.start[extent] + block * size
        return cls(batch, extent, extents.first[extent] + block, begin, np.minimum(begin + size, extents.stop[extent]))

    def __len__(self) -> int:
        return len(self.extent)

    def stored(self, tag: TagReader) -> list[int] | None:
        """Their digests, as the tag has them; None if it has none."""
        table = tag.digest_table(self.batch.file)
        if table is None:
            return None
        plan, read = self.batch.plan, self.batch.extents.read
        first = table.find(plan.offset[read], plan.shard[read])
        digests: list[int] = table.digests[first[self.extent] + self.number].tolist()
        return digests

    def pieces(self, nbytes: int) -> Iterator[tuple[range, int, int]]:
        """(rows, file offset of their first byte and of one past their last) of blocks that are read together.

        They are of about so many bytes, and of more where single blocks are larger.
        """
        ahead, behind = np.minimum.accumulate(self.begin[::-1])[::-1], np.maximum.accumulate(self.end)
        number = (self.begin - self.batch.start) // nbytes
        # Several reads may want the same block: it is in the piece of all of them.
        cuts = np.flatnonzero((ahead[1:] >= behind[:-1]) & (number[1:] != number[:-1])) + 1
        for first, last in pairwise([0, *cuts.tolist(), len(number)]):
            yield range(first, last), int(self.begin[first]), int(behind[last - 1])

    def digests(self, data: memoryview, rows: range) -> list[int]:
        """The digests of some of them, whose bytes `data` are: from the first byte of the first of them on."""
        start = int(self.begin[rows.start])
        begin, end = self.begin[rows.start : rows.stop].tolist(), self.end[rows.start : rows.stop].tolist()
        return [digest(data[a - start : b - start]) for a, b in zip(begin, end, strict=True)]

    def compare(
        self,
        tag: TagReader,
        expected: list[int],
        data: memoryview,
        error: type[CheckpointError],
        problem: str,
        hint: Callable[[], str],
        rows: range,
    ) -> None:
        """Raise an error if some of them, whose bytes `data` are, have other digests than are expected of all.

        The hint is asked for only then: whether there is a parity is a question to the storage.
        """
        for bad, actual in zip(rows, self.digests(data, rows), strict=True):
            if actual != expected[bad]:
                raise error(
                    f"{problem}: block {self.number[bad]} of a shard, bytes {self.begin[bad]} to {self.end[bad]} of "
                    "the file",
                    leaf=self.batch.leaf(int(self.extent[bad])),
                    file=tag.file_name(self.batch.file),
                    path=tag.root,
                    tag=tag.tag,
                    expected=f"digest {to_hex(expected[bad])}",
                    found=to_hex(actual),
                    hint=hint(),
                )
