"""Working out the damaged blocks of a tag with parity from what is left of it."""

from __future__ import annotations

from collections.abc import Mapping

from xla_ckpt.engine.parity import add
from xla_ckpt.engine.parity_check import all_places, reads_as
from xla_ckpt.errors import CorruptCheckpointError
from xla_ckpt.manifest.digest import digest
from xla_ckpt.manifest.parity_json import ParityIndex
from xla_ckpt.plan.parity import PARITY_BLOCK, BlockAt, Blocks, Sum
from xla_ckpt.storage.base import Directory

KEPT_BLOCKS = 16
"""Blocks that were worked out and are kept in memory, because others may need them."""


class Rebuilder:
    """Works out blocks of damaged files from what is left of the tag."""

    def __init__(self, directory: Directory, index: ParityIndex, steps: Mapping[BlockAt, Sum]) -> None:
        self._directory, self._index, self._steps = directory, index, steps
        self._blocks = Blocks(tuple(file.size for file in index.files))
        self._places = all_places(index)
        self._sums = dict(zip(self._blocks.sums(index.survives), index.sums, strict=True))
        self._kept: dict[BlockAt, bytes] = {}

    def write(self, draft: Directory, number: int, buffer: memoryview) -> None:
        """Make a file anew in the draft, durably. The buffer is page-aligned, and three blocks long.

        Raises:
            CorruptCheckpointError: What came out is not what was saved: something has changed since it was looked at.
            OSError: The storage refused.
        """
        file = self._index.files[number]
        data, other, scratch = (buffer[at * PARITY_BLOCK : (at + 1) * PARITY_BLOCK] for at in range(3))
        sink = draft.create(file.path, file.size)
        try:
            for block in range(len(file.digests)):
                length = self._blocks.length(number, block)
                self._fill((number, block), data[:length], other, scratch)
                sink.write(data, length, block * PARITY_BLOCK)
            sink.commit()
        finally:
            sink.abandon()
        for block, wanted in enumerate(file.digests):
            length = self._blocks.length(number, block)
            if not reads_as(draft, file.path, block * PARITY_BLOCK, data[:length], scratch, wanted):
                raise _changed(file.path, block)

    def _fill(self, at: BlockAt, target: memoryview, other: memoryview, scratch: memoryview) -> None:
        """Put the right bytes of a block into `target`."""
        file, wanted = self._index.files[at[0]], self._index.files[at[0]].digests[at[1]]
        if at not in self._steps:
            if not reads_as(self._directory, file.path, at[1] * PARITY_BLOCK, target, scratch, wanted):
                raise _changed(file.path, at[1])
            return
        target[:] = self._worked_out(at, other, scratch)
        if digest(target) != wanted:
            raise _changed(file.path, at[1])

    def _worked_out(self, at: BlockAt, other: memoryview, scratch: memoryview) -> bytes:
        if at in self._kept:
            return self._kept[at]
        sum_ = self._steps[at]
        place, length = self._places[sum_], self._blocks.sum_length(sum_)
        total = memoryview(bytearray(PARITY_BLOCK))
        if not reads_as(self._directory, place.file, place.offset, other[:length], scratch, self._sums[sum_]):
            raise _changed(place.file, place.offset // PARITY_BLOCK)
        add(total, other[:length])
        for member in self._blocks.members(sum_):
            if member == at:
                continue
            part = other[: self._blocks.length(*member)]
            if member in self._steps:
                add(total, memoryview(self._worked_out(member, other, scratch)))
            else:
                self._fill(member, part, other, scratch)
                add(total, part)
        block = bytes(total[: self._blocks.length(*at)])
        while len(self._kept) >= KEPT_BLOCKS:
            del self._kept[next(iter(self._kept))]
        self._kept[at] = block
        return block


def _changed(path: str, block: int) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        "a file changes while it is repaired", file=path, found=f"other bytes in block {block}", hint="Try again."
    )
