"""Checkpoints of every version of the format load for ever."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import xla_ckpt
from tests.museum.exhibit import LAYOUTS, tree
from tests.same import same

ROOMS = sorted(p.name for p in Path(__file__).parent.iterdir() if p.is_dir() and p.name.startswith("v"))


def test_the_museum_is_not_empty() -> None:
    assert "v1" in ROOMS


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("tag", ["exhibit", *LAYOUTS])
def test_old_checkpoints_load(room: str, tag: str) -> None:
    root = Path(__file__).parent / room
    assert xla_ckpt.verify(root, tag).ok
    assert same(xla_ckpt.restore(root, tag).tree, tree())
    target = {k: torch.zeros_like(v) for k, v in tree()["model"].items()}
    xla_ckpt.load_checkpoint(root, tag, model=target)
    assert same(target, tree()["model"])


@pytest.mark.parametrize("room", ROOMS)
def test_checkpoints_contain_no_path_of_the_machine_that_wrote_them(room: str) -> None:
    root = Path(__file__).parent / room
    marks = {mark.parent.name: mark.read_text() for mark in root.glob("*/commit_success.txt")}
    assert marks == {
        tag: f"Checkpoint commit was successful to /tests/museum/{room}/{tag}" for tag in ("exhibit", *LAYOUTS)
    }
    machine = re.compile(rb"/(?:work|home|root|tmp|Users|mnt)/")
    assert not [file for file in root.rglob("*") if file.is_file() and machine.search(file.read_bytes())]


def test_the_code_of_today_writes_what_it_reads(tmp_path: Path) -> None:
    xla_ckpt.save(tmp_path, "exhibit", tree())
    assert same(xla_ckpt.restore(tmp_path, "exhibit").tree, tree())
