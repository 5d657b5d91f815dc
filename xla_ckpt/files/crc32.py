"""CRC-32 of bytes that are digested in parts: what a zip wants to know of each of its records."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

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
        whole = _times(_power(8 * nbytes), whole) ^ crc
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
