"""Stock DCP reads what stock DCP wrote, on other kinds of parallelism: the jobs that ours is compared by are true."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.formats.stock_dcp import differences
from tests.formats.stock_dcp_jobs import (
    EIGHT,
    RANKS,
    contents,
    load_by_spmd,
    load_by_stock,
    save_by_spmd,
    save_by_stock,
    spmd_contents,
    with_other_torch,
)
from tests.jobs import run_alone, run_on_ranks

OTHER = os.environ.get("XLA_CKPT_OTHER_TORCH")
"""The interpreter of another version of torch, if there is one."""
PAIRS = [
    ("fsdp1", "plain"), ("plain", "fsdp2"), ("fsdp2", "tp"), ("tp", "fsdp1"), ("ddp", "hsdp"), ("hsdp", "ddp"),
    ("fsdp2_on_4", "fsdp2"), ("tp_fsdp2", "fsdp2"), ("fsdp2", "tp_fsdp2"),
]  # fmt: skip
QUICK = PAIRS[:2]
"""Nothing of ours is in these jobs: two of them show that a change here has not broken them."""


def whole(path: Path, wanted: dict[str, torch.Tensor]) -> list[str]:
    """What stock DCP reads differently, in one process."""
    found = {key: torch.zeros_like(tensor) for key, tensor in wanted.items()}
    dcp.load(found, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return differences(found, wanted)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [pytest.param(*pair, id="-".join(pair), marks=() if pair in QUICK else pytest.mark.rest) for pair in PAIRS],
)
def test_a_kind_reads_another(saved: str, loaded: str, tmp_path: Path) -> None:
    run_on_ranks(save_by_stock, RANKS[saved], tmp_path, saved)
    assert whole(tmp_path, contents()) == []
    assert run_on_ranks(load_by_stock, RANKS[loaded], tmp_path, loaded) == [[]] * RANKS[loaded]


def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    run_on_ranks(save_by_stock, 1, tmp_path, "plain", 5)
    ((*wrong,),) = run_on_ranks(load_by_stock, 1, tmp_path, "plain", 6)
    assert {"net1.weight", "net1.bias.exp_avg", "low.weight.exp_avg_sq", "odd.weight.step"} <= set(wrong)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")
@pytest.mark.xla
def test_devices_read_devices(tmp_path: Path) -> None:
    run_alone(save_by_spmd, tmp_path, xla=True, env=EIGHT)
    assert whole(tmp_path, spmd_contents()) == []
    assert run_alone(load_by_spmd, tmp_path, xla=True, env=EIGHT) == []


@pytest.mark.skipif(OTHER is None, reason="XLA_CKPT_OTHER_TORCH names no interpreter with another torch")
def test_another_torch_reads_ours_and_its_own(tmp_path: Path) -> None:
    assert OTHER is not None
    run_on_ranks(save_by_stock, 2, tmp_path / "present", "fsdp2")
    assert with_other_torch(OTHER, "load", tmp_path / "present", "tp") == []
    with_other_torch(OTHER, "save", tmp_path / "other", "fsdp2")
    assert with_other_torch(OTHER, "load", tmp_path / "other", "fsdp1") == []
