"""The contract of a store and its directories, method by method: over a file system, over memory, and over a bucket."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from xla_ckpt.errors import NotAFileError, UsageError
from xla_ckpt.storage.base import Directory, FileSystem, ObjectStore, Store, VersionConflict, read_file, write_file
from xla_ckpt.storage.local import LocalStore
from xla_ckpt.storage.memory import MemoryFiles
from xla_ckpt.storage.remote import RemoteStore
from xla_ckpt.storage.resolve import is_same_directory, normalize_path, open_parent, open_store


@pytest.fixture(params=["local", "memory", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a root directory that does not exist yet, inside of another one."""
    if request.param == "s3":
        return f"s3://{request.getfixturevalue('s3').new_bucket()}/ckpt/run"
    return str(tmp_path / "ckpt/run") if request.param == "local" else f"memory://{tmp_path.name}/ckpt/run"


@pytest.fixture
def store(root: str) -> Store:
    made = open_store(root)
    made.prepare()
    return made


@pytest.fixture
def local(tmp_path: Path) -> FileSystem:
    store = LocalStore(str(tmp_path / "root"))
    store.prepare()
    return store


@pytest.fixture(params=["memory", "s3"])
def objects(request: pytest.FixtureRequest) -> ObjectStore:
    if request.param == "memory":
        return RemoteStore("memory://store", MemoryFiles())
    store = open_store(f"s3://{request.getfixturevalue('s3').new_bucket()}/run").object_store
    assert store is not None
    return store


def changing(store: Store) -> FileSystem | ObjectStore:
    """The same, as those see it who change it."""
    changed = store.file_system or store.object_store
    assert changed is not None
    return changed


def is_bucket(store: Store) -> bool:
    """Whether it does not look what is there before it does something: each look would be a request."""
    return "://" in store.path


def begun(store: Store, name: str) -> Directory:
    """A directory to write into, where nothing is."""
    return store.object_store.get_directory(name) if store.object_store else changing(store).make_directory(name)


def fill(store: Store, name: str, *files: str) -> None:
    directory = begun(store, name)
    for path in files:
        write_file(directory, path, path.encode())
    directory.sync()
    directory.close()


def test_a_root_that_is_absent(root: str) -> None:
    store = open_store(root)
    assert store.path == root
    assert (store.list_names(), store.has(""), store.is_directory(""), store.has("a")) == ([], False, False, False)
    with pytest.raises(FileNotFoundError):
        store.open("a")
    store.prepare()
    store.prepare()
    if store.object_store is not None:  # it is there when a file is
        fill(store, "a", "file")
        changing(open_parent(root)[0]).remove("run/a/file")
        fill(store, "", "file")
        assert (store.list_names(), store.has(""), store.is_directory("")) == (["file"], True, True)
        return
    assert (store.list_names(), store.has(""), store.is_directory("")) == ([], True, True)
    assert open_parent(root)[0].list_names() == ["run"]


def test_a_root_that_is_a_file(store: Store, root: str) -> None:
    fill(store, "a", "file")
    file = open_store(f"{root}/a/file")
    assert (file.has(""), file.is_directory("")) == (True, False)
    if is_bucket(store):
        assert file.list_names() == []
        return
    with pytest.raises(NotADirectoryError):
        file.list_names()
    if file.file_system is not None:
        with pytest.raises(OSError, match="exists"):
            file.prepare()


def test_names_and_what_they_are(store: Store) -> None:
    fill(store, "b", "b")
    fill(store, "a", "x", "sub/y", "sub/deep/z")
    assert store.list_names() == ["a", "b"]
    assert store.list_names("a") == ["sub", "x"]
    assert store.list_names("a/sub") == ["deep", "y"]
    assert store.list_names("a/x") == store.list_names("c") == store.list_names("a/x/y") == []
    for path, there, folder in (
        ("a", True, True), ("a/sub", True, True), ("a/sub/deep", True, True), ("a/x", True, False),
        ("a/sub/y", True, False), ("c", False, False), ("a/c", False, False), ("a/x/y", False, False),
    ):  # fmt: skip
        assert (store.has(path), store.is_directory(path)) == (there, folder), path


