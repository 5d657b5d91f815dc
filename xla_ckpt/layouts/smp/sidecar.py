"""What this library notes beside each file of SMP's that it writes: which save the file is part of. Pure.

```
{"format": 1, "saves": [{"size": 4096, "directory": "<16 hex>", "save": "<job id>-<n>",
                         "rank": {"pp": 0, "tp": 1, "rdp": 0}, "sizes": {"pp": 1, "tp": 2, "rdp": 1}}]}
```

The name is hidden, so that SMP's own search for ``{f}_*`` does not find it. `directory` is the digest of the directory
of the zip, which has the CRC-32 of each record. Two files of one set that belong to different saves have different
`save`. An entry whose size or digest is not that of the file is one of an earlier save, or of one that was cut off
before the file got its name; if none matches, another program has written the file since.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from xla_ckpt.errors import FormatError, UnsupportedVersionError
from xla_ckpt.layouts.torch_save.zip_directory import Take, directory_at
from xla_ckpt.manifest.digest import digest, to_hex
from xla_ckpt.tree.json_object import json_value

NOTE_FORMAT = 1

MAX_NOTE = 1 << 20
"""A larger file is not read (bytes): two entries take a few hundred."""

RANK_AXES = ("pp", "tp", "rdp")
"""Keys of `rank` and `sizes`."""

_KINDS = {"size": int, "directory": str, "save": str, "rank": dict, "sizes": dict}
"""Fields of an entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveNote:
    """One save of a file.

    Raises (on construction):
        FormatError: A field is of another type, or a coordinate is missing, or is none.
    """

    size: int
    """Bytes of the file."""

    directory: str
    """Digest of its zip's directory (see `directory_digest`)."""

    save: str
    """Names the save: the files that all ranks wrote in it have the same."""

    rank: Mapping[str, int]
    """Coordinates of the rank that wrote it."""

    sizes: Mapping[str, int]
    """Number of ranks along each axis."""

    def __post_init__(self) -> None:
        sound = (
            all(type(getattr(self, field)) is kind for field, kind in _KINDS.items())
            and set(self.rank) == set(self.sizes) == set(RANK_AXES)
            and all(type(n) is int for n in (*self.rank.values(), *self.sizes.values()))
            and all(0 <= self.rank[axis] < self.sizes[axis] for axis in RANK_AXES)
        )
        if not sound:
            raise FormatError("an entry of the note beside a file is damaged", found=str(self)[:200])


def note_name(file: str) -> str:
    """The name of the file that lies beside another one.

    >>> note_name("best_partial/model_0_1.pt")
    'best_partial/.model_0_1.pt.xla_ckpt.json'
    """
    above, slash, base = file.rpartition("/")
    return f"{above}{slash}.{base}.xla_ckpt.json"


def directory_digest(take: Take, nbytes: int) -> str:
    """The digest of the directory of a zip. Where records have a CRC-32, it covers every byte of them.

    Args:
        take: Bytes of the file, from their offset and their number.

    Raises:
        ValueError: It is no whole zip.
    """
    try:
        where = directory_at(take, nbytes)
    except struct.error as error:
        raise ValueError(f"it is no whole zip: {error}") from error
    if where.offset + where.nbytes > nbytes:
        raise ValueError("it is no whole zip: its directory reaches behind its end")
    return to_hex(digest(take(where.offset, where.nbytes)))


def dump_notes(saves: Sequence[SaveNote]) -> bytes:
    """The bytes of a file.

    >>> ranks = {"rank": {"pp": 0, "tp": 0, "rdp": 0}, "sizes": {"pp": 1, "tp": 1, "rdp": 1}}
    >>> one = SaveNote(size=4096, directory="0123456789abcdef", save="job-1", **ranks)
    >>> parse_notes(dump_notes([one])) == (one,)
    True
    """
    return json.dumps({"format": NOTE_FORMAT, "saves": [asdict(one) for one in saves]}).encode() + b"\n"


def parse_notes(data: bytes) -> tuple[SaveNote, ...]:
    """The entries in these bytes, oldest first.

    Raises:
        UnsupportedVersionError: A newer version of this library wrote them.
        FormatError: They are damaged.
    """
    note = json_value(data, "the note beside a file")
    version = note.get("format") if isinstance(note, dict) else None
    if type(version) is int and version > NOTE_FORMAT:
        raise UnsupportedVersionError(
            "a newer version of this library wrote the note beside a file", expected=NOTE_FORMAT, found=version
        )
    entries: Any = note.get("saves") if version == NOTE_FORMAT else None
    if not isinstance(entries, list) or not all(
        isinstance(one, dict) and _KINDS.keys() <= one.keys() for one in entries
    ):
        raise FormatError("the note beside a file is damaged", found=str(note)[:200])
    return tuple(SaveNote(**{field: one[field] for field in _KINDS}) for one in entries)


def renewed(saves: Sequence[SaveNote], present: SaveNote | None, fresh: SaveNote) -> tuple[SaveNote, ...]:
    """The entries for a file that is about to be replaced.

    The entry of the file as it is stays: if the program ends before the new file has its name, it is the one that
    matches.

    Args:
        saves: The entries that are there.
        present: That of the file as it is; None if there is none.
        fresh: That of the new file.
    """
    kept = saves[-1:] if present is None else (present,)
    return (*(one for one in kept if one != fresh), fresh)
