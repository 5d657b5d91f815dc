"""The file of digests in a directory without a manifest: whatever is changed in it is found."""

from __future__ import annotations

import pytest

from xla_ckpt.core.checksum import compute_digest, count_blocks, to_hex
from xla_ckpt.core.manifest.manifest import FileRecord
from xla_ckpt.errors import CheckpointError, CorruptCheckpointError, FormatError, UnsupportedVersionError
from xla_ckpt.formats.dcp.metadata import METADATA_FILE
from xla_ckpt.formats.digests import (
    DIGESTS,
    DIGESTS_VERSION,
    dump_digests,
    make_file_record,
    parse_digests,
)

PAYLOAD = FileRecord(
    path="00001-of-00001.safetensors",
    size=30_000,
    framing_bytes=20_000,
    framing_digest=7,
    regions=((4096, 9_000), (20_480, 1_000)),
    block_digests=tuple(range(count_blocks(9_000) + count_blocks(1_000))),
)
FILES = (make_file_record(METADATA_FILE, b"a pickle"), PAYLOAD, make_file_record("objects.distcp", b""))


def signed(body: bytes) -> bytes:
    return body + b',\n"digest":"' + to_hex(compute_digest(body)).encode() + b'"}\n'


def test_records_come_back() -> None:
    assert parse_digests(dump_digests(FILES)) == FILES


def test_every_flipped_byte_is_found() -> None:
    data = dump_digests(FILES)
    for i in range(len(data)):
        bad = bytearray(data)
        bad[i] ^= 1
        with pytest.raises(CorruptCheckpointError, match="digests"):
            parse_digests(bytes(bad))


def test_every_cut_is_found() -> None:
    data = dump_digests(FILES)
    for n in range(len(data)):
        with pytest.raises(CorruptCheckpointError, match="cut off"):
            parse_digests(data[:n])


@pytest.mark.parametrize(
    "body",
    [
        b"[",
        b"{}",
        b'{"format":"xla_ckpt","version":1,"files":[]',
        b'{"format":"xla_ckpt digests","version":1,"files":[]',
        b'{"format":"xla_ckpt digests","version":1,"files":[1]',
        b'{"format":"xla_ckpt digests","version":1,"files":[["../x",1,1,"0000000000000000"]]',
        b"{" + b'"a":{' * 100_000,
    ],
)
def test_content_that_makes_no_sense_is_refused(body: bytes) -> None:
    with pytest.raises(FormatError):
        parse_digests(signed(body))


def test_a_newer_version_is_refused() -> None:
    text = f'"version":{DIGESTS_VERSION}'.encode()
    with pytest.raises(UnsupportedVersionError):
        parse_digests(signed(dump_digests(FILES)[: -len(signed(b""))].replace(text, b'"version":99')))


@pytest.mark.parametrize(
    "files",
    [(), (*FILES, PAYLOAD), (*FILES, make_file_record(DIGESTS, b""))],
    ids=["no file", "a file twice", "itself"],
)
def test_records_of_no_directory_are_refused(files: tuple[FileRecord, ...]) -> None:
    with pytest.raises(CheckpointError):
        dump_digests(files)