def test_the_start_of_a_file(store: Store) -> None:
    fill(store, "a", "sub/file")
    assert store.read_start("a/sub/file", 3) == b"sub"
    assert store.read_start("a/sub/file", 100) == b"sub/file"
    for path, error in (
        ("a/none", FileNotFoundError), ("none/file", FileNotFoundError), ("a/sub", NotAFileError),
        ("a/sub/file/x", NotADirectoryError),
    ):  # fmt: skip
        with pytest.raises(error if store.file_system else FileNotFoundError):
            store.read_start(path, 3)


def test_when_something_changed(store: Store) -> None:
    before = time.time_ns() - 10_000_000_000
    fill(store, "a", "x")
    for path in ("", "a", "a/x"):
        changed = store.get_modified_time(path)
        assert changed is not None
        assert before < changed < time.time_ns() + 10_000_000_000
    assert store.get_modified_time("b") is store.get_modified_time("a/b") is store.get_modified_time("a/x/y") is None


def test_directories_are_made_once(local: FileSystem) -> None:
    directory = local.make_directory("a")
    assert directory.name == "a"
    with pytest.raises(FileExistsError):
        local.make_directory("a")
    directory.close()
    local.make_directory("a/sub").close()
    assert local.is_directory("a/sub")
    with pytest.raises(FileNotFoundError):
        local.make_directory("none/sub")
    with pytest.raises(FileNotFoundError):
        local.open("none")
    fill(local, "b", "file")
    with pytest.raises(NotADirectoryError):
        local.open("b/file")


def test_only_what_is_empty_is_removed_as_empty(local: FileSystem) -> None:
    fill(local, "a", "file")
    local.make_directory("b").close()
    assert [local.remove_empty(name) for name in "ab"] == [False, True]
    assert (local.list_names(), local.list_names("a")) == (["a"], ["file"])
    with pytest.raises(FileNotFoundError):
        local.remove_empty("b")
    with pytest.raises(NotADirectoryError):
        local.remove_empty("a/file")


def test_where_a_directory_is_now(local: FileSystem) -> None:
    fill(local, "a", "file")
    fill(local, "b")
    made, read = local.make_directory("c"), local.open("a")
    assert [directory.is_at(directory.name) for directory in (made, read)] == [True, True]
    local.rename("c", "d")
    local.rename("a", "c")
    assert [directory.is_at(directory.name) for directory in (made, read)] == [False, False]
    assert (made.is_at("d"), read.is_at("c"), read.is_at("d"), read.is_at("none")) == (True, True, False, False)
    local.rename("b", "a")
    assert not read.is_at("a"), "another one has its name"
    assert read_file(read, "file") == b"file"
    local.remove("c")
    assert not read.is_at("c")
    for directory in (made, read):
        directory.close()


def test_files_of_a_directory(store: Store) -> None:
    directory = begun(store, "a")
    sink = directory.create("sub/deep/file", 6)
    sink.patch(b"def", 3)
    sink.patch(b"abc", 0)
    sink.commit()
    sink.abort()
    write_file(directory, "empty", b"")
    if not is_bucket(store):
        with pytest.raises(FileExistsError):
            directory.create("sub/deep/file", 6)
    if store.file_system is not None:
        for path, error in (("none", FileNotFoundError), ("empty/x", NotADirectoryError)):
            with pytest.raises(error):
                directory.open(path)
        with pytest.raises(OSError, match="not a regular file"):
            directory.open("sub")
        with pytest.raises(NotADirectoryError):
            directory.create("empty/x", 1)
        directory.make_directory("sub/bare/deep")
        directory.make_directory("sub/bare/deep")
        with pytest.raises((NotADirectoryError, FileExistsError)):
            directory.make_directory("empty/x")
        assert store.is_directory("a/sub/bare/deep")
    for path in ("none", "empty/x", "sub"):
        with pytest.raises(OSError, match="ENO|[Nn]o such|not a|Not a"):
            directory.open(path)
    assert directory.list_files() == ["empty", "sub/deep/file"]
    assert (read_file(directory, "sub/deep/file"), read_file(directory, "empty")) == (b"abcdef", b"")
    directory.sync()
    directory.close()
    directory.close()
    with pytest.raises(OSError, match="9"):
        directory.open("empty")
    with pytest.raises(OSError, match="9"):
        directory.list_files()


