"""Read and write the digest file of a directory that another library reads, and that has no manifest.

```
{"format":"xla_ckpt digests","version":1,
"files":[[".metadata",5120,5120,"<16 hex>"],["00001-of-00002.safetensors",8192,4096,"<16 hex>",[...]]],
"digest":"<16 hex>"}
```

Each entry of `files` is a file record as in a manifest: path, size, number of bytes outside all regions, their digest,
and the regions with the digests of their blocks. Every file of the directory has an entry, except this file itself. In
a DCP directory this includes `.metadata`, so that digests of an older save are not used for a newer one. `digest`
covers all preceding bytes. The other library ignores the file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from xla_ckpt.core.checksum import compute_digest, seal_json, unseal_json
from xla_ckpt.core.json_data import parse_json_object
from xla_ckpt.core.manifest.manifest import FileRecord
from xla_ckpt.core.manifest.manifest_json import dump_file_record, parse_file_record
from xla_ckpt.errors import FormatError, UnsupportedVersionError, annotate_errors
from xla_ckpt.storage.base import ReadDirectory, read_file

DIGESTS = "xla_ckpt_digests.json"
"""Name of the digest file."""

DIGESTS_FORMAT = "xla_ckpt digests"
DIGESTS_VERSION = 1

MAX_DIGESTS_BYTES = 1 << 30
"""Maximum size of a digest file (bytes)."""


def make_file_record(path: str, data: bytes) -> FileRecord:
    """Return the record of a file that is verified as a whole."""
    return FileRecord(path=path, size=len(data), framing_bytes=len(data), framing_digest=compute_digest(data))


def dump_digests(files: Sequence[FileRecord]) -> bytes:
    """Serialize the digest file. Equal records give equal bytes.

    Raises:
        FormatError: The records do not describe one directory.

    >>> parse_digests(dump_digests([make_file_record("model_0.pt", b"...")]))[0].size
    3
    """
    _check_names(files)
    lines = ",".join(json.dumps(dump_file_record(record), separators=(",", ":")) for record in files)
    body = f'{{"format":"{DIGESTS_FORMAT}","version":{DIGESTS_VERSION},\n"files":[{lines}]'.encode()
    return seal_json(body)


def parse_digests(data: bytes) -> tuple[FileRecord, ...]:
    """Parse a digest file into the records of all files of a directory.

    Raises:
        CorruptCheckpointError: The bytes are corrupt or invalid.
        UnsupportedVersionError: A newer version of this library wrote them.
    """
    what = "the list of digests"
    with annotate_errors(file=DIGESTS):
        raw = parse_json_object(unseal_json(data, what) + b"}", what)
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
            files = tuple(parse_file_record(entry) for entry in entries)
            _check_names(files)
            return files
    raise FormatError("these are no digests of xla_ckpt", file=DIGESTS, found=str(raw)[:80])


def _check_names(files: Sequence[FileRecord]) -> None:
    """Check that records can describe all files of a directory.

    Raises:
        FormatError: There are no records, duplicate paths, or a record of the digest file itself.
    """
    names = [record.path for record in files]
    if len(set(names)) != len(names):
        raise FormatError("a file has two lists of digests", found=sorted(names)[:8])
    if not names:
        raise FormatError("there is no digest of any file")
    if DIGESTS in names:
        raise FormatError("a file cannot hold its own digest", found=DIGESTS)


def read_digests(directory: ReadDirectory) -> dict[str, FileRecord]:
    """Read the records of the files in a directory, by path; empty if it has no digest file.

    Raises:
        CorruptCheckpointError: The digest file is corrupt.
        UnsupportedVersionError: A newer version of this library wrote it.
    """
    try:
        data = read_file(directory, DIGESTS, limit=MAX_DIGESTS_BYTES, what="the list of digests")
    except FileNotFoundError:
        return {}
    return {record.path: record for record in parse_digests(data)}
