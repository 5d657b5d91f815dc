"""Checksums: XXH3-64 digests of blocks and rows, sealed JSON, and CRC-32.

Every stored region is divided into blocks from its start, and each block has an XXH3-64 digest. The block size grows
with the region, so that a region of up to 256 MiB has at most 64 blocks. A reader of a part can verify the bytes that
it reads, and reads few additional bytes. CRC-32 is the checksum of zip files.

A digest verifies stored bytes only. To distinguish objects of a running program, use a fingerprint. The format version
in a file determines the digest, so changing the digest requires new versions of all formats: manifests, parity, digest
files of foreign formats, SMP sidecars and ledgers.
"""

from __future__ import annotations

import base64
import binascii
import functools
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from xla_ckpt.core.sharding.box import IntArray
from xla_ckpt.errors import CorruptCheckpointError, FormatError

MIN_BLOCK = 4 * 1024
"""Minimum block size (bytes)."""

MAX_BLOCK = 4 * 1024 * 1024
"""Maximum block size (bytes)."""


@functools.lru_cache(maxsize=4096)
def compute_block_size(region_bytes: int) -> int:
    """Return the block size of a region: the power of two that gives at most 64 blocks, within the limits.

    >>> compute_block_size(1000), compute_block_size(1 << 20), compute_block_size(1 << 30)
    (4096, 16384, 4194304)
    """
    wanted = -(-region_bytes // 64)
    power = 1 << max(wanted - 1, 0).bit_length()
    return min(max(power, MIN_BLOCK), MAX_BLOCK)


_BLOCK_SIZES = 1 << np.arange((MIN_BLOCK - 1).bit_length(), MAX_BLOCK.bit_length())
"""All block sizes."""


def compute_block_sizes(region_bytes: IntArray) -> IntArray:
    """Vectorized `compute_block_size`.

    >>> compute_block_sizes(np.array([1000, 1 << 20, 1 << 30]))
    array([   4096,   16384, 4194304])
    """
    which = np.searchsorted(64 * _BLOCK_SIZES, region_bytes)
    return np.asarray(_BLOCK_SIZES[np.minimum(which, len(_BLOCK_SIZES) - 1)], np.int64)


def count_blocks(region_bytes: int) -> int:
    """Return the number of digest blocks of a region, 0 for an empty one.

    >>> count_blocks(0), count_blocks(4097)
    (0, 2)
    """
    return -(-region_bytes // compute_block_size(region_bytes))


def compute_digest(data: bytes | bytearray | memoryview) -> int:
    """Return the XXH3-64 digest of bytes."""
    return xxhash.xxh3_64_intdigest(data)


EMPTY_DIGEST = compute_digest(b"")
"""Digest of zero bytes. Also used if the digest of a file is unknown."""


MIN_ROWS_BYTES = 256
"""Minimum number of bytes per digest in `compute_rows_digest`. Shorter rows are combined."""


def count_rows_per_digest(row_bytes: int) -> int:
    """Return the number of rows per digest in `compute_rows_digest`: a power of two, because most numbers of ranks are.

    >>> count_rows_per_digest(2), count_rows_per_digest(24), count_rows_per_digest(4096)
    (128, 16, 1)
    """
    return 1 << (-(-MIN_ROWS_BYTES // max(row_bytes, 1)) - 1).bit_length()


def compute_rows_digest(data: memoryview, row_bytes: int, first_row: int) -> int:
    """Return the digest of rows of an array. The digest of all rows is the sum over disjoint parts, modulo 2**64.

    Each part must start and end at a multiple of `count_rows_per_digest`, or at the end of the array.

    Args:
        data: Bytes of the rows.
        row_bytes: Number of bytes per row.
        first_row: Index of the first row in the array.

    >>> data = memoryview(bytes(1024))
    >>> parts = compute_rows_digest(data[:512], 128, 0), compute_rows_digest(data[512:], 128, 4)
    >>> sum(parts) % 2**64 == compute_rows_digest(data, 128, 0)
    True
    """
    together = count_rows_per_digest(row_bytes)
    step, begin = together * max(row_bytes, 1), first_row // together
    parts = (
        xxhash.xxh3_64_intdigest(data[at : at + step], seed=begin + n) for n, at in enumerate(range(0, len(data), step))
    )
    return sum(parts) % (1 << 64)


DigestArray = npt.NDArray[np.uint64]
"""Array of digests."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """Block digests of one payload file, by the offset of the region."""

    offset: IntArray
    """File offset of each region, ascending."""

    nbytes: IntArray
    """Number of bytes of each region."""

    first_digest: IntArray
    """Index of each region's first digest."""

    digests: DigestArray

    @classmethod
    def from_regions(cls, offset: IntArray, nbytes: IntArray, digests: DigestArray) -> BlockTable:
        """Create the table of regions (ascending) from their concatenated digests."""
        counts = -(-nbytes // compute_block_sizes(nbytes))
        some = np.flatnonzero(nbytes)  # an empty region has no blocks, and the same offset as the next region
        return cls(offset[some], nbytes[some], (np.cumsum(counts) - counts)[some], digests)

    def get_digests(self, offset: int, nbytes: int) -> tuple[int, ...]:
        """Return the block digests of the region of `nbytes` bytes at `offset`.

        Raises:
            FormatError: The file does not contain this region.
        """
        (first,) = self.find_first_digests(np.array([offset]), np.array([nbytes])).tolist()
        return tuple(self.digests[first : first + count_blocks(nbytes)].tolist())

    def find_first_digests(self, offset: IntArray, nbytes: IntArray) -> IntArray:
        """Return the indices of the first digests of regions.

        Raises:
            FormatError: The file does not contain one of the regions.
        """
        if not len(self.offset):
            raise FormatError("the payload has no regions", expected=f"{nbytes[0]} bytes at {offset[0]}")
        row = np.minimum(np.searchsorted(self.offset, offset), len(self.offset) - 1)
        bad = np.flatnonzero((self.offset[row] != offset) | (self.nbytes[row] != nbytes))
        if bad.size:
            size = int(self.nbytes[row[bad[0]]]) if self.offset[row[bad[0]]] == offset[bad[0]] else None
            wanted = f"{nbytes[bad[0]]} bytes at {offset[bad[0]]}"
            raise FormatError("the payload has no such region", expected=wanted, found=size)
        return self.first_digest[row]


class BlockDigester:
    """Computes the block digests of a region from consecutive parts."""

    def __init__(self, region_bytes: int) -> None:
        self._block = compute_block_size(region_bytes)
        self._left = region_bytes
        self._room = self._block
        self._hash = xxhash.xxh3_64()
        self.digests: list[int] = []
        """Digests of the completed blocks. Contains all blocks after the last byte."""

    def update(self, data: memoryview) -> None:
        """Add the next bytes."""
        while len(data):
            part = data[: self._room]
            self._hash.update(part)
            self._room -= len(part)
            self._left -= len(part)
            data = data[len(part) :]
            if not self._room or not self._left:
                self.digests.append(self._hash.intdigest())
                self._hash.reset()
                self._room = self._block


class OutOfOrderDigest:
    """Digest of a block whose parts arrive in any order.

    >>> joined = OutOfOrderDigest()
    >>> joined.add(1, memoryview(b"bc"))
    >>> joined.add(0, memoryview(b"a"))
    >>> joined.nbytes, joined.value == compute_digest(b"abc")
    (3, True)
    """

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()
        self._early: dict[int, bytes] = {}
        self.nbytes = 0
        """Number of bytes in the digest: from the start of the block to the first missing byte."""

    @property
    def value(self) -> int:
        """Digest of these bytes."""
        return self._hash.intdigest()

    def add(self, offset: int, data: memoryview) -> None:
        """Add a part at `offset` bytes from the start of the block. Copies the part if an earlier one is missing."""
        if offset != self.nbytes:
            self._early[offset] = bytes(data)
            return
        self._hash.update(data)
        self.nbytes += len(data)
        while (next_part := self._early.pop(self.nbytes, None)) is not None:
            self._hash.update(next_part)
            self.nbytes += len(next_part)


def to_hex(value: int) -> str:
    """Format a digest as 16 hexadecimal digits."""
    return f"{value:016x}"


_SEAL_PATTERN = re.compile(rb',\n"digest":"([0-9a-f]{16})"}\n\Z')


def seal_json(body: bytes) -> bytes:
    """Append a digest of all previous bytes to a JSON object, as its last member.

    Args:
        body: The object without its closing brace.

    >>> unseal_json(seal_json(b'{"a":1'), "the text")
    b'{"a":1'
    """
    return body + b',\n"digest":"' + to_hex(compute_digest(body)).encode() + b'"}\n'


def unseal_json(data: bytes, description: str) -> bytes:
    """Verify the digest of a sealed JSON object, and return the bytes before it.

    Raises:
        CorruptCheckpointError: The digest is missing or does not match.
    """
    seal = _SEAL_PATTERN.search(data, max(len(data) - 64, 0))
    if seal is None:
        raise CorruptCheckpointError(f"{description} is cut off: it does not end with its digest")
    body = data[: seal.start()]
    if to_hex(compute_digest(body)) != seal.group(1).decode():
        raise CorruptCheckpointError(f"{description} is damaged: its digest does not match")
    return body


def pack_digests(digests: Sequence[int]) -> str:
    """Encode digests as base64 of little-endian 64-bit numbers. The length depends only on the number of digests."""
    return base64.b64encode(struct.pack(f"<{len(digests)}Q", *digests)).decode()


def compute_packed_length(count: int) -> int:
    """Return the length of the string that `pack_digests` returns for `count` digests.

    >>> compute_packed_length(2) == len(pack_digests([1, 2]))
    True
    """
    return -(-8 * count // 3) * 4


def unpack_digests(text: str, count: int) -> tuple[int, ...]:
    """Decode `count` digests from `pack_digests` (see `unpack_digest_array`)."""
    return tuple(unpack_digest_array(text, count).tolist())


def unpack_digest_array(text: str | bytes, count: int) -> DigestArray:
    """Decode `count` digests from `pack_digests`.

    Raises:
        FormatError: The data is not base64, or contains another number of digests.
    """
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise FormatError("broken table of digests") from error
    if len(raw) != 8 * count:
        raise FormatError("table of digests of the wrong size", expected=f"{count} digests", found=f"{len(raw)} bytes")
    return np.frombuffer(raw, "<u8")


_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
"""The polynomial 1. The lowest power is in the highest bit."""


def compute_crc32(data: bytes | bytearray | memoryview) -> int:
    """Return the CRC-32 of bytes."""
    return zlib.crc32(data)


def combine_crc32(parts: Iterable[tuple[int, int]]) -> int:
    """Return the CRC-32 of concatenated bytes from (CRC-32, bytes) of each part.

    A CRC is a remainder modulo a polynomial over GF(2). Appending bytes multiplies it by a power of x, as in zlib's
    ``crc32_combine``.

    >>> combine_crc32([(compute_crc32(b"check"), 5), (compute_crc32(b"point"), 5)]) == compute_crc32(b"checkpoint")
    True
    """
    whole = 0
    for crc, nbytes in parts:
        # The factor costs as much as the CRC-32 of about 200 KiB, and the first part does not need it.
        whole = (_multiply(_compute_power(8 * nbytes), whole) if whole else 0) ^ crc
    return whole


def _multiply(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _compute_power(n: int) -> int:
    """Return x to the power `n`."""
    result, square = _ONE, _ONE >> 1
    while n:
        if n & 1:
            result = _multiply(result, square)
        square = _multiply(square, square)
        n >>= 1
    return result


ReadInto = Callable[[memoryview, int], int]
"""Function that fills memory from a file offset on, and returns the number of bytes read."""

_READ_BYTES = 1 << 20
"""Number of bytes per read."""


def check_crc32(
    read_into: ReadInto, file: str, description: str, start: int, nbytes: int, expected: int | None
) -> None:
    """Read bytes of a file, and compare them with their CRC-32, if it is known.

    Raises:
        CorruptCheckpointError: The file is too short, or the CRC-32 does not match.
    """
    buffer = memoryview(bytearray(min(_READ_BYTES, nbytes)))
    actual = 0
    for at in range(0, nbytes, len(buffer) or 1):
        part = buffer[: min(len(buffer), nbytes - at)]
        if read_into(part, start + at) < len(part):
            raise CorruptCheckpointError(f"the file ends inside of {description}", file=file)
        actual = zlib.crc32(part, actual)
    if expected is not None and actual != expected:
        raise CorruptCheckpointError(
            f"{description} is not what its CRC-32 says: stored bytes are damaged",
            file=file,
            expected=f"{expected:08x}",
            found=f"{actual:08x}",
        )
