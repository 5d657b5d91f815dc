"""A rank whose program ends is not waited for: all others raise one error as soon as they call it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import xla_ckpt
from tests.jobs import finish, run_on_ranks, start_on_ranks, torchrun
from tests.runs import environment
from xla_ckpt import SaveOptions

RANKS = 3

NEVER = SaveOptions(timeout=100_000.0)
"""The test itself ends before this time is over."""


def attempts(root: Path, *tags: str) -> list[tuple[str, int | None, str | None, str]]:
    """Save under these names; the errors."""
    errors = []
    for tag in tags:
        with pytest.raises(xla_ckpt.CheckpointError) as caught:
            xla_ckpt.save(root, tag, {"w": torch.ones(2)}, options=NEVER)
        error = caught.value
        errors.append((type(error).__name__, error.rank, error.tag, str(error)))
    return errors


def one_ends(rank: int, root: Path, which: int) -> list[tuple[str, int | None, str | None, str]]:
    xla_ckpt.save(root, "a", {"w": torch.ones(2)}, options=NEVER)
    return [] if rank == which else attempts(root, "b", "c")


@pytest.mark.parametrize("which", [0, 2])
def test_all_others_raise_the_same_error(tmp_path: Path, which: int) -> None:
    ranks = start_on_ranks(one_ends, RANKS, tmp_path, which, env={"TORCHELASTIC_USE_AGENT_STORE": "False"})
    ends = finish(ranks)
    assert [code for code, _, _ in ends] == [0] * RANKS, ends
    told = [rank.value() for number, rank in enumerate(ranks) if number != which]
    assert told[0] == told[1]
    assert [(kind, rank, tag) for kind, rank, tag, _ in told[0]] == [
        ("RankFailedError", which, "b"),
        ("RankFailedError", which, "c"),
    ]
    assert f"rank {which} has ended, and this call waits for it" in told[0][0][3]
    assert "if rank == 0" in told[0][0][3]
    assert xla_ckpt.list_tags(tmp_path) == ["a"]


def only_rank_0_saves(rank: int, root: Path) -> list[tuple[str, int | None, str | None, str]]:
    return attempts(root, "a") if rank == 0 else []


def test_so_they_do_if_it_has_never_made_a_call(tmp_path: Path) -> None:
    (error,), nothing = torchrun(only_rank_0_saves, 2, tmp_path, tmp_path / "root")
    assert error[:3] == ("RankFailedError", 1, "a")
    assert nothing == []


def test_an_import_at_the_end_of_a_program(tmp_path: Path) -> None:
    """Python takes nothing any more then that is to be done at the end."""
    xla_ckpt.save(tmp_path, "a", {"w": torch.ones(2)})
    code = """
import atexit, sys, threading

@atexit.register
def look():
    import xla_ckpt
    print(xla_ckpt.list_tags(sys.argv[1]))
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, env=environment())
    assert done.stdout == "['a']\n", done.stderr


def a_worker_ends(rank: int, root: Path) -> str | None:
    xla_ckpt.save(root, "a", {"w": torch.ones(2)}, options=NEVER)
    if (worker := os.fork()) == 0:
        import threading

        threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing ends its processes
        os._exit(0)
    assert os.waitpid(worker, 0)[1] == 0
    return xla_ckpt.save(root, "b", {"w": torch.ones(2)}, options=NEVER).result().tag


def test_a_worker_that_a_rank_forks_is_not_that_rank(tmp_path: Path) -> None:
    assert run_on_ranks(a_worker_ends, 2, tmp_path) == ["b", "b"]
