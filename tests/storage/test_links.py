"""What a store does where a link leads out of it: every call, with the link on the way and at the end of its path."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from xla_ckpt.storage.base import read_file, write_file
from xla_ckpt.storage.local import LocalDirectory, LocalStore

CALLS: dict[str, Callable[[LocalStore, str], object]] = {
    "names": lambda store, path: store.list_names(path) or None,
    "is_directory": lambda store, path: store.is_directory(path) or None,
    "start_of": lambda store, path: store.read_start(f"{path}/file", 9),
    "open": lambda store, path: store.open(path).close(),
    "open, unlocked": lambda store, path: store.open(path, lock=False).close(),
    "open, links": lambda store, path: store.open(path, lock=False, links=True).close(),
    "make": lambda store, path: store.make_directory(f"{path}/new").close(),
    "rename to": lambda store, path: store.rename("own", f"{path}/own"),
    "rename from": lambda store, path: store.rename(f"{path}/sub", "got"),
    "remove": lambda store, path: store.remove(path),
    "remove below": lambda store, path: store.remove(f"{path}/sub"),
    "remove_unused": lambda store, path: store.remove_unused(path),
    "remove_unused below": lambda store, path: store.remove_unused(f"{path}/sub"),
    "remove_empty": lambda store, path: store.remove_empty(path),
    "remove_empty below": lambda store, path: store.remove_empty(f"{path}/empty"),
    "has": lambda store, path: store.has(f"{path}/file") or None,
    "modified": lambda store, path: store.get_modified_time(f"{path}/file"),
    "identity": lambda store, path: store.get_identity(f"{path}/sub"),
    "in_use": lambda store, path: store.is_in_use(path) or None,
}

IN_A_DIRECTORY: dict[str, Callable[[LocalDirectory, LocalDirectory, str], object]] = {
    "open": lambda own, other, path: read_file(own, f"{path}/file"),
    "create": lambda own, other, path: write_file(own, f"{path}/new", b"1"),
    "make": lambda own, other, path: own.make_directory(f"{path}/new"),
    "make the link": lambda own, other, path: own.make_directory(path),
    "adopt": lambda own, other, path: own.move_in(other, f"{path}/file"),
    "adopt from": lambda own, other, path: other.move_in(own, f"{path}/file"),
    "link to": lambda own, other, path: own.link(other, "own", f"{path}/new"),
    "link from": lambda own, other, path: other.link(own, f"{path}/file", "got"),
    "files": lambda own, other, path: [name for name in own.list_files() if "file" in name] or None,
}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    outside = tmp_path / "outside"
    (outside / "sub").mkdir(parents=True)
    (outside / "empty").mkdir()
    (outside / "file").write_bytes(b"secret")
    (outside / "sub" / "file").write_bytes(b"deep")
    return outside


def all_in(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() if p.is_file() else b"" for p in sorted(path.rglob("*"))}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("path", ["link", "way/link", "link/sub"])
def test_no_call_of_a_store_reaches_what_a_link_leads_to(tmp_path: Path, outside: Path, call: str, path: str) -> None:
    root = tmp_path / "root"
    for name in ("own", "way"):
        (root / name).mkdir(parents=True)
    (root / path.removesuffix("/sub")).symlink_to(outside)
    before = all_in(outside)
    found: object = None
    with contextlib.suppress(OSError):
        found = CALLS[call](LocalStore(str(root)), path)
    assert found is None
    assert all_in(outside) == before
    assert (root / "own").is_dir()
    assert os.path.islink(root / path.removesuffix("/sub"))


@pytest.mark.parametrize("call", IN_A_DIRECTORY)
@pytest.mark.parametrize("path", ["link", "way/link", "link/sub"])
def test_no_call_of_a_directory_reaches_what_a_link_leads_to(
    tmp_path: Path, outside: Path, call: str, path: str
) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    (root / "way").mkdir(parents=True)
    (root / path.removesuffix("/sub")).symlink_to(outside)
    (other / path).mkdir(parents=True)
    (other / path / "file").write_bytes(b"theirs")
    (other / "own").write_bytes(b"own")
    before = all_in(outside)
    with pytest.raises(OSError, match="link|directory") if call != "files" else contextlib.nullcontext():
        IN_A_DIRECTORY[call](LocalDirectory(root), LocalDirectory(other), path)
    assert all_in(outside) == before


def test_a_root_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real" / "a").mkdir(parents=True)
    (tmp_path / "root").symlink_to(tmp_path / "real")
    store = LocalStore(str(tmp_path / "root"))
    assert store.list_names() == ["a"]
    assert store.is_directory("")
    with contextlib.closing(store.open("")) as directory:
        assert directory.is_at(directory.name)
    store.sync()
