"""Conversions into buckets: files go up in the order of their bytes, and are kept neither in memory nor on a disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.buckets.content import names_below, read
from tests.buckets.s3_server import S3Server
from xla_ckpt.storage.remote import RemoteDirectory

STATE = {
    "w": torch.arange(10_000_000, dtype=torch.float32),
    "empty": torch.zeros(0, 3),
    "few": torch.arange(3, dtype=torch.int8),
    "strided": torch.arange(12.0).reshape(3, 4).T,
}


def refusing(self: RemoteDirectory, path: str, size: int) -> Any:
    raise AssertionError(f"{path}, {size} bytes, is kept before it is sent")


@pytest.mark.parametrize("layout", ["native", "dcp", "torchtitan"])
def test_files_of_tags(layout: str, root: str, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    xla_ckpt.save(tmp_path, "a", STATE)
    create = RemoteDirectory.create

    def small(self: RemoteDirectory, path: str, size: int) -> Any:
        return (create if size < 1 << 20 else refusing)(self, path, size)

    monkeypatch.setattr(RemoteDirectory, "create", small)
    options = xla_ckpt.ConvertOptions(max_memory=1 << 20)
    xla_ckpt.convert(tmp_path, root, to=layout, mesh="dp=2", options=options)
    assert len([r for r in s3.requests if r.method == "PUT" and "partNumber" in r.path]) > 1
    assert xla_ckpt.verify(root).ok
    assert xla_ckpt.diff(tmp_path, root).same


def test_exported_files(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    xla_ckpt.save(tmp_path / "run", "a", {"model": STATE})
    monkeypatch.setattr(RemoteDirectory, "create", refusing)
    options = xla_ckpt.ConvertOptions(max_memory=1 << 20)
    for dtype in (None, "bfloat16"):
        xla_ckpt.export_hf(tmp_path / "run", f"{root}-{dtype}", dtype=dtype, options=options)
        xla_ckpt.export_hf(tmp_path / "run", tmp_path / f"{dtype}", dtype=dtype)
        assert names_below(f"{root}-{dtype}") == ["model.safetensors"]
        assert read(f"{root}-{dtype}/model.safetensors") == (tmp_path / f"{dtype}/model.safetensors").read_bytes()


def test_what_is_damaged_leaves_nothing(root: str, tmp_path: Path) -> None:
    xla_ckpt.save(tmp_path, "a", {"model": STATE})
    with (tmp_path / "a/model/00001-of-00001.safetensors").open("r+b") as file:
        file.seek(-5, 2)
        file.write(b"\xff\xfe\xfd\xfc\xfb")
    options = xla_ckpt.ConvertOptions(max_memory=1 << 20)
    for write in (xla_ckpt.convert, xla_ckpt.export_hf):
        with pytest.raises(xla_ckpt.CorruptCheckpointError):
            write(tmp_path, f"{root}-{write.__name__}", options=options)  # type: ignore[operator]
        assert not [name for name in names_below(f"{root}-{write.__name__}") if name != ".ledger"]
    assert xla_ckpt.list_tags(f"{root}-convert") == []
