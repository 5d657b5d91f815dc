"""Parity files: XOR sums of blocks, the plan to recover lost blocks, and the index of digests.

Every file is divided into blocks of `PARITY_BLOCK_BYTES`. The XOR of all blocks of one file is that file's parity
block. The XOR of all blocks with the same index, over all files, is a stripe. A lost block is the XOR of the other
blocks in its file or in its stripe. If that requires another lost block, it is recovered after that block. This is a
product code of two single parity checks, decoded by peeling (Elias, "Error-free coding", 1954). The index
(docs/format.md) contains the digests of all blocks and sums.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from xla_ckpt.core.checksum import pack_digests, seal_json, to_hex, unpack_digests, unseal_json
from xla_ckpt.errors import FormatError, UnsupportedVersionError

ParityLevel = Literal["block", "file"]
"""Protection of a checkpoint: against a damaged block in each file, or also against the loss of one file."""

PARITY_BLOCK_BYTES = 1 << 20
"""Number of bytes per block. The last block of a file may be shorter, and is padded with zeros for the sums."""

PARITY_ALIGNMENT = 4096
"""Sums are as long as their longest block, rounded up to a multiple of this (bytes)."""

MAX_RECOVERY_CHAIN = 16
"""Maximum number of blocks that must be recovered one after another before a block. Random damage requires two or
three."""

BlockId = tuple[int, int]
"""(file, block) indices of a block."""

ParitySum = tuple[Literal["file", "stripe"], int]
"""Parity block of a file, or stripe of a block index."""


@dataclass(frozen=True, slots=True)
class FileBlocks:
    """The blocks of all files of a checkpoint."""

    sizes: tuple[int, ...]
    """Number of bytes of each file."""

    def count_blocks(self, file: int) -> int:
        """Return the number of blocks of a file."""
        return -(-self.sizes[file] // PARITY_BLOCK_BYTES)

    def get_length(self, file: int, block: int) -> int:
        """Return the number of bytes of a block."""
        return min(PARITY_BLOCK_BYTES, self.sizes[file] - block * PARITY_BLOCK_BYTES)

    @property
    def stripe_count(self) -> int:
        """Number of stripes, which is the number of blocks of the longest file."""
        return -(-max(self.sizes, default=0) // PARITY_BLOCK_BYTES)

    def list_members(self, sum_: ParitySum) -> list[BlockId]:
        """Return the blocks that a sum consists of.

        >>> FileBlocks((3 << 20, 5)).list_members(("stripe", 0)), FileBlocks((3 << 20, 5)).list_members(("stripe", 2))
        ([(0, 0), (1, 0)], [(0, 2)])
        """
        kind, number = sum_
        if kind == "file":
            return [(number, block) for block in range(self.count_blocks(number))]
        return [(file, number) for file in range(len(self.sizes)) if self.count_blocks(file) > number]

    def get_sum_length(self, sum_: ParitySum) -> int:
        """Return the number of bytes of a sum.

        >>> FileBlocks((5000, 7)).get_sum_length(("file", 0)), FileBlocks((5000, 7)).get_sum_length(("stripe", 0))
        (8192, 8192)
        """
        kind, number = sum_
        longest = self.sizes[number] if kind == "file" else max(self.sizes) - number * PARITY_BLOCK_BYTES
        return min(PARITY_BLOCK_BYTES, -(-longest // PARITY_ALIGNMENT) * PARITY_ALIGNMENT)

    def list_sums(self, parity: ParityLevel) -> list[ParitySum]:
        """Return all sums of a checkpoint, in the order of their digests in the index: files, then stripes."""
        listed: list[ParitySum] = [("file", file) for file in range(len(self.sizes))]
        if parity == "file":
            listed += [("stripe", number) for number in range(self.stripe_count)]
        return listed


def split_range(count: int, rank: int, world_size: int) -> range:
    """Return one rank's part of `range(count)` that is split over `world_size` ranks.

    >>> [list(split_range(5, rank, 2)) for rank in range(2)]
    [[0, 1], [2, 3, 4]]
    """
    return range(count * rank // world_size, count * (rank + 1) // world_size)


def plan_recovery(
    lost: Collection[BlockId], intact_sums: Collection[ParitySum]
) -> tuple[dict[BlockId, ParitySum], set[BlockId]]:
    """Plan the recovery of lost blocks from intact sums.

    Returns:
        Block -> the sum that recovers it, in an order in which each step needs only intact and previously recovered
        blocks; and the unrecoverable blocks.
    """
    left = set(lost)
    sound = set(intact_sums)
    missing: dict[ParitySum, set[BlockId]] = {}
    for at in left:
        for sum_ in _get_sums(at):
            if sum_ in sound:
                missing.setdefault(sum_, set()).add(at)
    ready = deque(sum_ for sum_, unknown in sorted(missing.items()) if len(unknown) == 1)
    depth = dict.fromkeys(missing, 0)
    steps: dict[BlockId, ParitySum] = {}
    while ready:
        sum_ = ready.popleft()
        if not missing[sum_] or depth[sum_] >= MAX_RECOVERY_CHAIN:
            continue  # its only unknown block has been recovered from the other sum, or the chain would be too long
        at = next(iter(missing[sum_]))
        steps[at] = sum_
        left.discard(at)
        for other in _get_sums(at):
            if other in missing:
                missing[other].discard(at)
                depth[other] = max(depth[other], depth[sum_] + 1)
                if len(missing[other]) == 1:
                    ready.append(other)
    return steps, left


def _get_sums(at: BlockId) -> tuple[ParitySum, ParitySum]:
    return ("file", at[0]), ("stripe", at[1])


@dataclass(frozen=True, slots=True)
class SumLocation:
    """Location of a stored sum."""

    file: str
    """Path relative to the checkpoint directory."""

    offset: int
    """Byte offset in the file."""


PARITY_FOLDER = "parity/"
"""Folder that contains all parity files."""

PARITY_INDEX = f"{PARITY_FOLDER}index.json"
"""File with the digests of all blocks and sums."""

MANIFEST_COPY = f"{PARITY_FOLDER}manifest.json"
"""Copy of the manifest."""


def assign_locations(
    blocks: FileBlocks, parity: ParityLevel, rank: int, world_size: int
) -> dict[ParitySum, SumLocation]:
    """Return the sums that one of `world_size` ranks computes, and their locations."""
    name = f"{rank + 1:05d}-of-{world_size:05d}"
    placed: dict[ParitySum, SumLocation] = {}
    kinds: list[tuple[str, Sequence[ParitySum]]] = [
        ("blocks", [("file", file) for file in split_range(len(blocks.sizes), rank, world_size)]),
        (
            "stripes",
            [("stripe", n) for n in split_range(blocks.stripe_count, rank, world_size)] if parity == "file" else [],
        ),
    ]
    for kind, sums in kinds:
        offset = 0
        for sum_ in sums:
            placed[sum_] = SumLocation(f"{PARITY_FOLDER}{kind}-{name}", offset)
            offset += blocks.get_sum_length(sum_)
    return placed


def compute_file_sizes(blocks: FileBlocks, locations: Mapping[ParitySum, SumLocation]) -> dict[str, int]:
    """Map the path of each file that contains sums to its bytes."""
    sizes: dict[str, int] = {}
    for sum_, place in locations.items():
        sizes[place.file] = max(sizes.get(place.file, 0), place.offset + blocks.get_sum_length(sum_))
    return {path: size for path, size in sizes.items() if size}


PARITY_FORMAT, PARITY_VERSION = "xla_ckpt.parity", 1

MAX_PARITY_RANKS = 1 << 20
"""Maximum number of ranks in an index, because readers iterate over the files of each rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityFile:
    """A file that the parity protects."""

    path: str
    size: int
    block_digests: tuple[int, ...]
    """Digest of each block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityIndex:
    """Content of `parity/index.json`."""

    survives: Literal["block", "file"]
    """Protection of the checkpoint: against a damaged block in each file, or also against the loss of one file."""

    block_bytes: int
    """Number of bytes per block."""

    writer_count: int
    """Number of ranks that computed the sums. Each wrote its own files."""

    manifest_digest: int
    """Digest of the manifest."""

    files: Sequence[ParityFile]
    sum_digests: tuple[int, ...]
    """Digests of the sums: of files, then of stripes."""

    def dump(self) -> bytes:
        """Serialize the index."""
        text = json.dumps(
            {
                "format": PARITY_FORMAT,
                "version": PARITY_VERSION,
                "survives": self.survives,
                "block": self.block_bytes,
                "writers": self.writer_count,
                "manifest": to_hex(self.manifest_digest),
                "files": [[file.path, file.size, pack_digests(file.block_digests)] for file in self.files],
                "sums": [len(self.sum_digests), pack_digests(self.sum_digests)],
            },
            separators=(",", ":"),
        )[:-1].encode("ascii")
        return seal_json(text)


def parse_parity_index(data: bytes) -> ParityIndex:
    """Parse a parity index.

    Raises:
        CorruptCheckpointError: The data is damaged.
        FormatError: The content is malformed.
        UnsupportedVersionError: A newer version wrote the index.
    """
    text = unseal_json(data, "the index of the parity")
    try:
        raw: dict[str, Any] = json.loads(text + b"}")
        if raw["format"] == PARITY_FORMAT and raw["version"] > PARITY_VERSION:
            raise UnsupportedVersionError(
                "a newer version wrote the parity", expected=PARITY_VERSION, found=raw["version"]
            )
        numbers = [raw["block"], raw["writers"], raw["sums"][0], *(size for _, size, _ in raw["files"])]
        if (
            not all(type(number) is int and number >= 0 for number in numbers)
            or not 1 <= raw["writers"] <= MAX_PARITY_RANKS
        ):
            raise ValueError("sizes and counts must be whole numbers in their limits")
        if raw["survives"] not in ("block", "file"):
            raise ValueError("it does not say what it survives")
        index = ParityIndex(
            survives=raw["survives"],
            block_bytes=raw["block"],
            writer_count=raw["writers"],
            manifest_digest=int(raw["manifest"], 16),
            files=tuple(
                ParityFile(path=path, size=size, block_digests=tuple(unpack_digests(digests, -(-size // raw["block"]))))
                for path, size, digests in raw["files"]
            ),
            sum_digests=tuple(unpack_digests(raw["sums"][1], raw["sums"][0])),
        )
    except (ValueError, KeyError, TypeError, ZeroDivisionError, RecursionError) as error:
        raise FormatError("the index of the parity is not one", found=str(error)) from error
    return index
