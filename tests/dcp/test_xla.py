"""DCP's calls on XLA tensors: saves in the background that are exact, loads in place, and SPMD."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import xla_ckpt.dcp as dcp
from tests.jobs import run_alone
from tests.same import same


def training() -> tuple[Any, Any, Any]:
    import torch_xla

    device = torch_xla.device()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).to(device)
    model.half_precision = torch.nn.Parameter(torch.randn(7, 3, dtype=torch.bfloat16, device=device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        (model(torch.ones(4, 64, device=device)).sum() + model.half_precision.float().sum()).backward()
        optimizer.step()
        torch_xla.sync()

    step()
    return model, optimizer, step


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 5}


def on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {k: on_cpu(v) for k, v in value.items()}
    return [on_cpu(v) for v in value] if isinstance(value, list | tuple) else value


def zeros(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {k: zeros(v) for k, v in value.items()}
    return [zeros(v) for v in value] if isinstance(value, list | tuple) else value


def saves_in_the_background(root: Path) -> None:
    warnings.simplefilter("ignore")
    model, optimizer, step = training()
    for name in ("ours", "stock"):
        truth = on_cpu(state_of(model, optimizer))
        if name == "ours":
            future = dcp.async_save(state_of(model, optimizer), checkpoint_id=root / name)
        else:
            future = stock.async_save(
                state_of(model, optimizer), storage_writer=dcp.StorageWriter(root / name),
                async_stager=dcp.AsyncStager(), no_dist=True,
            )  # fmt: skip
        for _ in range(5):
            step()
        future.result()
        assert not same(on_cpu(state_of(model, optimizer))["model"], truth["model"]), "the steps changed nothing"
        target = zeros(truth)
        stock.load(target, checkpoint_id=root / name)
        assert same(on_cpu(target), truth)


@pytest.mark.xla
def test_saves_in_the_background_are_exact(tmp_path: Path) -> None:
    run_alone(saves_in_the_background, tmp_path, xla=True)


def loads_in_place(root: Path) -> None:
    import torch_xla

    warnings.simplefilter("ignore")
    model, optimizer, step = training()
    truth = on_cpu(state_of(model, optimizer))
    dcp.save(state_of(model, optimizer), checkpoint_id=root / "a")
    parameters = [*model.parameters()]
    for load in (
        lambda held: dcp.load(held, checkpoint_id=root / "a"),
        lambda held: stock.load(held, storage_reader=dcp.StorageReader(root / "a")),
    ):
        for _ in range(3):
            step()
        held = state_of(model, optimizer)
        load(held)
        torch_xla.sync()
        assert same(on_cpu(held), truth)
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        assert same(on_cpu(model.state_dict()), truth["model"]), "the parameters themselves have changed"
    step()  # the loaded buffers can be trained on
    stock.save({"w": torch.randn(5, 3).t()}, checkpoint_id=root / "transposed")
    held = {"w": torch.zeros(3, 5, device=torch_xla.device())}
    dcp.load(held, checkpoint_id=root / "transposed")
    plain = {"w": torch.zeros(3, 5)}
    stock.load(plain, checkpoint_id=root / "transposed")
    assert same(held, plain)
    held = {"w": torch.zeros(3, 5, device=torch_xla.device(), dtype=torch.bfloat16)}
    dcp.load(held, checkpoint_id=root / "transposed")
    assert same(held["w"], plain["w"].bfloat16())


@pytest.mark.xla
def test_loads_are_in_place(tmp_path: Path) -> None:
    run_alone(loads_in_place, tmp_path, xla=True)


def stalls(root: Path) -> list[float]:
    """Seconds that each of some saves in the background of 512 MB takes to return."""
    import torch_xla

    warnings.simplefilter("ignore")
    device = torch_xla.device()
    held = {f"w{i}": torch.full((1024, 4096), float(i), device=device) for i in range(32)}
    torch_xla.sync(wait=True)
    found = []
    for i in range(4):
        began = time.perf_counter()
        future = stock.async_save(
            held, storage_writer=dcp.StorageWriter(root / "a"), async_stager=dcp.AsyncStager(), no_dist=True
        )
        found.append(time.perf_counter() - began)
        future.result()
    return found


@pytest.mark.xla
def test_the_stall_of_half_a_gigabyte(tmp_path: Path) -> None:
    # The best of several: the others tell how busy this machine is.
    assert min(run_alone(stalls, tmp_path, xla=True)) <= 0.1


def spmd(root: Path) -> None:
    import numpy as np
    import torch_xla
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr
    from torch_xla.experimental.distributed_checkpoint import SPMDLoadPlanner, SPMDSavePlanner

    warnings.simplefilter("ignore")
    xr.use_spmd()
    device = torch_xla.device()
    meshes = [xs.Mesh(np.arange(8), shape, ("x", "y")) for shape in ((8, 1), (2, 4))]

    def sharded(mesh: Any, fill: float | None = None) -> dict[str, Any]:
        torch.manual_seed(0)
        rows, both, whole = torch.randn(16, 8), torch.randn(10, 8), torch.randn(5)
        made = [t if fill is None else torch.full_like(t, fill) for t in (rows, both, whole)]
        rows, both, whole = (t.to(device) for t in made)
        xs.mark_sharding(rows, mesh, ("x", None))
        xs.mark_sharding(both, mesh, ("x", "y"))
        torch_xla.sync()
        return {"model": {"rows": rows, "both": both, "whole": whole}, "n": 3}

    truth = on_cpu(sharded(meshes[0]))
    ways = {
        "plain": lambda p: dcp.save(sharded(meshes[0]), checkpoint_id=p),
        "planner": lambda p: dcp.save(sharded(meshes[0]), checkpoint_id=p, planner=SPMDSavePlanner()),
        "async": lambda p: dcp.async_save(sharded(meshes[0]), checkpoint_id=p).result(),
        "async-planner": lambda p: dcp.async_save(
            sharded(meshes[0]), checkpoint_id=p, planner=SPMDSavePlanner()
        ).result(),
        "stock": lambda p: stock.save(sharded(meshes[0]), checkpoint_id=p, planner=SPMDSavePlanner()),
    }
    for name, save in ways.items():
        save(root / name)
        for loader in (stock, dcp):
            target = zeros(truth)
            loader.load(target, checkpoint_id=root / name)
            assert same(on_cpu(target), truth), (name, loader)
        for planner in (None, SPMDLoadPlanner()):
            held = sharded(meshes[1], -1.0)
            dcp.load(held, checkpoint_id=root / name, planner=planner)
            torch_xla.sync()
            assert same(on_cpu(held), truth), (name, planner)


@pytest.mark.xla
def test_eight_spmd_devices(tmp_path: Path) -> None:
    run_alone(spmd, tmp_path, xla=True, env={"CPU_NUM_DEVICES": "8"})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_stager_keeps_what_was_there_once(tmp_path: Path) -> None:
    w = torch.ones(3)
    held = {"a": w, "b": [w, {"c": 1}], "d": (w, torch.zeros(0))}
    staged = dcp.AsyncStager().stage(held)
    w.zero_()
    held["b"][1]["c"] = 2
    assert staged["a"] is staged["b"][0] is staged["d"][0]
    assert staged["a"].tolist() == [1, 1, 1]
    assert staged["b"][1] == {"c": 1}
    assert isinstance(staged["d"], tuple)
    stager = dcp.AsyncStager()
    assert not stager.should_synchronize_after_execute
    stager.close()
