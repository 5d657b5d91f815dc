"""The index of a tag's parity: digests of the blocks of all files, and of the sums over them (docs/format.md)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from xla_ckpt.errors import FormatError, UnsupportedVersionError
from xla_ckpt.manifest.digest import pack_digests, sealed, to_hex, unpack_digests, unsealed

FORMAT, VERSION = "xla_ckpt.parity", 1

MAX_PARITY_RANKS = 1 << 20
"""More ranks have never saved a tag: a reader looks at what each of them made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityFile:
    """A file that the parity covers."""

    path: str
    size: int
    digests: tuple[int, ...]
    """Digest of each of its blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityIndex:
    """What `parity/index.json` says."""

    survives: Literal["block", "file"]
    """What the tag survives: a damaged block in each file, or that and the loss of a file."""

    block: int
    """Bytes of a block."""

    writers: int
    """How many ranks made the sums, each with files of its own."""

    manifest: int
    """Digest of the tag's manifest."""

    files: Sequence[ParityFile]
    sums: tuple[int, ...]
    """Digests of the sums: of files, then of stripes."""

    def dump(self) -> bytes:
        """The file."""
        text = json.dumps(
            {
                "format": FORMAT,
                "version": VERSION,
                "survives": self.survives,
                "block": self.block,
                "writers": self.writers,
                "manifest": to_hex(self.manifest),
                "files": [[file.path, file.size, pack_digests(file.digests)] for file in self.files],
                "sums": [len(self.sums), pack_digests(self.sums)],
            },
            separators=(",", ":"),
        )[:-1].encode("ascii")
        return sealed(text)


def parse(data: bytes) -> ParityIndex:
    """The index in a file.

    Raises:
        CorruptCheckpointError: It is damaged.
        FormatError: No version of this library writes it.
        UnsupportedVersionError: A newer version wrote it.
    """
    text = unsealed(data, "the index of the parity")
    try:
        raw: dict[str, Any] = json.loads(text + b"}")
        if raw["format"] == FORMAT and raw["version"] > VERSION:
            raise UnsupportedVersionError("a newer version wrote the parity", expected=VERSION, found=raw["version"])
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
            block=raw["block"],
            writers=raw["writers"],
            manifest=int(raw["manifest"], 16),
            files=tuple(
                ParityFile(path=path, size=size, digests=tuple(unpack_digests(digests, -(-size // raw["block"]))))
                for path, size, digests in raw["files"]
            ),
            sums=tuple(unpack_digests(raw["sums"][1], raw["sums"][0])),
        )
    except (ValueError, KeyError, TypeError, ZeroDivisionError, RecursionError) as error:
        raise FormatError("the index of the parity is not one", found=str(error)) from error
    return index
