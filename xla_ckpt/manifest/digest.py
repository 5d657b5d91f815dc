"""Digests: which bytes are covered by which number.

The bytes of every stored region are cut into blocks, from the region's own start, and each block has an XXH3-64 digest.
Blocks grow with the region, so that a region has at most 64 of them up to 256 MiB: a reader that needs a part of it
verifies what it reads and reads hardly more than it needs.

A digest checks stored bytes, and nothing else: what tells two things of a running program apart is a fingerprint
(`xla_ckpt/fingerprint.py`). Which digest it is, the version of a format says that is in the file. Another digest raises
all of them: `FORMAT_VERSION` (`manifest/records.py`), `VERSION` (`manifest/parity_json.py`), `DIGESTS_VERSION`
(`layouts/digests.py`), `NOTE_FORMAT` (`layouts/smp/sidecar.py`) and `LEDGER_VERSION` (`tags/ledger_rules.py`).
"""

from __future__ import annotations

import base64
import binascii
import functools
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from xla_ckpt.errors import CorruptCheckpointError, FormatError
from xla_ckpt.sharding.corners import Ints

MIN_BLOCK = 4 * 1024
"""Smallest block (bytes)."""

MAX_BLOCK = 4 * 1024 * 1024
"""Largest block (bytes)."""


