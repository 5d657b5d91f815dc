"""Tensor-parallel state in plain tensors, made global for any call of DCP's."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict

import xla_ckpt
import xla_ckpt.dcp as dcp
from tests.jobs import run_on_ranks


class Layer(torch.nn.Module):
    """A column-parallel and a row-parallel weight, with neuronx-distributed's attributes, and what is whole."""

    def __init__(self, rank: int, world: int, device: Any = "cpu") -> None:
        super().__init__()
        full = whole()
        self.up = torch.nn.Parameter(full["up"].chunk(world, 0)[rank].clone().to(device))
        self.down = torch.nn.Parameter(full["down"].chunk(world, 1)[rank].clone().to(device))
        # queries, keys and values in one weight: each rank has its part of each
        fused = torch.cat([part.chunk(world, 0)[rank] for part in full["fused"].chunk(3, 0)])
        self.fused = torch.nn.Parameter(fused.clone().to(device))
        self.norm = torch.nn.Parameter(full["norm"].clone().to(device))
        for parameter, dim, stride in ((self.up, 0, 1), (self.down, 1, 1), (self.fused, 0, 3)):
            parameter.tensor_model_parallel = True
            parameter.partition_dim, parameter.partition_stride = dim, stride


def whole() -> dict[str, torch.Tensor]:
    return {
        "up": torch.arange(48.0).reshape(8, 6), "down": torch.arange(48.0).reshape(6, 8) + 100,
        "fused": torch.arange(48.0).reshape(24, 2) + 200, "norm": torch.arange(5.0),
    }  # fmt: skip


def stepped(rank: int, world: int, device: Any = "cpu") -> tuple[Layer, torch.optim.Optimizer]:
    layer = Layer(rank, world, device)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    for parameter in layer.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return layer, optimizer


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(v.cpu(), b[k].cpu()) for k, v in a.items())


def states(optimizer: Any) -> dict[str, torch.Tensor]:
    return {f"{i}.{k}": v for i, held in optimizer.state_dict()["state"].items() for k, v in held.items()}


def saves(rank: int, root: Path, on_xla: bool) -> None:
    device: Any = "cpu"
    if on_xla:
        import torch_xla

        device = torch_xla.device()
    warnings.simplefilter("ignore")
    layer, optimizer = stepped(rank, 2, device)
    held = {"model": layer.state_dict(), "optim": optimizer.state_dict()}

    def view(model: Any, opt: Any, state: Any) -> dict[str, Any]:
        return dcp.sharded(state, model, mesh="tp=2", optimizer=opt)

    made = view(layer, optimizer, held)
    assert isinstance(made["model"]["up"], dcp.GlobalTensor)
    assert made["model"]["norm"] is held["model"]["norm"]
    dcp.save(made, checkpoint_id=root / "ours")
    stock.save(made, checkpoint_id=root / "stock")
    dcp.async_save(made, checkpoint_id=root / "async").result()
    truth, true_states = copy.deepcopy(layer.state_dict()), copy.deepcopy(states(optimizer))
    for loader, name in ((dcp, "ours"), (dcp, "stock"), (stock, "ours"), (stock, "stock"), (dcp, "async")):
        other, its_optimizer = stepped(rank, 2, device)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        target = {"model": other.state_dict(), "optim": its_optimizer.state_dict()}
        for tensor in states(its_optimizer).values():
            tensor.zero_()
        loader.load(view(other, its_optimizer, target), checkpoint_id=root / name)
        assert same(truth, dict(other.named_parameters())), (loader, name)
        assert same(true_states, states(its_optimizer)), (loader, name)


@pytest.mark.parametrize("on_xla", [False, pytest.param(True, marks=pytest.mark.xla)])
def test_tensor_parallel_state_with_any_call(tmp_path: Path, on_xla: bool) -> None:
    run_on_ranks(saves, 2, tmp_path, on_xla, xla=on_xla)
    truth, optimizer = stepped(0, 1)
    for name in ("ours", "stock"):
        target = {"model": {k: torch.zeros_like(v) for k, v in truth.state_dict().items()}}
        with pytest.warns(UserWarning, match="single process"):
            stock.load(target, checkpoint_id=tmp_path / name)
        assert same(target["model"], truth.state_dict()), "one process finds the whole tensors, fused ones in order"


def saves_by_rules(rank: int, root: Path) -> None:
    layer, optimizer = stepped(rank, 2)
    for parameter in layer.parameters():
        vars(parameter).clear()
    model, optim = get_state_dict(layer, optimizer)
    rules = [
        (r"(^|\.)up(\.|$)", ("tp", None)),
        (r"(^|\.)down(\.|$)", (None, "tp")),
        (r"(^|\.)fused(\.|$)", (("tp", 3), None)),
    ]
    made = dcp.sharded({"model": model, "optim": optim}, mesh=xla_ckpt.Mesh(tp=2), shardings=rules)
    stock.save(made, checkpoint_id=root / "a")


def loads_on_four(rank: int, root: Path) -> None:
    layer, optimizer = stepped(rank, 4)
    truth = copy.deepcopy(layer.state_dict())
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    model, optim = get_state_dict(layer, optimizer)
    true_states = copy.deepcopy(states(optimizer))
    for held in optim["state"].values():
        for tensor in held.values():
            tensor.zero_()
    dcp.load(dcp.sharded({"model": model, "optim": optim}, layer, mesh="tp=4"), checkpoint_id=root / "a")
    assert same(truth, dict(layer.named_parameters()))
    loaded = {f"{i}.{k}": v for i, name in enumerate(truth) for k, v in optim["state"][name].items()}
    assert same(true_states, loaded)


def test_another_number_of_tensor_parallel_ranks(tmp_path: Path) -> None:
    run_on_ranks(saves_by_rules, 2, tmp_path)
    run_on_ranks(loads_on_four, 4, tmp_path)


