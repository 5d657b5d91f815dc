"""The digests of a directory that another library reads, and that has no manifest: a file which that library ignores.

```
{"format":"xla_ckpt digests","version":1,
"files":[[".metadata",5120,5120,"<16 hex>"],["00001-of-00002.safetensors",8192,4096,"<16 hex>",[...]]],
"digest":"<16 hex>"}
```

Each entry of `files` is a file record as in a manifest: path, size, bytes outside of all regions, their digest, and the
regions with the digests of their blocks. Every file of the directory has one but this file itself. In a directory of
DCP's `.metadata` is among them, so that digests of an older save are not taken for those of this one. `digest` covers
all bytes before it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from xla_ckpt.errors import FormatError, UnsupportedVersionError, naming
from xla_ckpt.manifest.digest import digest, sealed, unsealed
from xla_ckpt.manifest.manifest_json import file_json, parse_file
from xla_ckpt.manifest.records import FileRecord
from xla_ckpt.storage.base import ReadDirectory
from xla_ckpt.storage.small_files import read_whole
from xla_ckpt.tree.json_object import json_object

DIGESTS = "xla_ckpt_digests.json"
"""Name of the file."""

DIGESTS_FORMAT = "xla_ckpt digests"
DIGESTS_VERSION = 1

MAX_DIGESTS = 1 << 30
"""A larger file is not read (bytes)."""


def record_of(path: str, data: bytes) -> FileRecord:
    """The record of a file that is verified as a whole."""
    return FileRecord(path=path, size=len(data), head=len(data), digest=digest(data))


def dump_digests(files: Sequence[FileRecord]) -> bytes:
    """The bytes of the file: equal records give equal bytes.

    Raises:
        FormatError: The records are not those of one directory.

    >>> parse_digests(dump_digests([record_of("model_0.pt", b"...")]))[0].size
    3
    """
    _check_names(files)
    lines = ",".join(json.dumps(file_json(record), separators=(",", ":")) for record in files)
    body = f'{{"format":"{DIGESTS_FORMAT}","version":{DIGESTS_VERSION},\n"files":[{lines}]'.encode()
    return sealed(body)


def parse_digests(data: bytes) -> tuple[FileRecord, ...]:
    """The records of all files of a directory, from the bytes of the file.

    Raises:
        CorruptCheckpointError: They are damaged, or make no sense.
        UnsupportedVersionError: A newer version of this library wrote them.
    """
    what = "the list of digests"
    with naming(file=DIGESTS):
        raw = json_object(unsealed(data, what) + b"}", what)
    match raw:
        case {"format": str(name), "version": int(version), "files": list(entries)} if name == DIGESTS_FORMAT:
            if version > DIGESTS_VERSION:
                raise UnsupportedVersionError(
                    "the digests were written by a newer version of this library",
                    file=DIGESTS,
                    expected=f"version {DIGESTS_VERSION} or older",
                    found=version,
                    hint="Install a newer xla_ckpt.",
                )
            files = tuple(parse_file(entry) for entry in entries)
            _check_names(files)
            return files
    raise FormatError("these are no digests of xla_ckpt", file=DIGESTS, found=str(raw)[:80])


def _check_names(files: Sequence[FileRecord]) -> None:
    """Refuse records that are not those of all files of a directory."""
    names = [record.path for record in files]
    if len(set(names)) != len(names):
        raise FormatError("a file has two lists of digests", found=sorted(names)[:8])
    if not names:
        raise FormatError("there is no digest of any file")
    if DIGESTS in names:
        raise FormatError("a file cannot hold its own digest", found=DIGESTS)


def records_in(directory: ReadDirectory) -> dict[str, FileRecord]:
    """The records of a directory's files, by path; none where it has no digests.

    Raises:
        CorruptCheckpointError: The digests are damaged.
        UnsupportedVersionError: A newer version of this library wrote them.
    """
    try:
        data = read_whole(directory, DIGESTS, limit=MAX_DIGESTS, what="the list of digests")
    except FileNotFoundError:
        return {}
    return {record.path: record for record in parse_digests(data)}
