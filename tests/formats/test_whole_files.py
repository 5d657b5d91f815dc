"""Single files of torch.save: they appear whole, over an older one, and are read without running anything in them."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.runs import names_in
from xla_ckpt.facade import load_whole_file, read_whole_file, replace_file, write_whole_file
from xla_ckpt.storage.local import LocalStore
from xla_ckpt.storage.local_file import LocalFileWriter

Pair = namedtuple("Pair", "a b")


def test_a_value_comes_back_and_the_directories_are_made(tmp_path: Path) -> None:
    shared = torch.arange(6.0).reshape(2, 3)
    value = OrderedDict(a=shared, b=[shared.T, (1, "x")], c=torch.tensor([], dtype=torch.int8))
    path = str(tmp_path / "new/folder/file.pt")
    for _ in range(2):  # over an older one
        write_whole_file(value, path)
        found = read_whole_file(path)
        assert type(found) is OrderedDict
        assert torch.equal(found["b"][0], shared.T)
        assert found["b"][0].untyped_storage().data_ptr() == found["a"].untyped_storage().data_ptr()
        assert torch.equal(torch.load(path, weights_only=True)["a"], shared)
        assert names_in(tmp_path / "new/folder") == ["file.pt"]


def test_one_tensor_in_two_places_stays_one(tmp_path: Path) -> None:
    one = torch.ones(2)
    write_whole_file([one, (one,)], f"{tmp_path}/f")
    found = read_whole_file(f"{tmp_path}/f")
    assert found[0] is found[1][0]


def test_with_trust_objects_are_made(tmp_path: Path) -> None:
    write_whole_file({"pair": Pair(torch.ones(1), 2)}, f"{tmp_path}/f")
    with pytest.raises(xla_ckpt.UntrustedObjectError, match=r"Pair.*trust_pickle=True"):
        load_whole_file(f"{tmp_path}/f", trust_pickle=False)
    assert load_whole_file(f"{tmp_path}/f", trust_pickle=True)["pair"].b == 2


@pytest.mark.parametrize("refuses", ["pwrite", "fsync", "rename"])
def test_a_file_that_is_refused_leaves_the_older_one(
    refuses: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_whole_file({"n": 1}, f"{tmp_path}/f")

    def refusing(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, refuses, refusing)
        with pytest.raises(xla_ckpt.StorageError, match="No space"):
            write_whole_file({"n": torch.ones(100)}, f"{tmp_path}/f")
    assert read_whole_file(f"{tmp_path}/f") == {"n": 1}
    write_whole_file({"n": 2}, f"{tmp_path}/f")
    assert names_in(tmp_path) == ["f"]


def test_a_name_that_cannot_be_made_durable_is_said_to_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(self: LocalStore) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    replace_file(b"old", f"{tmp_path}/f")
    monkeypatch.setattr(LocalStore, "sync", refusing)
    with pytest.raises(xla_ckpt.NotDurableError, match="in place and complete"):
        replace_file(b"new", f"{tmp_path}/f")
    assert (tmp_path / "f").read_bytes() == b"new"


def test_a_store_that_cannot_replace_a_file_refuses_a_second_one() -> None:
    write_whole_file({"n": 1}, "memory://whole_files/f")
    assert read_whole_file("memory://whole_files/f") == {"n": 1}
    with pytest.raises(xla_ckpt.UsageError, match="cannot replace it"):
        write_whole_file({"n": 2}, "memory://whole_files/f")
    assert read_whole_file("memory://whole_files/f") == {"n": 1}


def test_a_patch_beyond_the_end_makes_a_file_longer(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        sink = LocalFileWriter(folder, "f", 0)
        sink.patch(b"abc", 0)
        sink.patch(b"de", 3)
        sink.commit()
    finally:
        os.close(folder)
    assert (tmp_path / "f").read_bytes() == b"abcde"
