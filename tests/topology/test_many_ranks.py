"""The largest job of the tests: sixteen ranks, and more on a machine of more cores.

docs/unverified.md says how large the largest was that was seen.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

import xla_ckpt
from tests.jobs import run_on_ranks
from tests.runs import names_in

RANKS, TP = max(16, 8 * (os.cpu_count() or 1)), 4
WHOLE = torch.arange(4.0 * RANKS * 6).reshape(4 * RANKS, 6)


def saves_its_part(rank: int, root: str) -> None:
    at = rank % TP
    tree = {"w": WHOLE.chunk(TP)[at].clone(), "replica": WHOLE[:2].clone()}
    mesh, rules = xla_ckpt.Mesh(dp=RANKS // TP, tp=TP), [("^w", ("tp",))]
    for step in (1, 2):
        xla_ckpt.save(root, f"step_{step}", tree, num_kept_ckpts=1, mesh=mesh, shardings=rules)


def loads_another_part(rank: int, root: str, ranks: int) -> bool:
    like = {"w": torch.zeros(len(WHOLE) // ranks, 6), "replica": torch.zeros(2, 6)}
    loaded = xla_ckpt.restore(root, like=like, mesh=xla_ckpt.Mesh(tp=ranks), shardings=[("^w", ("tp",))]).tree
    return torch.equal(loaded["w"], WHOLE.chunk(ranks)[rank]) and torch.equal(loaded["replica"], WHOLE[:2])


def test_many_ranks_save_and_load(tmp_path: Path) -> None:
    run_on_ranks(saves_its_part, RANKS, str(tmp_path))
    assert [name for name in names_in(tmp_path) if not name.startswith(".")] == ["step_2"]
    assert xla_ckpt.verify(tmp_path).ok
    for ranks in (RANKS, 2):
        assert run_on_ranks(loads_another_part, ranks, str(tmp_path), ranks) == [True] * ranks
