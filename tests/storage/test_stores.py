"""The contract of a store and its directories, method by method: over a file system, and over memory."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from xla_ckpt.errors import NotAFileError, UsageError
from xla_ckpt.storage.base import Store, read_whole, write_small
from xla_ckpt.storage.door import above, full_path, same_directory, store_at


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a root directory that does not exist yet, inside of another one."""
    return str(tmp_path / "ckpt/run") if request.param == "local" else f"memory://{tmp_path.name}/ckpt/run"


@pytest.fixture
def store(root: str) -> Store:
    made = store_at(root)
    made.prepare()
    return made


def fill(store: Store, name: str, *files: str) -> None:
    directory = store.make(name)
    for path in files:
        write_small(directory, path, path.encode())
    directory.sync()
    directory.close()


def test_a_root_that_is_absent(root: str) -> None:
    store = store_at(root)
    assert store.path == root
    assert (store.names(), store.has(""), store.is_directory(""), store.has("a")) == ([], False, False, False)
    with pytest.raises(FileNotFoundError):
        store.make("a")
    with pytest.raises(FileNotFoundError):
        store.open("a")
    store.prepare()
    store.prepare()
    assert (store.names(), store.has(""), store.is_directory("")) == ([], True, True)
    assert above(root)[0].names() == ["run"]


def test_a_root_that_is_a_file(store: Store, root: str) -> None:
    fill(store, "a", "file")
    file = store_at(f"{root}/a/file")
    assert (file.has(""), file.is_directory("")) == (True, False)
    with pytest.raises(NotADirectoryError):
        file.names()
    with pytest.raises(OSError, match="EXIST|exists|ENOTDIR"):
        file.prepare()


def test_names_and_what_they_are(store: Store) -> None:
    fill(store, "b")
    fill(store, "a", "x", "sub/y", "sub/deep/z")
    assert store.names() == ["a", "b"]
    assert store.names("a") == ["sub", "x"]
    assert store.names("a/sub") == ["deep", "y"]
    assert store.names("a/x") == store.names("c") == store.names("a/x/y") == store.names("b") == []
    for path, there, folder in (
        ("a", True, True), ("a/sub", True, True), ("a/sub/deep", True, True), ("a/x", True, False),
        ("a/sub/y", True, False), ("c", False, False), ("a/c", False, False), ("a/x/y", False, False),
    ):  # fmt: skip
        assert (store.has(path), store.is_directory(path)) == (there, folder), path


def test_the_start_of_a_file(store: Store) -> None:
    fill(store, "a", "sub/file")
    assert store.start_of("a/sub/file", 3) == b"sub"
    assert store.start_of("a/sub/file", 100) == b"sub/file"
    for path, error in (
        ("a/none", FileNotFoundError), ("none/file", FileNotFoundError), ("a/sub", NotAFileError),
        ("a/sub/file/x", NotADirectoryError),
    ):  # fmt: skip
        with pytest.raises(error):
            store.start_of(path, 3)


def test_when_something_changed(store: Store) -> None:
    before = time.time_ns() - 10_000_000_000
    fill(store, "a", "x")
    for path in ("", "a", "a/x"):
        changed = store.modified(path)
        assert changed is not None
        assert before < changed < time.time_ns() + 10_000_000_000
    assert store.modified("b") is store.modified("a/b") is store.modified("a/x/y") is None


def test_directories_are_made_once(store: Store) -> None:
    directory = store.make("a")
    assert directory.name == "a"
    with pytest.raises(FileExistsError):
        store.make("a")
    directory.close()
    store.make("a/sub").close()
    assert store.is_directory("a/sub")
    with pytest.raises(FileNotFoundError):
        store.make("none/sub")
    with pytest.raises(FileNotFoundError):
        store.open("none")
    fill(store, "b", "file")
    with pytest.raises(NotADirectoryError):
        store.open("b/file")


def test_only_what_is_empty_is_removed_as_empty(store: Store) -> None:
    fill(store, "a", "file")
    store.make("b").close()
    assert [store.remove_empty(name) for name in "ab"] == [False, True]
    assert (store.names(), store.names("a")) == (["a"], ["file"])
    with pytest.raises(FileNotFoundError):
        store.remove_empty("b")
    with pytest.raises(NotADirectoryError):
        store.remove_empty("a/file")


def test_where_a_directory_is_now(store: Store) -> None:
    fill(store, "a", "file")
    fill(store, "b")
    made, read = store.make("c"), store.open("a")
    assert [directory.is_at(directory.name) for directory in (made, read)] == [True, True]
    store.rename("c", "d")
    store.rename("a", "c")
    assert [directory.is_at(directory.name) for directory in (made, read)] == [False, False]
    assert (made.is_at("d"), read.is_at("c"), read.is_at("d"), read.is_at("none")) == (True, True, False, False)
    store.rename("b", "a")
    assert not read.is_at("a"), "another one has its name"
    assert read_whole(read, "file") == b"file"
    store.remove("c")
    assert not read.is_at("c")
    for directory in (made, read):
        directory.close()


