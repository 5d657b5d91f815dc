"""neuron_compat.nxd in place of neuronx-distributed: a job of TP 2 x DP 2 with ZeRO-1 trains, saves and resumes.

N1 to N12 are defects of neuronx-distributed's own checkpoints, which these calls must not have.
"""

from __future__ import annotations

import argparse
import inspect
import os
from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest
import torch
import torch.distributed as dist
import torch_xla

import neuron_compat
import neuron_compat.nxd as nxd
import xla_ckpt
from neuron_compat.emulated import collectives
from neuron_compat.nxd.optimizer import NeuronZero1Optimizer
from neuron_compat.nxd.parallel_layers import parallel_state as ps
from tests.jobs import run_on_ranks
from tests.neuron.training import (
    Split,
    Whole,
    begin,
    build,
    falling,
    frozen,
    groups,
    train,
    train_whole,
    true,
)
from tests.same import differences

pytestmark = pytest.mark.xla

Truth = dict[str, dict[str, Any]]


def trains_saves_and_resumes(rank: int, root: str) -> None:
    begin()
    truth = saved_in_training(root)
    resumed(root, truth)
    goes_on(root, truth)
    order_is_the_order_of_commits(rank, root)
    what_does_not_fit(root)
    other_topologies(root)


def saved_in_training(root: str) -> Truth:
    """Train with saves in flight; the state at the call of each, by tag."""
    model, optimizer, scheduler = build(0)
    whole = Whole(0)
    plain = torch.optim.AdamW(groups(whole), lr=1e-2)
    plain_scheduler = falling(plain)
    truth = {}
    content = {"step": 0, "list": [torch.arange(3.0), (torch.ones(2), "x")]}
    for step in range(6):
        norm = train(model, optimizer, scheduler, step)
        assert abs(train_whole(whole, plain, plain_scheduler, step) - norm) < 1e-4
        if step % 2:
            tag = f"step_{step + 1}"
            model.inv_freq.fill_(step)
            torch_xla.sync()
            content["step"] = step + 1
            truth[tag] = frozen(model, optimizer, scheduler)
            saved = nxd.save_checkpoint(
                root, tag=tag, model=model, optimizer=optimizer, scheduler=scheduler, user_content=content,
                async_save=True, num_kept_ckpts=2, use_xser=step == 3,
            )  # fmt: skip
            assert saved is None
            content["step"] = -1  # N6: neither this nor the next step reaches the save
    nxd.finalize_checkpoint()
    local = collectives._get_own_chunk(whole.up.weight.detach(), 0)
    assert torch.allclose(model.up.weight.detach().cpu(), local, atol=1e-5)
    assert xla_ckpt.list_tags(root) == ["step_4", "step_6"]
    assert nxd.has_checkpoint(root)
    return truth


def resumed(root: str, truth: Truth) -> None:
    for seed, tag, options in ((1, "step_4", {}), (2, None, {}), (3, None, {"save_master_weights": True})):
        fresh = build(seed, **options)
        found = nxd.load_checkpoint(root, tag=tag, model=fresh[0], optimizer=fresh[1], scheduler=fresh[2])
        want = truth[tag or "step_6"]
        # N2: the buffer is among them; N6: Adam's step is that of the call
        assert not differences(true(frozen(*fresh)), true(want), order=False)
        # N8: tensors in lists
        assert found["step"] == int((tag or "step_6")[5:]), found
        assert torch.equal(found["list"][0], torch.arange(3.0))
        assert torch.equal(found["list"][1][0], torch.ones(2))
        assert type(found["list"][1]) is tuple
        assert found["list"][1][1] == "x"
        # N1: a step with lr 0 and without decay after a load in one call moves no weight
        before = frozen(fresh[0])
        if tag is None:
            for group in fresh[1].param_groups:
                group["lr"], group["weight_decay"] = 0.0, 0.0
            train(*fresh, 50)
            assert not differences(true(frozen(fresh[0])), true(before), order=False)


