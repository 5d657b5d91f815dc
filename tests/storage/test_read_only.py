"""Root directories on a file system that is mounted read-only: all that reads works, and all that writes says so."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.jobs import run_on_ranks
from xla_ckpt import dcp
from xla_ckpt.cli.main import main

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with tags of several layouts and a checkpoint of DCP's, which nobody can change."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    path = tmp_path_factory.mktemp("read_only")
    for number, layout in enumerate(("native", "xser", "dcp")):
        xla_ckpt.save_checkpoint(
            path,
            layout,
            module(number),
            user_content=number,
            layout=layout,
            options=xla_ckpt.SaveOptions(parity="file"),
        )
    dcp.save({"w": torch.ones(3)}, checkpoint_id=path / "of_dcp")
    xla_ckpt.finalize_checkpoint()
    done = subprocess.run(["mount", "--bind", path, path], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    subprocess.run(["mount", "-o", "remount,ro,bind", path], check=True)
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def module(number: int) -> torch.nn.Module:
    made = torch.nn.Linear(3, 3)
    torch.nn.init.constant_(made.weight, number)
    torch.nn.init.constant_(made.bias, number)
    return made


def everything(root: Path) -> list[tuple[str, int]]:
    """Each path below, and when it was last changed."""
    return sorted((str(path), path.stat().st_mtime_ns) for path in root.rglob("*"))


TAGS = ["of_dcp", "native", "xser", "dcp"]


def test_what_reads(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = everything(root)
    assert xla_ckpt.list_tags(root) == TAGS
    assert (xla_ckpt.latest_tag(root), xla_ckpt.has_checkpoint(root)) == ("dcp", True)
    for number, tag in enumerate(TAGS[1:]):
        model = module(-1)
        assert xla_ckpt.load_checkpoint(root, tag, model).user_content == number
        assert (model.weight == number).all()
        assert torch.equal(xla_ckpt.restore(root, tag).tree["model"]["bias"], model.bias)
        assert xla_ckpt.verify(root, tag).ok
    assert xla_ckpt.load_checkpoint(root, model=module(-1)).user_content == 2
    target = {"w": torch.zeros(3)}
    dcp.load(target, checkpoint_id=root / "of_dcp")
    assert target["w"].tolist() == [1] * 3
    assert not xla_ckpt.diff(root, root, "native", "xser").same
    assert xla_ckpt.explain(root, "native", mesh="dp=2").ok
    assert xla_ckpt.repair(root, "native") == (), "nothing is damaged"
    xla_ckpt.convert(root, tmp_path / "copy", "native")
    assert xla_ckpt.list_tags(tmp_path / "copy") == ["native"]
    for line in (["ls", root], ["show", root], ["verify", root, "--all"]):
        assert main([str(word) for word in line]) == 0, capsys.readouterr().err
    assert everything(root) == before


def loads(rank: int, root: Path) -> tuple[Any, list[float]]:
    model = module(-1)
    return xla_ckpt.load_checkpoint(
        root, model=model, options=xla_ckpt.LoadOptions(replica_read="share")
    ).user_content, model.bias.tolist()


def test_ranks_load(root: Path) -> None:
    assert run_on_ranks(loads, 2, root) == [(2, [2.0] * 3)] * 2


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda at: xla_ckpt.save_checkpoint(at, "native", module(7)), id="save_checkpoint"),
        pytest.param(lambda at: xla_ckpt.save_checkpoint(at, "new", module(7), num_kept_ckpts=1), id="retention"),
        pytest.param(
            lambda at: xla_ckpt.save_checkpoint(at, "new", module(7), async_save=True).result(), id="async_save"
        ),
        pytest.param(lambda at: xla_ckpt.save(at, "new", {"w": torch.ones(3)}), id="save"),
        pytest.param(lambda at: xla_ckpt.save(at / "below", "new", {"w": torch.ones(3)}), id="save into a new root"),
        pytest.param(lambda at: dcp.save({"w": torch.zeros(3)}, checkpoint_id=at / "of_dcp"), id="dcp.save"),
        pytest.param(lambda at: dcp.save({"w": torch.zeros(3)}, checkpoint_id=at / "new"), id="dcp.save, new"),
        pytest.param(lambda at: xla_ckpt.Checkpoints(at).pin("native"), id="pin_tag"),
        pytest.param(lambda at: xla_ckpt.Checkpoints(at).delete("native"), id="delete_tag"),
        pytest.param(lambda at: xla_ckpt.convert(at, at, "native", as_tag="other"), id="convert"),
        pytest.param(lambda at: xla_ckpt.export_hf(at, at / "hf", "native"), id="export_hf"),
    ],
)
def test_what_writes_says_that_it_cannot(root: Path, write: Callable[[Path], Any]) -> None:
    before = everything(root)
    with pytest.raises(xla_ckpt.StorageError, match="Read-only file system") as caught:
        write(root)
    assert caught.value.errno == errno.EROFS
    assert everything(root) == before
    assert xla_ckpt.list_tags(root) == TAGS
