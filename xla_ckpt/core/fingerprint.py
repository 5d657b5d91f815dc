"""Fingerprints: fast hashes that compare values in memory, such as what two ranks hold under one name.

Fingerprints do not protect stored bytes; digests do (`digest` in the manifest package). Either hash function may
change without the other. One fingerprint outlives its process: the name of an upload, by which a later process finds
what a killed one left in a bucket.
"""

from __future__ import annotations

import xxhash


def compute_fingerprint(data: bytes) -> int:
    """A number below 2**64, the same for the same bytes. Others have another one, but for one case in 2**64."""
    return xxhash.xxh3_64_intdigest(data)


def compute_text_fingerprint(text: str) -> str:
    """That of a text, as 16 hexadecimal digits.

    >>> compute_text_fingerprint("a") == compute_text_fingerprint("a")
    True
    >>> compute_text_fingerprint("a") == compute_text_fingerprint("b")
    False
    """
    return f"{compute_fingerprint(text.encode()):016x}"
