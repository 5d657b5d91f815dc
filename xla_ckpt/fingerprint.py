"""Fingerprints: by which a running program tells two things apart, such as what two ranks hold under one name.

They are compared with other fingerprints, and check no stored byte: that is done by the digest of
`xla_ckpt/manifest/digest.py`. Either function may become another one without the other. One fingerprint outlives its
program: the name of an upload (`tags/upload_rules.py`), by which a later one finds what a killed one left in a bucket.
"""

from __future__ import annotations

import xxhash


def fingerprint(data: bytes) -> int:
    """A number below 2**64, the same for the same bytes. Others have another one, but for one case in 2**64."""
    return xxhash.xxh3_64_intdigest(data)


def text_fingerprint(text: str) -> str:
    """That of a text, as 16 hexadecimal digits.

    >>> text_fingerprint("a") == text_fingerprint("a"), text_fingerprint("a") == text_fingerprint("b")
    (True, False)
    """
    return f"{fingerprint(text.encode()):016x}"
