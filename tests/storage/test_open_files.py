"""Files that are read stay open only as long as there is room, and whoever reads them does not notice."""

from __future__ import annotations

import os
import resource
import signal
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

import xla_ckpt
from tests.jobs import run_alone
from xla_ckpt.storage.local import LocalDirectory
from xla_ckpt.storage.local_file import DIRECT_IO_MIN_BYTES, IDLE_FILES, LocalFileReader, open_descriptor


def read(source: LocalFileReader, nbytes: int = 3, offset: int = 0) -> bytes:
    data = bytearray(nbytes)
    return bytes(data[: source.read_into(memoryview(data), offset)])


@pytest.fixture
def source(tmp_path: Path) -> LocalFileReader:
    """A file that is not open any more, although nobody has closed it."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d/f").write_bytes(b"abc")
    source = LocalDirectory(tmp_path / "d").open("f")
    IDLE_FILES.suspend(0)
    return source


def test_it_is_opened_again(source: LocalFileReader) -> None:
    assert read(source) == b"abc"
    IDLE_FILES.suspend(0)
    assert read(source) == b"abc"


def test_its_directory_may_be_closed_or_moved(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/f").write_bytes(b"abc")
    directory = LocalDirectory(tmp_path / "d")
    source = directory.open("f")
    directory.close()
    (tmp_path / "d").rename(tmp_path / "e")
    (tmp_path / "d").mkdir()
    (tmp_path / "d/f").write_bytes(b"xyz")
    IDLE_FILES.suspend(0)
    assert read(source) == b"abc"


def test_a_file_that_was_replaced_is_not_taken_for_it(source: LocalFileReader, tmp_path: Path) -> None:
    (tmp_path / "new").write_bytes(b"xyz")
    (tmp_path / "new").rename(tmp_path / "d/f")
    with pytest.raises(xla_ckpt.ChangedTagError, match="replaced while it was being read.*file f"):
        read(source)


def test_a_file_that_is_gone_is_missing(source: LocalFileReader, tmp_path: Path) -> None:
    (tmp_path / "d/f").unlink()
    with pytest.raises(FileNotFoundError):
        read(source)


def test_a_closed_file_stays_closed(source: LocalFileReader) -> None:
    source.close()
    with pytest.raises(OSError, match="closed"):
        read(source)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def by_many_threads(path: Path) -> None:
    """Read many files at once, far more than may be open: large ones, too, which take several descriptors."""
    count, sizes = 200, (7, DIRECT_IO_MIN_BYTES + 5)
    for i in range(count):
        (path / str(i)).write_bytes(bytes([i]) * sizes[i % 20 == 0])
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 80
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    directory, before = LocalDirectory(path), descriptors()
    sources = [directory.open(str(i)) for i in range(count)]
    most = before + 1 + 3 * (limit // 8)
    assert descriptors() <= most

    def check(turn: int) -> None:
        i = turn * 7 % count
        scratch = memoryview(bytearray(1 << 16))
        data = memoryview(bytearray(sources[i].size))
        assert sources[i].read_once(data, 0, scratch) == len(data)
        assert bytes(data) == bytes([i]) * len(data)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(check, range(3 * count)))
    assert descriptors() <= most
    for source in sources:
        source.close()
    directory.close()
    assert descriptors() <= before


def test_many_threads_read_more_files_than_may_be_open(tmp_path: Path) -> None:
    run_alone(by_many_threads, tmp_path)


def room_is_made(path: Path) -> None:
    (path / "f").write_bytes(b"abc")
    with ExitStack() as stack:
        sources = [LocalDirectory(path).open("f") for _ in range(5)]
        limit = max(map(int, os.listdir("/proc/self/fd"))) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        for _ in range(3):  # the program's own files have taken what there is
            stack.callback(os.close, open_descriptor(str(path / "f"), os.O_RDONLY))
        assert [read(source) for source in sources] == [b"abc"] * 5


def test_idle_files_make_room_for_others(tmp_path: Path) -> None:
    run_alone(room_is_made, tmp_path)


def test_a_fork_finds_no_lock_held(tmp_path: Path) -> None:
    """A thread that the child does not have may be between two steps."""
    (tmp_path / "f").write_bytes(b"abc")
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with IDLE_FILES._lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    with warnings.catch_warnings():  # of jax, which another test may have loaded
        warnings.simplefilter("ignore", RuntimeWarning)
        pid = os.fork()
    if not pid:
        try:
            signal.alarm(20)  # a lock that nobody gives back ends it
            os._exit(0 if read(LocalDirectory(tmp_path).open("f")) == b"abc" else 1)
        finally:
            os._exit(2)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
