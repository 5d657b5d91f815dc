"""The older files of ZeRO-1, ``optim.dp_rank_00.tp_rank_00``, as neuronx-distributed's GPT-NeoX scripts use them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from neuron_compat.nxd.optimizer import NeuronZero1Optimizer
from neuron_compat.nxd.parallel_layers import checkpointing
from neuron_compat.nxd.parallel_layers import parallel_state as ps
from neuron_compat.nxd.utils.adamw_fp32_optim_params import AdamW_FP32OptimParams
from tests.jobs import run_on_ranks
from tests.neuron.training import Split, begin, falling, frozen, groups, train
from tests.runs import names_in
from tests.same import differences
from xla_ckpt import CheckpointError, CorruptCheckpointError, IncompatibleCheckpointError, NoCheckpointError, UsageError

pytestmark = pytest.mark.xla


def build(seed: int, **options: Any) -> tuple[Split, Any, Any]:
    model = Split(seed).to("xla")
    optimizer = NeuronZero1Optimizer(groups(model), AdamW_FP32OptimParams, pin_layout=False, lr=1e-2, **options)
    return model, optimizer, falling(optimizer)


def saves_and_resumes(rank: int, root: str) -> None:
    begin()
    for masters in (False, True):
        folder = f"{root}/{masters}"
        model, optimizer, scheduler = build(0, save_master_weights=masters)
        for step in range(2):
            train(model, optimizer, scheduler, step)
        checkpointing.save({"model": model.state_dict(), "scheduler": scheduler.state_dict()}, folder)
        optimizer.save_sharded_state_dict(folder, num_workers_per_step=1)
        train(model, optimizer, scheduler, 2)
        again = build(1, save_master_weights=masters)
        rest = checkpointing.load(folder, again[0])
        again[1].load_sharded_state_dict(folder)
        again[2].load_state_dict(rest["scheduler"])
        train(*again, 2)
        assert not differences(frozen(*again), frozen(model, optimizer, scheduler), order=False)
    refused(rank, root, folder, again)


def refused(rank: int, root: str, folder: str, state: Any) -> None:
    """On all ranks, and nothing has changed."""
    model, optimizer, _ = state
    before = frozen(model, optimizer)
    own = f"optim.dp_rank_{ps.get_data_parallel_rank():02d}.tp_rank_{ps.get_tensor_model_parallel_rank():02d}"
    assert min(os.listdir(folder)) == "optim.dp_rank_00.tp_rank_00"
    mine: Any = torch.load(f"{folder}/{own}", weights_only=True)
    with pytest.raises(NoCheckpointError, match="on as many ranks"):
        optimizer.load_sharded_state_dict(root)
    with pytest.raises(UsageError, match="num_workers_per_step=0"):
        optimizer.save_sharded_state_dict(folder, 0)
    base = mine["base_state"]
    for name, changed, kind in (
        ("rank", {"dp_rank": 5}, "another dp_rank"),
        ("keys", {"base_state": None}, "no state of a ZeRO-1 optimizer"),
        ("groups", {"param_groups": mine["param_groups"][:1]}, "other numbers of parameters"),
        ("shapes", {"shape_info": {**mine["shape_info"], 0: [99]}}, "parameter 0 has another shape"),
        ("dp", {"base_state": {**base, 0: {"step": 1, "exp_avg": torch.zeros(77)}}}, "another number of data-parallel"),
    ):
        wrong = {k: v for k, v in {**mine, **changed}.items() if v is not None}
        if rank == 3:  # on one rank alone
            os.makedirs(f"{root}/{name}", exist_ok=True)
            torch.save(wrong, f"{root}/{name}/{own}")
        else:
            os.makedirs(f"{root}/{name}", exist_ok=True)
            torch.save(mine, f"{root}/{name}/{own}")
        with pytest.raises(IncompatibleCheckpointError if rank == 3 else CheckpointError, match=kind):
            optimizer.load_sharded_state_dict(f"{root}/{name}")
    if rank == 0:
        with open(f"{folder}/{own}", "r+b") as file:
            file.truncate(100)
    with pytest.raises(CorruptCheckpointError if rank == 0 else CheckpointError, match="no whole zip"):
        optimizer.load_sharded_state_dict(folder)
    assert not differences(frozen(model, optimizer), before, order=False)
    ps.destroy_model_parallel()
    ps.initialize_model_parallel(tensor_model_parallel_size=2, context_parallel_size=2)
    with pytest.raises(UsageError, match="1 pipeline-parallel x 2 context-parallel ranks.*Use nxd.save_checkpoint"):
        optimizer.save_sharded_state_dict(folder)


def test_they_resume_and_others_are_refused(tmp_path: Path) -> None:
    run_on_ranks(saves_and_resumes, 4, str(tmp_path), xla=True)
    assert names_in(tmp_path / "False") == [
        "optim.dp_rank_00.tp_rank_00", "optim.dp_rank_00.tp_rank_01", "optim.dp_rank_01.tp_rank_00",
        "optim.dp_rank_01.tp_rank_01", "tp_rank_00_pp_rank_00", "tp_rank_01_pp_rank_00",
    ]  # fmt: skip
    found = torch.load(tmp_path / "False/optim.dp_rank_01.tp_rank_00", weights_only=True)
    assert (found["dp_rank"], found["tp_rank"]) == (1, 0)
    assert {"state", "param_groups", "base_state", "shape_info"} <= found.keys()
