"""Checksums: XXH3-64 digests of blocks and rows, sealed JSON, and CRC-32.

Every stored region is cut into blocks from its start, and each block has an XXH3-64 digest. Blocks grow with the
region, so that a region has at most 64 of them up to 256 MiB: a reader of a part verifies what it reads, and reads
little more than it needs. CRC-32 is what zip files store.

A digest verifies stored bytes only. To distinguish objects of a running program, use a fingerprint. The format version
in a file says which digest it uses, so another digest raises all versions: those of manifests, parity, digest files of
foreign formats, SMP sidecars and ledgers.
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
"""Smallest block (bytes)."""

MAX_BLOCK = 4 * 1024 * 1024
"""Largest block (bytes)."""


@functools.lru_cache(maxsize=4096)
def compute_block_size(region_bytes: int) -> int:
    """Bytes of one digest block of a region: the power of two that cuts it into at most 64, within the limits.

    >>> compute_block_size(1000), compute_block_size(1 << 20), compute_block_size(1 << 30)
    (4096, 16384, 4194304)
    """
    wanted = -(-region_bytes // 64)
    power = 1 << max(wanted - 1, 0).bit_length()
    return min(max(power, MIN_BLOCK), MAX_BLOCK)


_BLOCK_SIZES = 1 << np.arange((MIN_BLOCK - 1).bit_length(), MAX_BLOCK.bit_length())
"""The sizes that blocks have."""


def compute_block_sizes(region_bytes: IntArray) -> IntArray:
    """`compute_block_size` of many regions.

    >>> compute_block_sizes(np.array([1000, 1 << 20, 1 << 30]))
    array([   4096,   16384, 4194304])
    """
    which = np.searchsorted(64 * _BLOCK_SIZES, region_bytes)
    return np.asarray(_BLOCK_SIZES[np.minimum(which, len(_BLOCK_SIZES) - 1)], np.int64)


def count_blocks(region_bytes: int) -> int:
    """Number of digest blocks of a region; 0 for an empty one.

    >>> count_blocks(0), count_blocks(4097)
    (0, 2)
    """
    return -(-region_bytes // compute_block_size(region_bytes))


def compute_digest(data: bytes | bytearray | memoryview) -> int:
    """XXH3-64 of some bytes."""
    return xxhash.xxh3_64_intdigest(data)


EMPTY_DIGEST = compute_digest(b"")
"""That of no bytes. It stands for the digest of a file where none is known."""


MIN_ROWS_BYTES = 256
"""Rows of fewer bytes are digested together."""


def count_rows_per_digest(row_bytes: int) -> int:
    """How many rows of an array have one digest in `compute_rows_digest`: a power of two, as most numbers of ranks are.

    >>> count_rows_per_digest(2), count_rows_per_digest(24), count_rows_per_digest(4096)
    (128, 16, 1)
    """
    return 1 << (-(-MIN_ROWS_BYTES // max(row_bytes, 1)) - 1).bit_length()


def compute_rows_digest(data: memoryview, row_bytes: int, first_row: int) -> int:
    """A digest of some rows of an array, from a row on. That of all rows is the sum of those of parts, modulo 2**64.

    Each part begins, and ends, where `count_rows_per_digest` does, or at the end of the array.

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
"""Many digests."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """The digests of one payload file, found by where a region begins."""

    offset: IntArray
    """Where each region begins in the file, ascending."""

    nbytes: IntArray
    """Its size."""

    first_digest: IntArray
    """The place of its first digest."""

    digests: DigestArray

    @classmethod
    def from_regions(cls, offset: IntArray, nbytes: IntArray, digests: DigestArray) -> BlockTable:
        """The table of regions, ascending, whose digests come one after the other."""
        counts = -(-nbytes // compute_block_sizes(nbytes))
        some = np.flatnonzero(nbytes)  # an empty region has no blocks, and begins where another one does
        return cls(offset[some], nbytes[some], (np.cumsum(counts) - counts)[some], digests)

    def get_digests(self, offset: int, nbytes: int) -> tuple[int, ...]:
        """The digests of the blocks of the region of `nbytes` bytes at `offset`.

        Raises:
            FormatError: No such region is in the file.
        """
        (first,) = self.find_first_digests(np.array([offset]), np.array([nbytes])).tolist()
        return tuple(self.digests[first : first + count_blocks(nbytes)].tolist())

    def find_first_digests(self, offset: IntArray, nbytes: IntArray) -> IntArray:
        """The places of the first digests of some regions.

        Raises:
            FormatError: One of them is not in the file.
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
    """The digests of a region that comes in parts."""

    def __init__(self, region_bytes: int) -> None:
        self._block = compute_block_size(region_bytes)
        self._left = region_bytes
        self._room = self._block
        self._hash = xxhash.xxh3_64()
        self.digests: list[int] = []
        """The digests of the blocks that are complete: of all blocks, once all bytes have come."""

    def update(self, data: memoryview) -> None:
        """Take the next bytes."""
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
    """The digest of a block whose parts come in any order.

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
        """Bytes that are digested: all from the start of the block to the first that has not come."""

    @property
    def value(self) -> int:
        """The digest of these bytes."""
        return self._hash.intdigest()

    def add(self, offset: int, data: memoryview) -> None:
        """Take a part, which begins `offset` bytes behind the start of the block; a copy if an earlier one is
        missing.
        """
        if offset != self.nbytes:
            self._early[offset] = bytes(data)
            return
        self._hash.update(data)
        self.nbytes += len(data)
        while (next_part := self._early.pop(self.nbytes, None)) is not None:
            self._hash.update(next_part)
            self.nbytes += len(next_part)


def to_hex(value: int) -> str:
    """A digest as 16 hexadecimal digits."""
    return f"{value:016x}"


_SEAL_PATTERN = re.compile(rb',\n"digest":"([0-9a-f]{16})"}\n\Z')


def seal_json(body: bytes) -> bytes:
    """A JSON object whose last member is the digest of all bytes before it; `body` is what comes before that member.

    >>> unseal_json(seal_json(b'{"a":1'), "the text")
    b'{"a":1'
    """
    return body + b',\n"digest":"' + to_hex(compute_digest(body)).encode() + b'"}\n'


def unseal_json(data: bytes, description: str) -> bytes:
    """What comes before the digest in such an object, compared with it.

    Raises:
        CorruptCheckpointError: It is not there, or another one.
    """
    seal = _SEAL_PATTERN.search(data, max(len(data) - 64, 0))
    if seal is None:
        raise CorruptCheckpointError(f"{description} is cut off: it does not end with its digest")
    body = data[: seal.start()]
    if to_hex(compute_digest(body)) != seal.group(1).decode():
        raise CorruptCheckpointError(f"{description} is damaged: its digest does not match")
    return body


def pack_digests(digests: Sequence[int]) -> str:
    """Digests as base64 of little-endian 64-bit numbers; its length depends on their number only."""
    return base64.b64encode(struct.pack(f"<{len(digests)}Q", *digests)).decode()


def compute_packed_length(count: int) -> int:
    """Bytes of the text that `pack_digests` makes of so many digests.

    >>> compute_packed_length(2) == len(pack_digests([1, 2]))
    True
    """
    return -(-8 * count // 3) * 4


def unpack_digests(text: str, count: int) -> tuple[int, ...]:
    """The `count` digests that `pack_digests` wrote, as `unpack_digest_array` reads them."""
    return tuple(unpack_digest_array(text, count).tolist())


def unpack_digest_array(text: str | bytes, count: int) -> DigestArray:
    """The `count` digests that `pack_digests` wrote.

    Raises:
        FormatError: Not base64, or another number of digests.
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
"""The polynomial 1, lowest power in the highest bit."""


