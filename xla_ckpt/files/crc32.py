"""CRC-32 of bytes that are digested in parts: what a zip wants to know of each of its records."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable

from xla_ckpt.errors import CorruptCheckpointError

_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
"""The polynomial 1, lowest power in the highest bit."""


def crc32(data: bytes | bytearray | memoryview) -> int:
    """CRC-32 of some bytes."""
    return zlib.crc32(data)


def joined_crc32(parts: Iterable[tuple[int, int]]) -> int:
    """CRC-32 of bytes one after the other, from (CRC-32, bytes) of each part.

    A CRC is a remainder modulo a polynomial over GF(2): bytes that follow multiply it by a power of x, as in zlib's
    ``crc32_combine``.

    >>> joined_crc32([(crc32(b"check"), 5), (crc32(b"point"), 5)]) == crc32(b"checkpoint")
    True
    """
    whole = 0
    for crc, nbytes in parts:
        # The factor costs as much as some 200 KiB of CRC-32, and before the first part there is nothing to multiply.
        whole = (_times(_power(8 * nbytes), whole) if whole else 0) ^ crc
    return whole


def _times(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _power(n: int) -> int:
    """The power `n` of x."""
    result, square = _ONE, _ONE >> 1
    while n:
        if n & 1:
            result = _times(result, square)
        square = _times(square, square)
        n >>= 1
    return result


ReadInto = Callable[[memoryview, int], int]
"""Fills memory from an offset of a file on, and returns how many bytes there were."""

_CHUNK = 1 << 20
"""Bytes that are read at a time."""


def check_crc32(read_into: ReadInto, file: str, what: str, start: int, nbytes: int, crc: int | None) -> None:
    """Read bytes of a file, and compare them with their CRC-32, if it is known.

    Raises:
        CorruptCheckpointError: The file ends before them, or they are not what was written.
    """
    buffer = memoryview(bytearray(min(_CHUNK, nbytes)))
    actual = 0
    for at in range(0, nbytes, len(buffer) or 1):
        part = buffer[: min(len(buffer), nbytes - at)]
        if read_into(part, start + at) < len(part):
            raise CorruptCheckpointError(f"the file ends inside of {what}", file=file)
        actual = zlib.crc32(part, actual)
    if crc is not None and actual != crc:
        raise CorruptCheckpointError(
            f"{what} is not what its CRC-32 says: stored bytes are damaged",
            file=file,
            expected=f"{crc:08x}",
            found=f"{actual:08x}",
        )
