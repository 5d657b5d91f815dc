"""A disk that is really full: a typed error, nothing lost, nothing left behind, and the next save works."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import xla_ckpt
from tests.jobs import run_on_ranks
from tests.runs import names_in


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mountpoint = tmp_path / "disk"
    mountpoint.mkdir()
    if request.param == "tmpfs":
        mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mountpoint)]
    else:
        image = tmp_path / "image"
        image.write_bytes(b"")
        os.truncate(image, 12 << 20)
        made = subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], capture_output=True, check=False)
        if made.returncode:
            pytest.skip("mkfs.ext4 does not work here")
        mount = ["mount", "-o", "loop", str(image), str(mountpoint)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    yield mountpoint
    subprocess.run(["umount", "-l", str(mountpoint)], check=True)


@pytest.mark.parametrize("async_save", [False, True])
def test_a_full_disk(small_disk: Path, async_save: bool) -> None:
    root = small_disk / "ckpts"
    fits = {"w": torch.ones(500_000)}
    too_large = {"a": torch.zeros(200_000), "w": torch.zeros(4_000_000)}
    xla_ckpt.save_checkpoint(root, "good", model=fits, user_content=1)
    for tag in ("bad", "good"):
        with pytest.raises(xla_ckpt.StorageError, match="No space left on device") as caught:
            xla_ckpt.save_checkpoint(root, tag, model=too_large, async_save=async_save).result()
        assert caught.value.errno == 28
        assert caught.value.tag == tag
    assert xla_ckpt.list_tags(root) == ["good"]
    assert xla_ckpt.verify(root, "good").ok
    target = {"w": torch.zeros(500_000)}
    assert xla_ckpt.load_checkpoint(root, model=target).user_content == 1
    assert (target["w"] == 1).all()
    xla_ckpt.save_checkpoint(root, "next", model=fits, user_content=2, num_kept_ckpts=1)
    xla_ckpt.finalize_checkpoint()
    assert names_in(root) == ["next"]


def saves_while_the_disk_is_full(rank: int, disk: Path) -> list[str]:
    """Save asynchronously in steps, as a program does that asks no handle; the errors, by step."""
    raised = []
    filler = disk / f"filler.{rank}"
    for step in range(5):
        dist.barrier()
        if step == 1 and rank == 0:
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(b"\0" * 4096)
        if step == 2 and rank == 0:
            filler.unlink()
        dist.barrier()
        tree = {"w": torch.full((50_000,), float(step))}
        try:
            xla_ckpt.save(disk / "ckpts", f"step_{step}", tree, async_save=True).wait()
        except xla_ckpt.CheckpointError as error:
            raised.append(f"{step}: {error}")
    xla_ckpt.finalize_checkpoint()
    return raised


def test_ranks_go_on_when_the_disk_has_room_again(small_disk: Path) -> None:
    told, other = run_on_ranks(saves_while_the_disk_is_full, 2, small_disk)
    assert told == other
    (error,) = told
    assert error.startswith("2: an asynchronous save before")
    assert "this call has not saved tag step_2: " in error
    assert "No space left on device" in error
    assert "tag step_1" in error
    assert xla_ckpt.list_tags(small_disk / "ckpts") == ["step_0", "step_3", "step_4"]


def test_a_disk_without_room_for_the_manifest(small_disk: Path) -> None:
    root = small_disk / "ckpts"
    xla_ckpt.save(root, "good", {"n": 1})
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError:
            pass
    with pytest.raises((xla_ckpt.StorageError, xla_ckpt.SaveError)):
        xla_ckpt.save(root, "bad", {"n": 2, "text": "x" * 200_000})
    assert xla_ckpt.list_tags(root) == ["good"]
    assert xla_ckpt.restore(root).tree["n"] == 1
    filler.unlink()
    xla_ckpt.save(root, "next", {"n": 3})
    xla_ckpt.finalize_checkpoint()
    assert names_in(root) == ["good", "next"]
