"""The contract that every storage keeps, checked through the file system where there is one."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from tests.memory import MemoryDirectory
from xla_ckpt.storage.base import BLOCK_BYTES, Directory, write_file
from xla_ckpt.storage.local import LocalDirectory
from xla_ckpt.storage.local_file import LocalFileWriter


def aligned(data: bytes) -> memoryview:
    buffer = mmap.mmap(-1, -(-max(len(data), 1) // BLOCK_BYTES) * BLOCK_BYTES)
    buffer[: len(data)] = data
    return memoryview(buffer)


@pytest.fixture(params=["memory", "local"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Directory:
    return MemoryDirectory() if request.param == "memory" else LocalDirectory(tmp_path)


def read(directory: Directory, path: str) -> bytes:
    source = directory.open(path)
    data = bytearray(source.size)
    assert source.read_into(memoryview(data), 0) == source.size
    source.close()
    return bytes(data)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, (1 << 20) - 1, 1 << 20, (3 << 20) + 5])
def test_what_is_written_is_read(directory: Directory, size: int) -> None:
    data = os.urandom(size)
    sink = directory.create("a/b/file", size)
    half = size // 2 // BLOCK_BYTES * BLOCK_BYTES
    sink.write(aligned(data[half:]), size - half, half)  # in any order
    sink.write(aligned(data[:half]), half, 0)
    sink.commit()
    directory.sync()
    assert read(directory, "a/b/file") == data
    assert directory.list_files() == ["a/b/file"]
    source = directory.open("a/b/file")
    assert source.size == size
    part = bytearray(10)
    got = source.read_into(memoryview(part), max(size - 4, 0))
    assert bytes(part[:got]) == data[max(size - 4, 0) :][:10]


def test_a_file_is_not_created_twice(directory: Directory) -> None:
    directory.create("f", 1).commit()
    if isinstance(directory, LocalDirectory):  # an object store is not asked
        with pytest.raises(FileExistsError):
            directory.create("f", 1)
    with pytest.raises(FileNotFoundError):
        directory.open("g")


def test_a_directory_stays_itself_when_it_is_renamed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    held = LocalDirectory(tmp_path / "a")
    write_file(held, "f", b"old")
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/f").write_bytes(b"new")
    assert read(held, "f") == b"old"
    write_file(held, "sub/g", b"more")
    held.sync()
    assert (tmp_path / "b/sub/g").read_bytes() == b"more"


def test_links_and_special_files_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"secret")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    directory = LocalDirectory(tmp_path)
    with pytest.raises(OSError, match="found a link"):
        directory.open("link")
    with pytest.raises(FileExistsError):
        directory.create("link", 3)
    (tmp_path / "sub").mkdir()
    with pytest.raises(OSError, match="not a regular file"):
        directory.open("sub")


def test_large_files_bypass_the_page_cache_where_they_can(tmp_path: Path) -> None:
    directory = LocalDirectory(tmp_path)
    sink = directory.create("big", 4 << 20)
    assert isinstance(sink, LocalFileWriter)
    assert sink.direct == _direct_works(tmp_path)
    sink.abort()


def _direct_works(path: Path) -> bool:
    try:
        fd = os.open(path / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
    except OSError:
        return False
    os.close(fd)
    return True


def test_a_file_system_without_direct_io(tmp_path: Path) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        pytest.skip("no /dev/shm here: the buffered path has no file system to be tested on")
    root = shm / f"xla_ckpt-test-{os.getpid()}"
    root.mkdir()
    try:
        directory = LocalDirectory(root)
        data = os.urandom((2 << 20) + 77)
        sink = directory.create("f", len(data))
        sink.write(aligned(data), len(data), 0)
        sink.commit()
        assert read(directory, "f") == data
    finally:
        (root / "f").unlink(missing_ok=True)
        root.rmdir()


def test_every_directory_is_durable_before_the_one_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many are synced at a time, each once; after a failure, all of them again."""
    directory, synced, fails = LocalDirectory(tmp_path), list[int](), [False]
    fsync = os.fsync

    def noted(fd: int) -> None:
        if fails[0]:
            raise OSError(5, "Input/output error")
        fsync(fd)
        synced.append(os.fstat(fd).st_ino)

    for i in range(30):
        write_file(directory, f"a/{i}/f", b"x")
    monkeypatch.setattr(os, "fsync", noted)
    fails[0] = True
    with pytest.raises(OSError, match="Input/output error"):
        directory.sync()
    fails[0] = False
    directory.sync()
    inner = {(tmp_path / f"a/{i}").stat().st_ino for i in range(30)}
    assert set(synced[:30]) == inner
    assert synced[30:] == [(tmp_path / "a").stat().st_ino, tmp_path.stat().st_ino]
    directory.sync()
    assert synced[32:] == [tmp_path.stat().st_ino]
    (tmp_path / "a/3/f").unlink()
    directory.create("a/3/f", 0).abort()
    directory.sync()
    assert (tmp_path / "a/3").stat().st_ino in synced[33:]
