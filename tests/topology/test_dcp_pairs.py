"""A few of the pairs of benchmarks/dcp_pairs.py: who loads what whom saved, among two ranks and one process.

Pairs that tests/formats/test_dcp_writing.py and tests/topology/test_dcp_jobs.py have not. That each kind saves and
loads on its own is tested sooner, in tests/dcp/test_ranks.py.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from benchmarks import dcp_pairs
from benchmarks.dcp_pairs import KINDS, Kind, Pair, Saved
from tests.jobs import run_alone, run_on_ranks

TWO = ("ddp", "fsdp1", "tp")
VERSION = "this"


def save(rank: int, root: Path) -> list[str]:
    warnings.simplefilter("ignore")
    return [wrong for kind in TWO for wrong in dcp_pairs.save_all(kind, VERSION, root).values() if wrong]


def load(rank: int, root: Path, kinds: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """(kind of job, program, what went wrong) of what did."""
    warnings.simplefilter("ignore")
    saved = [Saved(saver, kind, VERSION) for kind in TWO for saver in dcp_pairs.savers(KINDS[kind])]
    assert len(saved) == len(TWO) * 3
    return [
        (into, name, wrong)
        for into in kinds
        for outcome in dcp_pairs.load_all(into, saved, root)
        for name, wrong in outcome.items()
        if wrong
    ]


def alone(root: Path) -> list[tuple[str, str, str]]:
    return load(0, root, ("one",))


@pytest.mark.timeout(600)
def test_wrapped_and_tensor_parallel_modules(tmp_path: Path) -> None:
    assert run_on_ranks(save, 2, tmp_path, timeout=500) == [[], []]
    for failed in run_on_ranks(load, 2, tmp_path, TWO, timeout=500):
        # Stock's planner fails if FSDP1 leaves a rank without rows of a tensor (see xla_ckpt.dcp.state_dicts).
        assert {(into, program) for into, program, _ in failed} == {("fsdp1", "stock `dcp.load`")}
        assert {wrong for _, _, wrong in failed} == {
            "RuntimeError: Missing key in checkpoint state_dict: optimizer.param_groups."
        }
    assert run_alone(alone, tmp_path, timeout=500) == []


def test_the_document_says_what_failed() -> None:
    saved = Saved("stock `dcp.save`", "one", "2.9")
    pairs = [Pair(saved, name, kind, "2.9", wrong) for name, kind, wrong in (
        ("stock `dcp.load`", "one", ""), ("`load_checkpoint`", "one", ""), ("stock `dcp.load`", "ddp", "KeyError: 'a'"),
    )]  # fmt: skip
    lost = Saved("stock `dcp.save`", "xla_tp", "2.9")
    text = dcp_pairs.document({saved: "", lost: "OSError: b"}, pairs)
    assert "| one process | S L | ~~S~~ |" in text
    assert "* stock `dcp.load` of torch 2.9, from torch 2.9's one process, into DDP 2: `KeyError: 'a'`" in text
    assert "did not save it: `OSError: b`" in text
    assert isinstance(KINDS["one"], Kind)
