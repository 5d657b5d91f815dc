"""Digests: which bytes are covered by which number.

The bytes of every stored region are cut into blocks, from the region's own start, and each block has an XXH3-64 digest.
Blocks grow with the region, so that a region has at most 64 of them up to 256 MiB: a reader that needs a part of it
verifies what it reads and reads hardly more than it needs.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Sequence

import xxhash

from xla_ckpt.errors import FormatError

MIN_BLOCK = 4 * 1024
"""Smallest block (bytes)."""

MAX_BLOCK = 4 * 1024 * 1024
"""Largest block (bytes)."""

ALGORITHM = "xxh3-64"
"""Name of the digest in the manifest."""


def block_size(region_bytes: int) -> int:
    """Bytes of one digest block of a region: the power of two that cuts it into at most 64, within the limits.

    >>> block_size(1000), block_size(1 << 20), block_size(1 << 30)
    (4096, 16384, 4194304)
    """
    wanted = -(-region_bytes // 64)
    power = 1 << max(wanted - 1, 0).bit_length()
    return min(max(power, MIN_BLOCK), MAX_BLOCK)


def block_count(region_bytes: int) -> int:
    """Number of digest blocks of a region; 0 for an empty one.

    >>> block_count(0), block_count(4097)
    (0, 2)
    """
    return -(-region_bytes // block_size(region_bytes))


def digest(data: bytes | bytearray | memoryview) -> int:
    """XXH3-64 of some bytes."""
    return xxhash.xxh3_64_intdigest(data)


def to_hex(value: int) -> str:
    """A digest as 16 hexadecimal digits."""
    return f"{value:016x}"


def pack(digests: Sequence[int]) -> str:
    """Digests as base64 of little-endian 64-bit numbers; its length depends on their number only."""
    return base64.b64encode(struct.pack(f"<{len(digests)}Q", *digests)).decode()


def unpack(text: str, count: int) -> tuple[int, ...]:
    """The `count` digests that `pack` wrote.

    Raises:
        FormatError: Not base64, or another number of digests.
    """
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise FormatError("broken table of digests") from error
    if len(raw) != 8 * count:
        raise FormatError("table of digests of the wrong size", expected=f"{count} digests", found=f"{len(raw)} bytes")
    return struct.unpack(f"<{count}Q", raw)
