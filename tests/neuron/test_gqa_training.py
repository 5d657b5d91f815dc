"""Emulated jobs with grouped-query attention train, and resume, as one process with the unsplit model does."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

import xla_ckpt
from tests.jobs import run_on_ranks
from tests.neuron.gqa import HIDDEN, WIDE, WIDTH, Job, Ranks, Step, unsplit

pytestmark = pytest.mark.xla

TRAINED = [
    Ranks(4, kv_heads=4),
    Ranks(4, copies=2, order=2, kv_heads=4, fused=False),
]

SAVED = {
    # Each head of queries meets the same head of keys on all of these ranks: they can have the order of its heads.
    Ranks(4, copies=2, order=2): [
        ("native", Ranks(2, copies=2, order=2)),
        ("xser", Ranks(1, order=2)),
    ],
    Ranks(2, fused=False): [
        ("native", Ranks(2, copies=2, fused=False)),
        ("xser", Ranks(4, copies=2, adjacent=True, fused=False)),
    ],
}
"""What saves, and which layout resumes on which other ranks."""


@cache
def expected(kv_heads: int, order: int) -> list[Step]:
    """What the mathematics gives, in two steps: neither the ranks nor the parameters' form matter."""
    return unsplit(Ranks(1, kv_heads=kv_heads, order=order), 2)


def trains(_rank: int) -> list[Step]:
    trained = []
    for ranks in TRAINED:
        job = Job(ranks)
        trained.append(job.step(0))
        job.end()
    return trained


def test_losses_and_norms_of_gradients_are_those_of_the_unsplit_model() -> None:
    every = run_on_ranks(trains, 4, xla=True)
    assert every[1:] == every[:1] * 3
    for ranks, own in zip(TRAINED, every[0], strict=True):
        check(own, expected(ranks.kv_heads, ranks.order)[0], ranks)
    assert expected(2, 1) != expected(2, 2)  # which heads meet is in the losses
    assert min(step.norm for step in expected(2, 1)) > 0.1  # and the norm of the gradients in all but the first


def check(own: Step, whole: Step, ranks: Ranks) -> None:
    assert own == pytest.approx(whole, rel=1e-10), ranks


def saves_and_resumes(_rank: int, root: Path, ranks: Ranks) -> list[Step]:
    job = Job(ranks)
    trained = [job.step(0)]
    job.save(root)
    job.end()
    for tag, others in SAVED[ranks]:
        job = Job(others, seed=8)
        job.load(root, tag)
        trained.append(job.step(1))
        job.end()
    return trained


@pytest.mark.parametrize("ranks", SAVED, ids=lambda ranks: "fused" if ranks.fused else "apart")
def test_a_job_resumes_on_other_ranks_with_other_copies(ranks: Ranks, tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    every = run_on_ranks(saves_and_resumes, 4, root, ranks, xla=True)
    assert every[1:] == every[:1] * 3
    whole = expected(ranks.kv_heads, ranks.order)
    before, *after = every[0]
    check(before, whole[0], ranks)
    for own, (_, others) in zip(after, SAVED[ranks], strict=True):
        check(own, whole[1], others)
    for layout in ("native", "xser"):
        assert xla_ckpt.verify(root, layout).ok
    model = xla_ckpt.restore(root, "native").tree["model"]
    keys = ranks.kv_heads * WIDE
    if ranks.fused:  # keys and values are there once
        assert model["attention.qkv.weight_qkv"].shape == (WIDTH + 2 * keys, HIDDEN)
        assert model["attention.qkv.bias_qkv"].shape == (WIDTH + 2 * keys,)
    else:
        assert model["attention.qkv.weight_k"].shape == (keys, HIDDEN)
