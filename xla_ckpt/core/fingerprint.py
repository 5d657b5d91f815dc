"""Fingerprints: fast hashes to compare values in memory, such as the replicas of an array on two ranks.

Fingerprints do not protect stored bytes: checksums do (`xla_ckpt.core.checksum`). Either hash function may change
independently of the other. One fingerprint outlives its process: the name of an upload, by which a later process finds
the leftovers of a killed one in a bucket.
"""

from __future__ import annotations

import xxhash


def compute_fingerprint(data: bytes) -> int:
    """Return a hash below 2**64. Equal bytes have equal hashes, and different bytes collide with probability 2**-64."""
    return xxhash.xxh3_64_intdigest(data)


def compute_text_fingerprint(text: str) -> str:
    """Return the fingerprint of a string as 16 hexadecimal digits.

    >>> compute_text_fingerprint("a") == compute_text_fingerprint("a")
    True
    >>> compute_text_fingerprint("a") == compute_text_fingerprint("b")
    False
    """
    return f"{compute_fingerprint(text.encode()):016x}"
