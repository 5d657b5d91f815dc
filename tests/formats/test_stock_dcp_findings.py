"""What stock DCP of the installed version does in cases that matter: facts, by which ours is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.formats import stock_dcp_findings as stock
from tests.formats.stock_dcp_jobs import EIGHT
from tests.jobs import run_alone, run_on_ranks


@pytest.mark.xla
def test_async_save_of_xla_tensors_fails(tmp_path: Path) -> None:
    raised = run_alone(stock.async_save_of_xla_tensors, tmp_path, xla=True)
    assert raised == "RuntimeError: Attempted to call copy_() on an invalid python storage."
    assert not (tmp_path / ".metadata").exists()


@pytest.mark.xla
def test_one_of_two_tensor_parallel_shards_is_lost(tmp_path: Path) -> None:
    first, second = run_on_ranks(stock.tensor_parallel_shards, 2, tmp_path, xla=True)
    assert first == second
    assert first in ([1.0], [2.0])


@pytest.mark.xla
def test_one_of_eight_shards_is_left_in_safetensors(tmp_path: Path) -> None:
    assert run_alone(stock.spmd_to_hugging_face, tmp_path, xla=True, env=EIGHT) == (2, 16)


@pytest.mark.xla
def test_an_array_with_copies_is_lost_by_spmd(tmp_path: Path) -> None:
    saved, kept = run_alone(stock.spmd_with_copies, tmp_path, xla=True, env=EIGHT)
    assert saved - kept == {"partly"}


def test_a_full_disk_is_not_noticed_in_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raised, kept = stock.disk_full_in_a_worker(tmp_path, monkeypatch)
    assert raised == ""
    assert kept == 4


def test_a_flipped_bit_is_loaded(tmp_path: Path) -> None:
    assert stock.load_with_a_flipped_bit(tmp_path) == ("", 1)


def test_ranks_are_loaded_from_different_saves(tmp_path: Path) -> None:
    for why, values in run_on_ranks(stock.overwrite_and_die, 2, tmp_path):
        assert "this rank is dead" in why
        assert values == [2.0] * 4 + [1.0] * 4


def test_a_save_that_never_finished_is_loaded(tmp_path: Path) -> None:
    why, values = stock.overwrite_without_finish(tmp_path)
    assert "the process is dead" in why
    assert values == {2.0}


@pytest.mark.parametrize("kind", ["metadata", "item"])
def test_a_checkpoint_runs_code(kind: str, tmp_path: Path) -> None:
    assert stock.load_a_trapped_checkpoint(tmp_path / "a", tmp_path / "sprung", kind)


@pytest.mark.skipif(torch.__version__ >= "2.10", reason="it is about 2.9")
def test_whole_states_come_into_wrong_rows() -> None:
    wrong = run_on_ranks(stock.set_uneven_rows, 4)
    assert {name for of_rank in wrong for name in of_rank} == {"odd.weight"}


def test_bytes_lie_in_the_order_of_the_memory(tmp_path: Path) -> None:
    assert stock.memory_order(tmp_path) == ([0.0, 3.0, 1.0, 4.0, 2.0, 5.0], (1, 2), "torch.contiguous_format")
