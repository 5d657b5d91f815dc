"""The resume that optimum-neuron's trainer refuses: model, optimizer and scheduler, on another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.formats.optimum import HEAD, MOMENTS, Job, write_checkpoint
from tests.jobs import run_on_ranks
from xla_ckpt import Mesh

SAVED = Job(tp=4, copies=2, zero1=True, dp=2)
RESUMED = Job(tp=2, copies=2)


def model_of(job: Job, rank: int, copies: int) -> torch.nn.Module:
    """A rank's model without values, with what neuronx-distributed's layers say of themselves."""
    model = torch.nn.Module()
    for name, value in job.local(rank).items():
        *path, last = name.split(".")
        parent: Any = model
        for step in path:
            if not hasattr(parent, step):
                parent.add_module(step, torch.nn.Module())
            parent = getattr(parent, step)
        parameter: Any = torch.nn.Parameter(torch.zeros_like(value))
        if last == "weight_qkv":  # its parameter lost its attributes
            parent.q_output_size_per_partition = job.heads * HEAD // job.tp
            parent.kv_output_size_per_partition = job.kv_heads * copies * HEAD // job.tp
            parent.kv_size_multiplier, parent.fuse_qkv = copies, True
        elif not path[-1].endswith("norm"):
            parameter.tensor_model_parallel = True
            parameter.partition_dim = int(path[-1] in ("o_proj", "down_proj"))
            parameter.partition_stride = 2 if path[-1] == "gate_up_proj" else 1
        parent.register_parameter(last, parameter)
    return model


def resumes(rank: int, root: str) -> dict[str, Any]:
    job = RESUMED
    model = model_of(job, rank, job.copies)
    named = dict(model.named_parameters())
    decayed, bare = job.groups(0)
    optimizer = torch.optim.AdamW(
        [{"params": [named[n] for n in decayed], "weight_decay": 0.1}, {"params": [named[n] for n in bare]}]
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loaded = xla_ckpt.load_checkpoint(root, None, model, optimizer, scheduler, mesh=Mesh(tp=2))
    local = {what: job.local(rank, what) for what in ("weight", *MOMENTS)}
    for name, parameter in named.items():
        assert torch.equal(parameter.detach(), local["weight"][name]), name
        for what in MOMENTS:
            assert torch.equal(optimizer.state[parameter][what], local[what][name]), (name, what)
        assert optimizer.state[parameter]["step"] == 7
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.25, 0.0]
    before = named["model.norm.weight"].detach().clone()
    for parameter in named.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    scheduler.step()
    assert not torch.equal(named["model.norm.weight"].detach(), before)
    return {"tag": loaded.report.tag, "last_epoch": scheduler.last_epoch, **loaded.user_content["trainer_state"]}


def test_a_training_goes_on_over_another_tp(tmp_path: Path) -> None:
    write_checkpoint(SAVED, tmp_path, 5)
    write_checkpoint(SAVED, tmp_path, 10)
    for found in run_on_ranks(resumes, 2, str(tmp_path)):
        assert (found["tag"], found["last_epoch"], found["global_step"]) == ("checkpoint-10", 11, 10)


def other_heads(rank: int, root: str) -> str:
    model = model_of(Job(tp=2, copies=1), rank, copies=1)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError) as caught:
        xla_ckpt.load_checkpoint(root, None, model, mesh=Mesh(tp=2))
    assert not any(parameter.detach().any() for parameter in model.parameters())
    return str(caught.value)


def test_heads_in_another_order_are_refused(tmp_path: Path) -> None:
    """With one copy of the keys each rank would have other queries beside its keys than they were trained with."""
    write_checkpoint(SAVED, tmp_path, 10, optimizer=False)
    first, second = run_on_ranks(other_heads, 2, str(tmp_path))
    assert first == second
    assert "expected kv_size_multiplier 2, as stored, found 1" in first