def test_files_of_a_directory(store: Store) -> None:
    directory = store.make("a")
    sink = directory.create("sub/deep/file", 6)
    sink.patch(b"def", 3)
    sink.patch(b"abc", 0)
    sink.commit()
    sink.abandon()
    write_small(directory, "empty", b"")
    with pytest.raises(FileExistsError):
        directory.create("sub/deep/file", 6)
    for path, error in (("none", FileNotFoundError), ("empty/x", NotADirectoryError)):
        with pytest.raises(error):
            directory.open(path)
    with pytest.raises(OSError, match="not a regular file"):
        directory.open("sub")
    with pytest.raises(NotADirectoryError):
        directory.create("empty/x", 1)
    directory.make("sub/bare/deep")
    directory.make("sub/bare/deep")
    with pytest.raises((NotADirectoryError, FileExistsError)):
        directory.make("empty/x")
    assert store.is_directory("a/sub/bare/deep")
    assert directory.files() == ["empty", "sub/deep/file"]
    assert (read_whole(directory, "sub/deep/file"), read_whole(directory, "empty")) == (b"abcdef", b"")
    directory.sync()
    directory.close()
    directory.close()
    with pytest.raises(OSError, match="9"):
        directory.open("empty")
    with pytest.raises(OSError, match="9"):
        directory.files()


def test_a_file_that_is_open_stays_readable(store: Store) -> None:
    fill(store, "a", "file")
    directory = store.open("a")
    source = directory.open("file")
    store.remove("a")
    held = bytearray(4)
    assert (source.size, source.read_into(memoryview(held), 0), bytes(held)) == (4, 4, b"file")
    source.close()
    with pytest.raises(FileNotFoundError):
        directory.open("file")
    directory.close()


def test_who_uses_a_directory(store: Store) -> None:
    writer = store.make("a")
    assert store.in_use("a")
    writer.close()
    assert not store.in_use("a")
    readers = [store.open("a"), store.open("a")]
    quiet = store.open("a", lock=False)
    for reader in readers:
        assert store.in_use("a")
        reader.close()
    assert not store.in_use("a")
    quiet.close()
    assert not store.in_use("none")
    fill(store, "b", "file")
    assert not store.in_use("b/file")


def test_what_is_used_is_not_removed(store: Store) -> None:
    fill(store, "a", "x", "sub/y")
    reader = store.open("a")
    assert not store.remove_unused("a")
    assert read_whole(reader, "sub/y") == b"sub/y"
    reader.close()
    assert store.remove_unused("a")
    assert store.names() == []
    with pytest.raises(FileNotFoundError):
        store.remove_unused("a")


def test_renaming(store: Store) -> None:
    fill(store, "a", "x", "sub/y")
    reader = store.open("a")
    store.rename("a", "b")
    store.sync()
    assert store.names() == ["b"]
    assert reader.name == "a"
    assert read_whole(reader, "sub/y") == b"sub/y"
    assert (store.in_use("a"), store.in_use("b")) == (False, True)
    fill(store, "a", "x")
    write_small(reader, "new", b"1")
    assert store.names("b") == ["new", "sub", "x"], "an open directory stays the same one"
    reader.close()
    with pytest.raises(OSError, match="ENOTEMPTY|not empty"):
        store.rename("b", "a")
    with pytest.raises(FileNotFoundError):
        store.rename("none", "c")
    with pytest.raises(FileNotFoundError):
        store.rename("a", "none/a")
    store.make("trash").close()
    store.rename("a", "trash/a")
    store.rename("b/sub", "sub")
    assert (store.names(), store.names("trash"), store.names("sub")) == (["b", "sub", "trash"], ["a"], ["y"])


def test_two_directories_exchange_their_names(store: Store) -> None:
    fill(store, "a", "old", "sub/y")
    fill(store, "b", "new")
    reader = store.open("a")
    if not store.exchange("a", "b"):
        pytest.skip("this file system cannot")
    assert (store.names(), store.names("a"), store.names("b")) == (["a", "b"], ["new"], ["old", "sub"])
    assert read_whole(reader, "sub/y") == b"sub/y", "an open directory stays the same one"
    reader.close()
    for names in (("a", "none"), ("none", "a")):
        with pytest.raises(FileNotFoundError):
            store.exchange(*names)
    assert (store.names(), store.names("a")) == (["a", "b"], ["new"])


def test_removing(store: Store) -> None:
    fill(store, "a", "x", "sub/deep/y")
    store.make("a/own").close()
    store.remove("a/sub/deep")
    assert store.names("a/sub") == []
    store.remove("a")
    assert store.names() == []
    for name in ("a", "a/sub"):
        with pytest.raises(FileNotFoundError):
            store.remove(name)
    fill(store, "b", "file")
    with pytest.raises(NotADirectoryError):
        store.remove("b/file")


def test_many_threads(store: Store) -> None:
    """Writers of one save make files in one directory while others list it."""
    directory = store.make("a")
    errors: list[BaseException] = []

    def write(rank: int) -> None:
        try:
            for n in range(50):
                write_small(directory, f"part/{rank}/{n}", b"x")
                assert f"part/{rank}/{n}" in directory.files()
                assert store.has(f"a/part/{rank}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(directory.files()) == 200
    directory.close()


def test_addresses(root: str, tmp_path: Path) -> None:
    assert full_path(f"{root}/./a/") == f"{root}/a"
    store, name = above(f"{root}/a")
    assert (store.path, name) == (root, "a")
    assert same_directory(store_at(root), "a", store_at(f"{root}/"), "a")
    assert not same_directory(store_at(root), "a", store_at(root), "b")
    assert not same_directory(store_at(root), "a", store_at(f"{root}2"), "a")


def test_all_of_a_storage_is_no_directory_in_it() -> None:
    for path in ("/", "memory://"):
        with pytest.raises(UsageError, match="all of a storage"):
            above(path)
    store, name = above("memory://a")
    assert (store.path, name) == ("memory://", "a")
    with pytest.raises(UsageError, match="file systems"):
        store_at("s3://bucket/run")