def mistakes(rank: int, root: Path) -> None:
    layer, optimizer = stepped(rank, 2)
    for call, match in (
        (lambda: dcp.sharded(layer.state_dict(), shardings=[("up", ("tp", None))]), "need a mesh"),
        (lambda: dcp.sharded(layer.state_dict(), mesh="tp=4"), "does not fit the job"),
        (lambda: dcp.sharded({"o": optimizer.state_dict()}, layer, mesh="tp=2"), "under numbers"),
        (lambda: dcp.sharded({"up": torch.zeros(3)}, layer, mesh="tp=2"), "another shape"),
    ):
        with pytest.raises(xla_ckpt.UsageError, match=match):
            call()
    made = dcp.sharded(layer.state_dict(), layer, mesh="tp=2")
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="calls of torch.distributed.checkpoint"):
        made["up"].sum()
    assert "held: [" in repr(made["up"])
    dist.barrier()


def test_mistakes(tmp_path: Path) -> None:
    run_on_ranks(mistakes, 2, tmp_path)


WRAPS: tuple[Callable[[torch.nn.Module], Any], ...] = (
    lambda layer: torch.compile(layer, backend="eager"),
    lambda layer: torch.compile(checkpoint_wrapper(layer), backend="eager"),
    checkpoint_wrapper,
    torch.nn.DataParallel,
)


def wrapped(rank: int) -> None:
    layer, _ = stepped(rank, 2)
    for wrap in WRAPS:
        model = torch.nn.Sequential(wrap(layer), torch.nn.Linear(2, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        held = {"model": model.state_dict(), "named": dict(model.named_parameters()), "optim": optimizer.state_dict()}
        made = dcp.sharded(held, model, mesh="tp=2", optimizer=optimizer)
        for part in ("model", "named"):
            shapes = {name.rpartition(".")[2]: value.shape for name, value in made[part].items() if ".up" in name}
            assert shapes == {"up": (8, 6)}
            assert all(
                isinstance(v, dcp.GlobalTensor) == name.endswith(("up", "down", "fused"))
                for name, v in made[part].items()
            )


def test_a_state_dict_of_a_wrapped_model() -> None:
    run_on_ranks(wrapped, 2)


def test_other_things_in_the_place_of_the_arguments() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(xla_ckpt.UsageError, match="no state dict"):
        dcp.sharded(model, model)
    with pytest.raises(xla_ckpt.UsageError, match="no model"):
        dcp.sharded(model.state_dict(), model.state_dict())
    with pytest.raises(xla_ckpt.UsageError, match="no model"):
        dcp.sharded(model.state_dict(), optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(xla_ckpt.UsageError, match="does not fit the job.*init_process_group"):
        dcp.sharded(model.state_dict(), model, "tp=2")


def saves_zero1(rank: int, root: Path, world: int, loads: bool) -> None:
    import torch_xla
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 8).to(torch_xla.device())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=0.1, pin_layout=False, sharding_groups=[list(range(world))],
        grad_clipping=False,
    )  # fmt: skip
    for parameter, shard in zip(model.parameters(), optimizer.base_optimizer.param_groups[0]["params"], strict=True):
        shard.grad = torch.ones_like(shard) * (1 + rank if not loads else 7)
        parameter.grad = torch.ones_like(parameter)
    optimizer.base_optimizer.step()
    torch_xla.sync()
    made = dcp.sharded({"optim": optimizer.state_dict()}, model, mesh=f"dp={world}", optimizer=optimizer)
    if loads:
        dcp.load(made, checkpoint_id=root / "a")
        torch_xla.sync()
        made = dcp.sharded({"optim": optimizer.state_dict()}, model, mesh=f"dp={world}", optimizer=optimizer)
        dcp.save(made, checkpoint_id=root / "again")
    else:
        dcp.save(made, checkpoint_id=root / "a")


@pytest.mark.xla
def test_zero1_of_torch_xla(tmp_path: Path) -> None:
    run_on_ranks(saves_zero1, 2, tmp_path, 2, False, xla=True)
    run_on_ranks(saves_zero1, 4, tmp_path, 4, True, xla=True)
    found = []
    for name in ("a", "again"):
        target = {"optim": {"base_state": {0: {"exp_avg": torch.zeros(8, 6)}, 1: {"exp_avg": torch.zeros(8)}}}}
        with pytest.warns(UserWarning, match="single process"):
            dcp.load(target, checkpoint_id=tmp_path / name)
        found.append(target["optim"]["base_state"])
    assert found[0][0]["exp_avg"][:4].eq(0.1).all()
    assert found[0][0]["exp_avg"][4:].eq(0.2).all()
    assert torch.equal(found[0][0]["exp_avg"], found[1][0]["exp_avg"])
    assert torch.equal(found[0][1]["exp_avg"], found[1][1]["exp_avg"])


def saves_numbered_zero1(rank: int, root: Path) -> None:
    import neuron_compat
    from tests.topology.kinds import build

    neuron_compat.emulate()
    held = build("dp=2 zero1", blank=False)
    state = {"model": held.model.state_dict(), "optimizer": held.optimizer.state_dict()}
    dcp.save(dcp.sharded(state, held.model, held.options["mesh"], optimizer=held.optimizer), checkpoint_id=root / "a")


@pytest.mark.xla
def test_states_of_zero1_by_number_are_loaded_into_any_job(tmp_path: Path) -> None:
    from tests.topology.kinds import build

    run_on_ranks(saves_numbered_zero1, 2, tmp_path, xla=True)
    held = build("dp=1 cpu", blank=True)
    xla_ckpt.load_checkpoint(tmp_path, "a", held.model, held.optimizer)
    assert held.differences() == []