@functools.lru_cache(maxsize=4096)
def block_size(region_bytes: int) -> int:
    """Bytes of one digest block of a region: the power of two that cuts it into at most 64, within the limits.

    >>> block_size(1000), block_size(1 << 20), block_size(1 << 30)
    (4096, 16384, 4194304)
    """
    wanted = -(-region_bytes // 64)
    power = 1 << max(wanted - 1, 0).bit_length()
    return min(max(power, MIN_BLOCK), MAX_BLOCK)


_POWERS = 1 << np.arange((MIN_BLOCK - 1).bit_length(), MAX_BLOCK.bit_length())
"""The sizes that blocks have."""


def block_sizes(region_bytes: Ints) -> Ints:
    """`block_size` of many regions.

    >>> block_sizes(np.array([1000, 1 << 20, 1 << 30]))
    array([   4096,   16384, 4194304])
    """
    which = np.searchsorted(64 * _POWERS, region_bytes)
    return np.asarray(_POWERS[np.minimum(which, len(_POWERS) - 1)], np.int64)


def block_count(region_bytes: int) -> int:
    """Number of digest blocks of a region; 0 for an empty one.

    >>> block_count(0), block_count(4097)
    (0, 2)
    """
    return -(-region_bytes // block_size(region_bytes))


def digest(data: bytes | bytearray | memoryview) -> int:
    """XXH3-64 of some bytes."""
    return xxhash.xxh3_64_intdigest(data)


NO_DIGEST = digest(b"")
"""That of no bytes. It stands for the digest of a file where none is known."""


ROWS_BYTES = 256
"""Rows of fewer bytes are digested together."""


def rows_together(row_bytes: int) -> int:
    """How many rows of an array have one digest in `rows_digest`: a power of two, as most numbers of ranks are.

    >>> rows_together(2), rows_together(24), rows_together(4096)
    (128, 16, 1)
    """
    return 1 << (-(-ROWS_BYTES // max(row_bytes, 1)) - 1).bit_length()


def rows_digest(data: memoryview, row_bytes: int, first: int) -> int:
    """A digest of some rows of an array, from a row on. That of all rows is the sum of those of parts, modulo 2**64.

    Each part begins, and ends, where `rows_together` does, or at the end of the array.

    >>> data = memoryview(bytes(1024))
    >>> parts = rows_digest(data[:512], 128, 0), rows_digest(data[512:], 128, 4)
    >>> sum(parts) % 2**64 == rows_digest(data, 128, 0)
    True
    """
    together = rows_together(row_bytes)
    step, begin = together * max(row_bytes, 1), first // together
    parts = (
        xxhash.xxh3_64_intdigest(data[at : at + step], seed=begin + n) for n, at in enumerate(range(0, len(data), step))
    )
    return sum(parts) % (1 << 64)


DigestColumn = npt.NDArray[np.uint64]
"""Many digests."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """The digests of one payload file, found by where a region begins."""

    offset: Ints
    """Where each region begins in the file, ascending."""

    nbytes: Ints
    """Its size."""

    first: Ints
    """The place of its first digest."""

    digests: DigestColumn

    @classmethod
    def of_regions(cls, offset: Ints, nbytes: Ints, digests: DigestColumn) -> BlockTable:
        """The table of regions, ascending, whose digests come one after the other."""
        counts = -(-nbytes // block_sizes(nbytes))
        some = np.flatnonzero(nbytes)  # an empty region has no blocks, and begins where another one does
        return cls(offset[some], nbytes[some], (np.cumsum(counts) - counts)[some], digests)

    def of(self, offset: int, nbytes: int) -> tuple[int, ...]:
        """The digests of the blocks of the region of `nbytes` bytes at `offset`.

        Raises:
            FormatError: No such region is in the file.
        """
        (first,) = self.find(np.array([offset]), np.array([nbytes])).tolist()
        return tuple(self.digests[first : first + block_count(nbytes)].tolist())

    def find(self, offset: Ints, nbytes: Ints) -> Ints:
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
        return self.first[row]


class BlockDigester:
    """The digests of a region that comes in parts."""

    def __init__(self, region_bytes: int) -> None:
        self._block = block_size(region_bytes)
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


class JoinedDigest:
    """The digest of a block whose parts come in any order.

    >>> joined = JoinedDigest()
    >>> joined.add(1, memoryview(b"bc"))
    >>> joined.add(0, memoryview(b"a"))
    >>> joined.nbytes, joined.value == digest(b"abc")
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

    def add(self, at: int, data: memoryview) -> None:
        """Take a part, which begins `at` bytes behind the start of the block; a copy if an earlier one is missing."""
        if at != self.nbytes:
            self._early[at] = bytes(data)
            return
        self._hash.update(data)
        self.nbytes += len(data)
        while (next_part := self._early.pop(self.nbytes, None)) is not None:
            self._hash.update(next_part)
            self.nbytes += len(next_part)


def to_hex(value: int) -> str:
    """A digest as 16 hexadecimal digits."""
    return f"{value:016x}"


_SEAL = re.compile(rb',\n"digest":"([0-9a-f]{16})"}\n\Z')


def sealed(body: bytes) -> bytes:
    """A JSON object whose last member is the digest of all bytes before it; `body` is what comes before that member.

    >>> unsealed(sealed(b'{"a":1'), "the text")
    b'{"a":1'
    """
    return body + b',\n"digest":"' + to_hex(digest(body)).encode() + b'"}\n'


def unsealed(data: bytes, what: str) -> bytes:
    """What comes before the digest in such an object, compared with it.

    Raises:
        CorruptCheckpointError: It is not there, or another one.
    """
    seal = _SEAL.search(data, max(len(data) - 64, 0))
    if seal is None:
        raise CorruptCheckpointError(f"{what} is cut off: it does not end with its digest")
    body = data[: seal.start()]
    if to_hex(digest(body)) != seal.group(1).decode():
        raise CorruptCheckpointError(f"{what} is damaged: its digest does not match")
    return body


def pack_digests(digests: Sequence[int]) -> str:
    """Digests as base64 of little-endian 64-bit numbers; its length depends on their number only."""
    return base64.b64encode(struct.pack(f"<{len(digests)}Q", *digests)).decode()


def packed_length(count: int) -> int:
    """Bytes of the text that `pack_digests` makes of so many digests.

    >>> packed_length(2) == len(pack_digests([1, 2]))
    True
    """
    return -(-8 * count // 3) * 4


def unpack_digests(text: str, count: int) -> tuple[int, ...]:
    """The `count` digests that `pack_digests` wrote, as `digest_column` reads them."""
    return tuple(digest_column(text, count).tolist())


def digest_column(text: str | bytes, count: int) -> DigestColumn:
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
