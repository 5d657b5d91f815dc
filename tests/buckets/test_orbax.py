"""Checkpoints that real orbax wrote, read where they lie in a bucket; and saves in its layout there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import xla_ckpt
from tests.buckets.content import client, download, names_below, split, upload
from tests.buckets.s3_server import Fault, S3Server
from tests.formats import orbax_saves
from tests.formats.test_orbax import assert_equal
from xla_ckpt.cli.main import main


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with all checkpoints of `orbax_saves`."""
    folder = tmp_path_factory.mktemp("orbax")
    orbax_saves.save_all(folder)
    return folder


@pytest.mark.parametrize("name", ["standard", "pytree-files", "v1", "host"])
def test_is_read_where_it_lies(saved: Path, root: str, name: str) -> None:
    upload(saved / name, f"{root}/{name}")
    assert xla_ckpt.list_tags(root) == [name]
    assert_equal(xla_ckpt.restore(f"{root}/{name}").tree, orbax_saves.tree())
    assert xla_ckpt.verify(root).ok


def test_steps_and_their_items(saved: Path, root: str, tmp_path: Path) -> None:
    upload(saved / "manager", root)
    upload(saved / "composite" / "3", f"{root}/3")
    assert xla_ckpt.list_tags(root) == ["1", "2", "3", "12"]
    assert_equal(xla_ckpt.restore(root).tree, orbax_saves.tree())
    assert_equal(xla_ckpt.restore(f"{root}/12/default").tree, orbax_saves.tree())
    assert xla_ckpt.restore(root, tag="3").tree["about"] == {"seen": [1, 2]}
    assert main(["convert", f"{root}/12", str(tmp_path / "run"), "--to", "native"]) == 0
    assert xla_ckpt.verify(tmp_path / "run").digests


def test_a_part_is_read_alone(saved: Path, root: str, s3: S3Server) -> None:
    upload(saved / "pytree-files", f"{root}/a")
    s3.forget()
    xla_ckpt.restore(f"{root}/a", like={"odd": {"x": xla_ckpt.ArraySpec((5,), "float32")}})
    chunks = [r.path.partition("/run/a/")[2] for r in s3.requests if r.method == "GET" and ".zarray" not in r.path]
    assert "odd.x/0" in chunks
    assert not [path for path in chunks if path.startswith(("params", "opt."))]


def test_what_the_store_refuses_is_no_damage(saved: Path, root: str, s3: S3Server) -> None:
    upload(saved / "standard", f"{root}/a")
    s3.faults.append(Fault("GET", "manifest.ocdbt", "refuse403", count=100))
    with pytest.raises(xla_ckpt.StorageError):
        xla_ckpt.restore(f"{root}/a")


def test_what_is_missing_is_damage(saved: Path, root: str) -> None:
    upload(saved / "pytree-files", f"{root}/a")
    bucket, name = split(f"{root}/a/params.a.b/c/0.0")
    client().delete_object(Bucket=bucket, Key=name)
    with pytest.raises(xla_ckpt.CorruptCheckpointError, match="missing"):
        xla_ckpt.restore(f"{root}/a")


def test_saves_in_its_layout(root: str, tmp_path: Path) -> None:
    from orbax.checkpoint import v1

    state = {"w": torch.arange(12.0).reshape(3, 4), "step": 3}
    xla_ckpt.save(root, "a", state, layout="orbax")
    assert xla_ckpt.restore(root).tree["step"] == 3
    (folder,) = {name.rpartition("/_METADATA")[0] for name in names_below(root) if name.endswith("_METADATA")}
    download(f"{root}/{folder}", tmp_path / "a")
    assert_equal(v1.load(tmp_path / "a"), {"step": 3, "w": state["w"].numpy()})