def test_a_file_that_is_open_stays_readable(store: Store) -> None:
    fill(store, "a", "file")
    directory = store.open("a")
    source = directory.open("file")
    changing(store).remove("a")
    held = bytearray(4)
    # In a bucket a small file comes when it is opened. Of a larger one the rest would be gone now.
    assert (source.size, source.read_into(memoryview(held), 0), bytes(held)) == (4, 4, b"file")
    source.close()
    with pytest.raises(FileNotFoundError):
        directory.open("file")
    directory.close()


def test_who_uses_a_directory(local: FileSystem) -> None:
    writer = local.make_directory("a")
    assert local.is_in_use("a")
    writer.close()
    assert not local.is_in_use("a")
    readers = [local.open("a"), local.open("a")]
    quiet = local.open("a", lock=False)
    for reader in readers:
        assert local.is_in_use("a")
        reader.close()
    assert not local.is_in_use("a")
    quiet.close()
    assert not local.is_in_use("none")
    fill(local, "b", "file")
    assert not local.is_in_use("b/file")


def test_what_is_used_is_not_removed(local: FileSystem) -> None:
    fill(local, "a", "x", "sub/y")
    reader = local.open("a")
    assert not local.remove_unused("a")
    assert read_file(reader, "sub/y") == b"sub/y"
    reader.close()
    assert local.remove_unused("a")
    assert local.list_names() == []
    with pytest.raises(FileNotFoundError):
        local.remove_unused("a")


def test_renaming(local: FileSystem) -> None:
    fill(local, "a", "x", "sub/y")
    reader = local.open("a")
    local.rename("a", "b")
    local.sync()
    assert local.list_names() == ["b"]
    assert reader.name == "a"
    assert read_file(reader, "sub/y") == b"sub/y"
    assert (local.is_in_use("a"), local.is_in_use("b")) == (False, True)
    fill(local, "a", "x")
    write_file(reader, "new", b"1")
    assert local.list_names("b") == ["new", "sub", "x"], "an open directory stays the same one"
    reader.close()
    with pytest.raises(OSError, match="ENOTEMPTY|not empty"):
        local.rename("b", "a")
    with pytest.raises(FileNotFoundError):
        local.rename("none", "c")
    with pytest.raises(FileNotFoundError):
        local.rename("a", "none/a")
    local.make_directory("trash").close()
    local.rename("a", "trash/a")
    local.rename("b/sub", "sub")
    assert (local.list_names(), local.list_names("trash"), local.list_names("sub")) == (
        ["b", "sub", "trash"],
        ["a"],
        ["y"],
    )


def test_two_directories_exchange_their_names(local: FileSystem) -> None:
    fill(local, "a", "old", "sub/y")
    fill(local, "b", "new")
    reader = local.open("a")
    if not local.exchange("a", "b"):
        pytest.skip("this file system cannot")
    assert (local.list_names(), local.list_names("a"), local.list_names("b")) == (["a", "b"], ["new"], ["old", "sub"])
    assert read_file(reader, "sub/y") == b"sub/y", "an open directory stays the same one"
    reader.close()
    for names in (("a", "none"), ("none", "a")):
        with pytest.raises(FileNotFoundError):
            local.exchange(*names)
    assert (local.list_names(), local.list_names("a")) == (["a", "b"], ["new"])


def test_removing(local: FileSystem) -> None:
    fill(local, "a", "x", "sub/deep/y")
    local.make_directory("a/own").close()
    local.remove("a/sub/deep")
    assert local.list_names("a/sub") == []
    local.remove("a")
    assert local.list_names() == []
    for name in ("a", "a/sub"):
        with pytest.raises(FileNotFoundError):
            local.remove(name)
    fill(local, "b", "file")
    with pytest.raises(NotADirectoryError):
        local.remove("b/file")


