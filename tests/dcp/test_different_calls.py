"""Ranks that call `xla_ckpt.dcp` for different things: one error on all of them, and nothing is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import xla_ckpt
from tests.jobs import run_on_ranks
from xla_ckpt import dcp

RANKS = 3


def calls_differ(rank: int, root: Path) -> dict[str, str]:
    odd, told = rank == 1, dict[str, str]()
    state = {"w": torch.ones(3)}
    for name in ("a", "b"):
        dcp.save({"w": torch.ones(3) * 2}, checkpoint_id=root / name)
    for name, call in {
        "path": lambda: dcp.save(state, checkpoint_id=root / ("x" if odd else "a")),
        "replicas": lambda: dcp.save(
            state, checkpoint_id=root / "a", options=xla_ckpt.SaveOptions(replicas="first" if odd else "equal")
        ),
        "path, async": lambda: dcp.async_save(state, checkpoint_id=root / ("x" if odd else "a")).result(),  # type: ignore[union-attr]
        "path of a load": lambda: dcp.load(state, checkpoint_id=root / ("b" if odd else "a")),
        "trust": lambda: dcp.load(state, checkpoint_id=root / "a", trust_pickle=odd),
        "save and load": lambda: (dcp.load if odd else dcp.save)(state, checkpoint_id=root / "a"),
    }.items():
        with pytest.raises(xla_ckpt.UsageError, match="the ranks make different calls") as caught:
            call()
        facts = caught.value.to_json()
        everywhere: list[Any] = [None] * RANKS
        dist.all_gather_object(everywhere, facts)
        assert everywhere == [facts] * RANKS
        told[name] = str(caught.value)
    assert state["w"].tolist() == [1, 1, 1]
    dcp.load(state, checkpoint_id=root / "a")
    assert state["w"].tolist() == [2, 2, 2], "what was there before"
    dcp.save(state, checkpoint_id=root / "c")
    return told


def test_whatever_differs_all_ranks_say_so(tmp_path: Path) -> None:
    told = run_on_ranks(calls_differ, RANKS, tmp_path)
    assert all("on ranks 0, 2, found" in text and "on rank 1" in text for text in told[0].values()), told[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]