def goes_on(root: str, truth: Truth) -> None:
    """The loss of a resumed run goes on as if nothing had happened."""
    again = build(4)
    nxd.load_checkpoint(root, "step_4", *again)
    for step in (4, 5):
        train(*again, step)
    again[0].inv_freq.fill_(5)
    torch_xla.sync()
    assert not differences(true(frozen(*again)), true(truth["step_6"]), order=False)


def order_is_the_order_of_commits(rank: int, root: str) -> None:
    """N11: whatever the time stamps; and keeping none is an error."""
    if rank == 0:
        for folder, _, files in os.walk(f"{root}/step_4"):
            for name in [folder, *(os.path.join(folder, f) for f in files)]:
                os.utime(name, (4e9, 4e9))
    dist.barrier()
    assert nxd.load_checkpoint(root)["step"] == 6
    with pytest.raises(xla_ckpt.UsageError, match="num_kept_ckpts=0"):
        nxd.save_checkpoint(root, "step_8", build(5)[0], num_kept_ckpts=0)
    assert xla_ckpt.list_tags(root) == ["step_4", "step_6"]


def what_does_not_fit(root: str) -> None:
    """N12: is an error on all ranks, and changes nothing."""
    for other in ({"inner": 20}, {"hidden": 10}):
        wrong = build(6, **other)
        before = frozen(*wrong)
        with pytest.raises(xla_ckpt.IncompatibleCheckpointError) as caught:
            nxd.load_checkpoint(root, None, *wrong)
        assert isinstance(caught.value, ValueError)
        assert not differences(frozen(*wrong), before, order=False)


def gathered(model: torch.nn.Module) -> list[torch.Tensor]:
    parts = [
        collectives._gather_along_dim(p.detach(), p.partition_dim).cpu()
        if hasattr(p, "partition_dim")
        else p.detach().cpu()
        for p in model.parameters()
    ]
    return [parts[0][:13], *parts[1:]]


def other_topologies(root: str) -> None:
    """By the same call."""
    saved = build(7)
    nxd.load_checkpoint(root, None, *saved)
    expected = gathered(saved[0])
    for tp in (1, 4):
        ps.destroy_model_parallel()
        ps.initialize_model_parallel(tensor_model_parallel_size=tp)
        moved = build(8)
        nxd.load_checkpoint(root, None, *moved)
        assert all(map(torch.equal, gathered(moved[0]), expected))
        nxd.save_checkpoint(root, f"tp_{tp}", *moved)


def test_train_save_and_resume(tmp_path: Path) -> None:
    run_on_ranks(trains_saves_and_resumes, 4, str(tmp_path / "run"), xla=True)
    for tag in ("step_4", "step_6", "tp_1", "tp_4"):
        assert xla_ckpt.verify(tmp_path / "run", tag).ok
    whole: dict[str, Any] = {}
    nxd.load_checkpoint(tmp_path / "run", "tp_4", model=whole)
    assert whole["embed.weight"].shape == (13, 8)
    assert whole["up.weight"].shape == (16, 8)


def as_the_developer_guide_has_it(rank: int, root: str) -> None:
    """The calls of neuronx-distributed's "Developer guide for save/load checkpoint"."""
    begin()
    args = argparse.Namespace(checkpoint_dir=root, loading_step=7, lr=0.1, name="run")
    total_steps, batch_idx = 7, 3
    model, optimizer, lr_scheduler = build(0)
    train(model, optimizer, lr_scheduler, 0)
    nxd.save_checkpoint(
        args.checkpoint_dir,  # checkpoint path
        tag=f"step_{total_steps}",  # tag, sub-directory under checkpoint path
        model=model,
        optimizer=optimizer,
        scheduler=lr_scheduler,
        user_content={"total_steps": total_steps, "batch_idx": batch_idx, "cli_args": args.__dict__},
        use_xser=True,
        async_save=True,
    )
    want = frozen(model, optimizer, lr_scheduler)
    model, optimizer, lr_scheduler = build(1)
    user_content = nxd.load_checkpoint(
        args.checkpoint_dir,  # checkpoint path
        tag=f"step_{args.loading_step}",  # tag
        model=model,
        optimizer=optimizer,
        scheduler=lr_scheduler,
    )
    nxd.finalize_checkpoint()
    assert not differences(true(frozen(model, optimizer, lr_scheduler)), true(want), order=False)
    assert user_content == {"total_steps": 7, "batch_idx": 3, "cli_args": vars(args)}
    low_precision(rank, root)


