"""Checkpoints of every version of the format load for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xla_ckpt
from tests.museum.exhibit import LAYOUTS, tree

ROOMS = sorted(p.name for p in Path(__file__).parent.iterdir() if p.is_dir() and p.name.startswith("v"))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        bits = [t.contiguous().reshape(-1).view(torch.uint8) if t.numel() else torch.empty(0) for t in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


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


def test_the_code_of_today_writes_what_it_reads(tmp_path: Path) -> None:
    xla_ckpt.save(tmp_path, "exhibit", tree())
    assert same(xla_ckpt.restore(tmp_path, "exhibit").tree, tree())