def test_many_threads(store: Store) -> None:
    """Writers of one save make files in one directory while others list it."""
    directory = begun(store, "a")
    errors: list[BaseException] = []

    def write(rank: int) -> None:
        try:
            for n in range(15):
                write_file(directory, f"part/{rank}/{n}", b"x")
                assert f"part/{rank}/{n}" in directory.list_files()
                assert store.has(f"a/part/{rank}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(directory.list_files()) == 60
    directory.close()


def test_a_file_of_an_object_store_appears_whole_and_stays_as_it_is(objects: ObjectStore) -> None:
    one, other = objects.get_directory("a"), objects.get_directory("a")  # two ranks, or two threads
    sinks = [directory.create("f", 3) for directory in (one, other)]
    for sink, data in zip(sinks, (b"one", b"two"), strict=True):
        sink.patch(data, 0)
    assert (objects.list_names(), objects.has("a"), one.list_files()) == ([], False, [])
    sinks[0].commit()
    sinks[1].abort()
    assert (read_file(other, "f"), other.list_files()) == (b"one", ["f"])
    linked = objects.get_directory("b")
    linked.link(one, "f", "g")
    with pytest.raises(FileNotFoundError):
        linked.link(one, "none", "h")
    write_file(other, "ff", b"")
    objects.remove("a/f")
    assert (objects.list_names(), objects.list_names("a"), objects.read_start("b/g", 9)) == (["a", "b"], ["ff"], b"one")
    assert one.is_at("a")
    for name in ("a", "a", "none"):
        objects.remove(name)
    assert (objects.list_names(), one.is_at("a")) == (["b"], False)


def test_a_record_is_replaced_if_nobody_has_come_before(objects: ObjectStore) -> None:
    assert objects.read_record("r") is None
    objects.write_record("r", b"1", None)
    with pytest.raises(VersionConflict):
        objects.write_record("r", b"2", None)
    data, version = objects.read_record("r") or (b"", "")
    assert data == b"1"
    objects.write_record("r", b"2", version)  # S3 makes the same version of equal bytes
    with pytest.raises(VersionConflict):
        objects.write_record("r", b"3", version)
    objects.remove("r")
    with pytest.raises(VersionConflict):
        objects.write_record("r", b"3", version)
    assert objects.read_record("r") is None


NAMES = ("a b", "100%", "%20", "a#b", "what?", "ü", "~x", "a|b", "a+b&c=d", "[x]", "a'b", "x..y")


@pytest.mark.parametrize("name", NAMES)
def test_names_with_odd_characters(store: Store, name: str) -> None:
    fill(store, name, name, f"sub/{name}")
    assert store.list_names() == [name]
    assert store.list_names(name) == sorted([name, "sub"])
    assert (store.has(f"{name}/{name}"), store.is_directory(name), store.has(f"{name}x")) == (True, True, False)
    assert store.read_start(f"{name}/sub/{name}", 100).decode() == f"sub/{name}"
    directory = store.open(name)
    assert directory.list_files() == sorted([name, f"sub/{name}"])
    assert read_file(directory, name).decode() == name
    directory.link(directory, name, f"copy {name}")
    assert store.read_start(f"{name}/copy {name}", 100).decode() == name
    directory.close()
    if store.object_store is not None:
        store.object_store.write_record(f".{name}", b"1", None)
        assert (store.object_store.read_record(f".{name}") or (b"", ""))[0] == b"1"
    changing(store).remove(name)
    assert name not in store.list_names()


def test_addresses(root: str, tmp_path: Path) -> None:
    assert normalize_path(f"{root}/./a/") == f"{root}/a"
    store, name = open_parent(f"{root}/a")
    assert (store.path, name) == (root, "a")
    assert is_same_directory(open_store(root), "a", open_store(f"{root}/"), "a")
    assert not is_same_directory(open_store(root), "a", open_store(root), "b")
    assert not is_same_directory(open_store(root), "a", open_store(f"{root}2"), "a")


def test_all_of_a_storage_is_no_directory_in_it() -> None:
    for path in ("/", "memory://"):
        with pytest.raises(UsageError, match="all of a storage"):
            open_parent(path)
    store, name = open_parent("memory://a")
    assert (store.path, name) == ("memory://", "a")
    with pytest.raises(UsageError, match="no storage of this library"):
        open_store("ftp://host/run")
    with pytest.raises(UsageError, match="names no bucket"):
        open_store("s3://")
    with pytest.raises(UsageError, match="is that of this machine"):
        open_store("file://host/run")
    assert open_store("file:///a%20b/run").path == "/a b/run"
