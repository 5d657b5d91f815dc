"""Files that were digested as a stream: any read of them is compared with the digests of all blocks that it touches."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest

from xla_ckpt.core.manifest.manifest import FileRecord
from xla_ckpt.errors import CorruptCheckpointError, FormatError
from xla_ckpt.formats.torch_checkpointing.verified_directory import (
    REGION_BYTES,
    StreamDigester,
    VerifiedDirectory,
    verify_file,
)
from xla_ckpt.storage.base import BLOCK_BYTES, FileReader
from xla_ckpt.storage.resolve import open_store

SIZES = [0, 1, 4096, 70_001, REGION_BYTES - 1, REGION_BYTES, REGION_BYTES + 1, 2 * REGION_BYTES + 12_345]


def digested(path: Path, size: int, seed: int = 0) -> FileRecord:
    """Write a file in pieces of any size, and digest them as they come."""
    chance, digester = random.Random(seed), StreamDigester()
    data = chance.randbytes(size)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    at = 0
    while at < size:
        stop = at + chance.choice([1, 100, 65_536, 3_000_000, 2 * REGION_BYTES])
        digester.update(memoryview(data)[at:stop])
        at = stop
    return digester.record(path.name)


def directory_of(root: Path, *records: FileRecord) -> VerifiedDirectory:
    return VerifiedDirectory(open_store(root).open("tag"), {record.path: record for record in records})


def spans(size: int, seed: int) -> list[tuple[int, int]]:
    """Places in a file: of all kinds, and some beyond its end."""
    chance = random.Random(seed)
    edges = [0, 1, 4096, 65_536, REGION_BYTES - 1, REGION_BYTES, size // 2, size - 1, size]
    begins = [min(max(chance.choice(edges) + chance.choice([-1, 0, 0, 1]), 0), size) for _ in range(40)]
    return [(at, chance.choice([0, 1, 4096, 5000, 65_536, REGION_BYTES, size + 7])) for at in begins]


def read(source: FileReader, at: int, nbytes: int) -> bytes:
    buffer = bytearray(nbytes)
    return bytes(buffer[: source.read_into(memoryview(buffer), at)])


@pytest.mark.parametrize("size", SIZES)
def test_every_read_has_the_bytes_of_the_file(tmp_path: Path, size: int) -> None:
    record = digested(tmp_path / "tag/file", size)
    data = (tmp_path / "tag/file").read_bytes()
    with contextlib.closing(directory_of(tmp_path, record)) as directory:
        assert verify_file(directory, "file") == size
        with contextlib.closing(directory.open("file")) as source:
            for at, nbytes in spans(size, seed=1):
                assert read(source, at, nbytes) == data[at : at + nbytes]
            buffer, scratch = bytearray(size), bytearray(4 * BLOCK_BYTES)
            assert source.read_once(memoryview(buffer), 0, memoryview(scratch)) == size
            assert buffer == data


@pytest.mark.parametrize("size", SIZES[1:])
def test_a_changed_byte_is_found_by_each_read_that_has_it(tmp_path: Path, size: int) -> None:
    record = digested(tmp_path / "tag/file", size)
    data = bytearray((tmp_path / "tag/file").read_bytes())
    for bad in {0, size // 3, size - 1}:
        changed = bytearray(data)
        changed[bad] ^= 1
        (tmp_path / "tag/file").write_bytes(changed)
        with contextlib.closing(directory_of(tmp_path, record)) as directory:
            with pytest.raises(CorruptCheckpointError, match="damaged"):
                verify_file(directory, "file")
            with contextlib.closing(directory.open("file")) as source:
                for at, nbytes in spans(size, seed=bad):
                    if at <= bad < at + nbytes:
                        with pytest.raises(CorruptCheckpointError, match="damaged"):
                            read(source, at, nbytes)
                    else:  # it may share a block with the damage
                        with contextlib.suppress(CorruptCheckpointError):
                            assert read(source, at, nbytes) == data[at : at + nbytes]


def test_a_file_of_another_size_is_refused_and_a_lost_one_is_told(tmp_path: Path) -> None:
    record = digested(tmp_path / "tag/file", 100)
    lost = digested(tmp_path / "tag/lost", 100)
    (tmp_path / "tag/lost").unlink()
    (tmp_path / "tag/file").write_bytes(b"short")
    with contextlib.closing(directory_of(tmp_path, record, lost)) as directory:
        assert directory.list_files() == ["file", "lost"]
        with pytest.raises(CorruptCheckpointError, match="size"):
            directory.open("file")
        with pytest.raises(CorruptCheckpointError, match="missing"):
            directory.open("lost")
        with pytest.raises(FileNotFoundError):
            directory.open("stranger")


def test_a_record_with_bytes_outside_of_its_regions_is_refused(tmp_path: Path) -> None:
    record = digested(tmp_path / "tag/file", 0)
    (tmp_path / "tag/file").write_bytes(b"abc")
    outside = FileRecord(path="file", size=3, framing_bytes=3, framing_digest=record.framing_digest)
    with (
        contextlib.closing(directory_of(tmp_path, outside)) as directory,
        pytest.raises(FormatError, match="no region"),
    ):
        directory.open("file")