def low_precision(rank: int, root: str) -> None:
    """With master weights: N2 (buffers), and the masters themselves."""

    def low(seed: int) -> tuple[Split, Any, Any]:
        model = Split(seed).to(torch.bfloat16).to("xla")
        model.inv_freq = torch.full((3,), float(seed), device="xla")
        optimizer = NeuronZero1Optimizer(
            groups(model), torch.optim.AdamW, save_master_weights=True, pin_layout=False, lr=1e-2
        )
        return model, optimizer, falling(optimizer)

    def masters(optimizer: Any) -> list[torch.Tensor]:
        return [v.detach().cpu().clone() for v in optimizer.state_dict()["sharded_master_weights"].values()]

    first = low(3)
    train(*first, 0)
    want, want_masters = frozen(*first), masters(first[1])
    nxd.save_checkpoint(
        root, "low", *first, num_kept_ckpts=None, use_zero1_dcp=True, avoid_saving_lower_precision_weights=True
    )
    second = low(4)
    nxd.load_checkpoint(root, "low", *second, use_zero1_dcp=True)
    assert not differences(true(frozen(*second)), true(want), order=False)
    assert second[0].inv_freq.tolist() == [3.0] * 3
    embed = next(i for i, v in enumerate(want_masters) if v.shape[0] == 4 and v.dim() == 2)
    for i, (a, b) in enumerate(zip(masters(second[1]), want_masters, strict=True)):
        last = i == embed and rank == 3  # its last row is padding
        assert torch.equal(a[:-1] if last else a, b[:-1] if last else b), i
        assert a.dtype == torch.float32


def test_samples_of_the_developer_guide(tmp_path: Path) -> None:
    run_on_ranks(as_the_developer_guide_has_it, 4, str(tmp_path / "run"), xla=True)


def test_signatures_are_those_of_neuronx_distributed() -> None:
    save = inspect.signature(nxd.save_checkpoint).parameters
    own = {n for n, p in save.items() if p.kind is not p.POSITIONAL_OR_KEYWORD}
    assert own == {"layout", "more"}
    assert [(n, p.default) for n, p in save.items() if n not in own][2:] == [
        ("model", None), ("optimizer", None), ("scheduler", None), ("user_content", None), ("num_workers", 8),
        ("use_xser", False), ("num_kept_ckpts", None), ("async_save", False), ("zero1_optimizer", False),
        ("use_zero1_dcp", False), ("avoid_saving_lower_precision_weights", False),
    ]  # fmt: skip
    assert list(save)[:2] == ["checkpoint_dir_str", "tag"]
    load = inspect.signature(nxd.load_checkpoint).parameters.values()
    assert [(p.name, p.default) for p in load if p.kind is p.POSITIONAL_OR_KEYWORD][1:] == [
        ("tag", None), ("model", None), ("optimizer", None), ("scheduler", None), ("num_workers", 8), ("strict", True),
        ("use_zero1_dcp", False),
    ]  # fmt: skip


def test_further_arguments_are_those_of_the_library(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3).bfloat16()
    nxd.save_checkpoint(tmp_path, "step", model, pinned=True)
    assert not xla_ckpt.Checkpoints(tmp_path).pin("step"), "it is pinned"
    wanted = torch.nn.Linear(2, 3)
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="cast=True"):
        nxd.load_checkpoint(tmp_path, model=wanted)
    nxd.load_checkpoint(tmp_path, model=wanted, cast=True)
    assert torch.equal(wanted.weight, model.weight.float())
    with pytest.raises(TypeError, match="did you mean 'use_xser'"):
        nxd.save_checkpoint(tmp_path, "step", model, use_xsr=True)
    with pytest.raises(TypeError, match="did you mean 'strict'"):
        nxd.load_checkpoint(tmp_path, model=model, strct=False)