def compute_crc32(data: bytes | bytearray | memoryview) -> int:
    """CRC-32 of some bytes."""
    return zlib.crc32(data)


def combine_crc32(parts: Iterable[tuple[int, int]]) -> int:
    """CRC-32 of bytes one after the other, from (CRC-32, bytes) of each part.

    A CRC is a remainder modulo a polynomial over GF(2): bytes that follow multiply it by a power of x, as in zlib's
    ``crc32_combine``.

    >>> combine_crc32([(compute_crc32(b"check"), 5), (compute_crc32(b"point"), 5)]) == compute_crc32(b"checkpoint")
    True
    """
    whole = 0
    for crc, nbytes in parts:
        # The factor costs as much as some 200 KiB of CRC-32, and before the first part there is nothing to multiply.
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
    """The power `n` of x."""
    result, square = _ONE, _ONE >> 1
    while n:
        if n & 1:
            result = _multiply(result, square)
        square = _multiply(square, square)
        n >>= 1
    return result


ReadInto = Callable[[memoryview, int], int]
"""Fills memory from an offset of a file on, and returns how many bytes there were."""

_READ_BYTES = 1 << 20
"""Bytes that are read at a time."""


def check_crc32(
    read_into: ReadInto, file: str, description: str, start: int, nbytes: int, expected: int | None
) -> None:
    """Read bytes of a file, and compare them with their CRC-32, if it is known.

    Raises:
        CorruptCheckpointError: The file ends before them, or they are not what was written.
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
