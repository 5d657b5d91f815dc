"""Which bytes of a tag can be worked out from others: the blocks of its files, and the sums that hold them together.

Every file is cut into blocks of `PARITY_BLOCK` bytes. The sum (XOR) of all blocks of one file is that file's parity
block. The sum of all blocks with one number, over all files, is a stripe. A block that is lost is the sum of the others
in its file, or of the others in its stripe. So is one that needs a second lost block, once that one has been worked
out. That is a product code of two single parity checks, decoded by peeling (Elias, "Error-free coding", 1954).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Parity = Literal["block", "file"]
"""What a tag survives: a damaged block in each of its files, or that and the loss of a file."""

PARITY_BLOCK = 1 << 20
"""Bytes of a block. The last one of a file may be shorter, and counts as if zeros followed it."""

SLOT = 4096
"""Sums are as long as their longest block, rounded up to a multiple of this (bytes)."""

MAX_CHAIN = 16
"""How many other blocks, each needed by the next, may have to be worked out before one: what is damaged by chance needs
two or three."""

BlockAt = tuple[int, int]
"""(file, block) of a block of a file."""

Sum = tuple[Literal["file", "stripe"], int]
"""The parity block of a file, or the stripe of a number."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of all files of a tag."""

    sizes: tuple[int, ...]
    """Bytes of each file."""

    def count(self, file: int) -> int:
        """How many blocks a file has."""
        return -(-self.sizes[file] // PARITY_BLOCK)

    def length(self, file: int, block: int) -> int:
        """Bytes of a block."""
        return min(PARITY_BLOCK, self.sizes[file] - block * PARITY_BLOCK)

    @property
    def stripes(self) -> int:
        """How many stripes there are: as many as the longest file has blocks."""
        return -(-max(self.sizes, default=0) // PARITY_BLOCK)

    def members(self, sum_: Sum) -> list[BlockAt]:
        """The blocks that a sum is made of.

        >>> Blocks((3 << 20, 5)).members(("stripe", 0)), Blocks((3 << 20, 5)).members(("stripe", 2))
        ([(0, 0), (1, 0)], [(0, 2)])
        """
        kind, number = sum_
        if kind == "file":
            return [(number, block) for block in range(self.count(number))]
        return [(file, number) for file in range(len(self.sizes)) if self.count(file) > number]

    def sum_length(self, sum_: Sum) -> int:
        """Bytes of a sum.

        >>> Blocks((5000, 7)).sum_length(("file", 0)), Blocks((5000, 7)).sum_length(("stripe", 0))
        (8192, 8192)
        """
        kind, number = sum_
        longest = self.sizes[number] if kind == "file" else max(self.sizes) - number * PARITY_BLOCK
        return min(PARITY_BLOCK, -(-longest // SLOT) * SLOT)

    def sums(self, parity: Parity) -> list[Sum]:
        """All sums of a tag, in the order of their digests in the index: those of files, then stripes."""
        listed: list[Sum] = [("file", file) for file in range(len(self.sizes))]
        if parity == "file":
            listed += [("stripe", number) for number in range(self.stripes)]
        return listed


def share(count: int, rank: int, world: int) -> range:
    """The part of `count` things that one of `world` ranks deals with.

    >>> [list(share(5, rank, 2)) for rank in range(2)]
    [[0, 1], [2, 3, 4]]
    """
    return range(count * rank // world, count * (rank + 1) // world)


def solve(bad: Collection[BlockAt], sums: Collection[Sum]) -> tuple[dict[BlockAt, Sum], set[BlockAt]]:
    """How to work out the bad blocks, with the sums that are sound.

    Returns:
        (block -> the sum that gives it, in an order in which each needs good and earlier blocks only; what is left)
    """
    left = set(bad)
    sound = set(sums)
    missing: dict[Sum, set[BlockAt]] = {}
    for at in left:
        for sum_ in _sums_of(at):
            if sum_ in sound:
                missing.setdefault(sum_, set()).add(at)
    ready = deque(sum_ for sum_, unknown in sorted(missing.items()) if len(unknown) == 1)
    depth = dict.fromkeys(missing, 0)
    steps: dict[BlockAt, Sum] = {}
    while ready:
        sum_ = ready.popleft()
        if not missing[sum_] or depth[sum_] >= MAX_CHAIN:
            continue  # its only unknown has been worked out by the other sum, or would take too long
        at = next(iter(missing[sum_]))
        steps[at] = sum_
        left.discard(at)
        for other in _sums_of(at):
            if other in missing:
                missing[other].discard(at)
                depth[other] = max(depth[other], depth[sum_] + 1)
                if len(missing[other]) == 1:
                    ready.append(other)
    return steps, left


def _sums_of(at: BlockAt) -> tuple[Sum, Sum]:
    return ("file", at[0]), ("stripe", at[1])


@dataclass(frozen=True, slots=True)
class SumPlace:
    """Where a sum is stored."""

    file: str
    """Path in the directory of the tag."""

    offset: int
    """Its first byte."""


FOLDER = "parity/"
"""Below it lies everything that this module speaks of."""

PARITY_INDEX = f"{FOLDER}index.json"
"""Digests of all blocks and sums."""

COPY = f"{FOLDER}manifest.json"
"""A copy of the tag's manifest."""


def places(blocks: Blocks, parity: Parity, rank: int, world: int) -> dict[Sum, SumPlace]:
    """The sums that one of `world` ranks makes, and where it stores them."""
    name = f"{rank + 1:05d}-of-{world:05d}"
    placed: dict[Sum, SumPlace] = {}
    kinds: list[tuple[str, Sequence[Sum]]] = [
        ("blocks", [("file", file) for file in share(len(blocks.sizes), rank, world)]),
        ("stripes", [("stripe", n) for n in share(blocks.stripes, rank, world)] if parity == "file" else []),
    ]
    for kind, sums in kinds:
        offset = 0
        for sum_ in sums:
            placed[sum_] = SumPlace(f"{FOLDER}{kind}-{name}", offset)
            offset += blocks.sum_length(sum_)
    return placed


def file_sizes(blocks: Blocks, placed: Mapping[Sum, SumPlace]) -> dict[str, int]:
    """Path -> bytes of the files in which sums are stored."""
    sizes: dict[str, int] = {}
    for sum_, place in placed.items():
        sizes[place.file] = max(sizes.get(place.file, 0), place.offset + blocks.sum_length(sum_))
    return {path: size for path, size in sizes.items() if size}