def test_one_process_without_a_job(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no "):  # NoCheckpointError, which scripts for NxD catch as this
        nxd.load_checkpoint(tmp_path)
    # N8: tensors inside of lists, of dicts given as model and optimizer
    optimizer = {
        "state": {0: {"moments": [torch.ones(2), torch.zeros(3)]}},
        "param_groups": [{"lr": torch.tensor(0.5)}],
    }
    neuron_compat.save_checkpoint(
        checkpoint_dir_str=tmp_path, tag="a", model={"w": torch.arange(4.0)}, optimizer=optimizer, use_zero1_dcp=True,
        zero1_optimizer=True, avoid_saving_lower_precision_weights=True,
    )  # fmt: skip
    model: dict[str, Any] = {}
    found: dict[str, Any] = {}
    assert neuron_compat.load_checkpoint(tmp_path, model=model, optimizer=found) is None
    assert torch.equal(model["w"], torch.arange(4.0))
    assert torch.equal(found["state"][0]["moments"][1], torch.zeros(3))
    assert found["param_groups"][0]["lr"].item() == 0.5
    with pytest.raises(xla_ckpt.InvalidTagError, match="empty"):
        nxd.save_checkpoint(tmp_path)
    nxd.save_checkpoint(tmp_path, 10, {"w": torch.zeros(1)})  # type: ignore[arg-type]
    assert xla_ckpt.list_tags(tmp_path) == ["a", "10"]
    nxd.finalize_checkpoint()


def groups_of_the_optimizer(rank: int, root: str) -> None:
    neuron_compat.emulate()
    with pytest.raises(AssertionError, match="initialize_model_parallel"):
        build(0)
    with pytest.raises(RuntimeError, match="initialize_model_parallel"):
        NeuronZero1Optimizer(torch.nn.Linear(2, 2).to("xla").parameters(), torch.optim.SGD, lr=0.1)
    ps.initialize_model_parallel(context_parallel_size=2)
    options = {"pin_layout": False, "lr": 0.1}
    model = torch.nn.Linear(8, 8).to("xla")
    optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, **options)
    # ranks of one context hold the same weights, and a part of the states each; N3: none is lost
    assert optimizer.sharding_groups == [[0, 1, 2, 3]]
    assert optimizer.base_optimizer.param_groups[0]["params"][0].shape[0] == 2
    model(torch.ones(1, 8, device="xla")).sum().backward()
    optimizer.step()
    for p in model.parameters():
        dist.broadcast(held := p.detach().cpu(), 0)
        p.data.copy_(held)
    optimizer.init_zero()
    model(torch.ones(1, 8, device="xla")).sum().backward()
    optimizer.step()

    def moment() -> torch.Tensor:
        inner = optimizer.base_optimizer
        return inner.state[inner.param_groups[0]["params"][0]]["exp_avg"]

    moment().fill_(float(rank))
    torch_xla.sync()
    nxd.save_checkpoint(root, "cp", model, optimizer)
    moment().fill_(-1.0)
    with TestCase().assertNoLogs("xla_ckpt.state", "WARNING"):  # it is AdamW before and after the load
        nxd.load_checkpoint(root, "cp", model, optimizer)
    assert (moment() == rank).all(), moment()
    ps.destroy_model_parallel()
    ps.initialize_model_parallel(expert_model_parallel_size=2)
    model.weight.expert_model_parallel = True
    with pytest.raises(xla_ckpt.UsageError, match="experts"):
        NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, lr=0.1)


def test_groups_of_the_zero1_optimizer(tmp_path: Path) -> None:
    run_on_ranks(groups_of_the_optimizer, 4, str(tmp_path / "run"), xla=True)
