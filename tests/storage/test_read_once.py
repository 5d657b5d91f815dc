"""Reading once: around the page cache what is not in it, the same bytes in any case."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from xla_ckpt.storage import local_file
from xla_ckpt.storage.base import BLOCK_BYTES, FileReader
from xla_ckpt.storage.local import LocalDirectory
from xla_ckpt.storage.local_file import CACHED_READS_VARIABLE, DIRECT_IO_MIN_BYTES

SIZE = DIRECT_IO_MIN_BYTES + 3 * BLOCK_BYTES + 77


def evict(path: Path) -> None:
    """Drop a file from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_pages(path: Path) -> int:
    """How many pages of a file are in the page cache."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        whole = np.frombuffer(pages, np.uint8)
        held = (ctypes.c_ubyte * -(-len(whole) // mmap.PAGESIZE))()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(whole.ctypes.data), ctypes.c_size_t(len(whole)), held) == 0
        del whole
        return sum(page & 1 for page in held)


def read_once(source: FileReader, offset: int, nbytes: int, scratch: int) -> bytes:
    into = bytearray(nbytes)
    got = source.read_once(memoryview(into), offset, memoryview(mmap.mmap(-1, scratch)))
    return bytes(into[:got])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    evict(path)
    if cached_pages(path):
        pytest.skip("this file system does not drop what it has cached")
    return path


@pytest.mark.parametrize("scratch", [2 * BLOCK_BYTES, 16 * BLOCK_BYTES, 512 * BLOCK_BYTES])
@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(0, SIZE), (0, 1), (5, BLOCK_BYTES), (BLOCK_BYTES - 1, 2), (77, 20 * BLOCK_BYTES + 3), (SIZE - 9, 9),
     (SIZE - BLOCK_BYTES, 2 * BLOCK_BYTES), (SIZE, 10), (SIZE + BLOCK_BYTES, 10), (3, 0)],
)  # fmt: skip
def test_any_range_is_read(file: Path, offset: int, nbytes: int, scratch: int) -> None:
    directory = LocalDirectory(file.parent)
    source = directory.open("file")
    found = read_once(source, offset, nbytes, scratch)
    untouched = cached_pages(file)
    assert found == file.read_bytes()[offset : offset + nbytes]
    if source._get_direct_fd() >= 0:  # type: ignore[attr-defined]  # what this is about: the page cache was left alone
        assert untouched <= 1, "the end of a file may come through the page cache"
    source.close()


def test_what_is_in_the_page_cache_comes_from_there(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = file.read_bytes()
    source = LocalDirectory(file.parent).open("file")
    direct = source._get_direct_fd()  # type: ignore[attr-defined]
    asked, preadv = [], os.preadv

    def counting(fd: int, *rest: object) -> int:
        asked.append(fd)
        return preadv(fd, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", counting)
    assert read_once(source, 0, SIZE, 16 * BLOCK_BYTES) == data
    assert direct not in asked


def test_it_can_be_switched_off(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHED_READS_VARIABLE, "1")
    source = LocalDirectory(file.parent).open("file")
    found = read_once(source, 0, SIZE, 16 * BLOCK_BYTES)
    assert cached_pages(file) > SIZE // mmap.PAGESIZE
    assert found == file.read_bytes()


@pytest.mark.parametrize("refuses", ["to open", "to read"])
def test_a_file_system_without_direct_reads(file: Path, refuses: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = local_file.os.open, local_file.os.preadv
    direct: set[int] = set()

    def opening(path: str, flags: int, *rest: int, **named: int) -> int:
        if flags & os.O_DIRECT and refuses == "to open":
            raise OSError(22, "no direct I/O here")
        fd = real[0](path, flags, *rest, **named)
        if flags & os.O_DIRECT:
            direct.add(fd)
        return fd

    def reading(fd: int, *rest: object) -> int:
        if fd in direct:
            raise OSError(22, "no direct I/O here")
        return real[1](fd, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "preadv", reading)
    source = LocalDirectory(file.parent).open("file")
    assert read_once(source, 5, SIZE, 16 * BLOCK_BYTES) == file.read_bytes()[5:]


def test_an_error_of_the_disk_is_raised(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = LocalDirectory(file.parent).open("file")
    if source._get_direct_fd() < 0:  # type: ignore[attr-defined]
        pytest.skip("this file system has no direct I/O")

    def failing(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(OSError, match="Input/output"):
        read_once(source, 0, SIZE, 16 * BLOCK_BYTES)


def test_no_descriptor_is_left(file: Path) -> None:
    directory = LocalDirectory(file.parent)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        source = directory.open("file")
        read_once(source, 0, SIZE, 16 * BLOCK_BYTES)
        source.close()
    assert len(os.listdir("/proc/self/fd")) == before
