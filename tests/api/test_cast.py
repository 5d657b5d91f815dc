"""Loads into other floating-point types, and loads into which nothing fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import xla_ckpt
from tests.jobs import run_on_ranks
from tests.xla import begin
from xla_ckpt import IncompatibleCheckpointError


def trained(*sizes: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(*sizes)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, sizes[0])).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_takes_values_in_its_own_type(tmp_path: Path, dtype: torch.dtype) -> None:
    model, _ = trained(8, 4)
    xla_ckpt.save_checkpoint(tmp_path, "a", model)
    target = torch.nn.Linear(8, 4).to(dtype)
    weight = target.weight
    xla_ckpt.load_checkpoint(tmp_path, "a", target, cast=True)
    assert target.weight is weight
    assert torch.equal(target.weight, model.weight.to(dtype))
    assert torch.equal(target.bias, model.bias.to(dtype))


def test_the_state_of_a_stepped_optimizer_takes_its_own_type(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", *(saved := trained(8, 4)))
    model = torch.nn.Linear(8, 4).bfloat16()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    with pytest.raises(IncompatibleCheckpointError, match="cast=True"):
        xla_ckpt.load_checkpoint(tmp_path, "a", model, optimizer)
    xla_ckpt.load_checkpoint(tmp_path, "a", model, optimizer, cast=True)
    moment = saved[1].state[saved[0].weight]["exp_avg"]
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], moment.to(torch.bfloat16))


@pytest.mark.xla
def test_xla_tensors_are_cast(tmp_path: Path) -> None:
    values = torch.randn(16, 3)
    xla_ckpt.save(tmp_path, "a", {"w": values})
    begin()
    target = {"w": torch.zeros(16, 3, dtype=torch.bfloat16, device="xla")}
    found = xla_ckpt.restore(tmp_path, "a", like=target, cast=True).tree["w"]
    assert found.device.type == "xla"
    assert torch.equal(found.cpu(), values.bfloat16())


def test_a_tree_is_restored_in_other_types(tmp_path: Path) -> None:
    values = np.linspace(-3, 3, 20, dtype=np.float64).reshape(4, 5)
    xla_ckpt.save(tmp_path, "a", {"w": values, "n": np.arange(3)})
    like = {"w": xla_ckpt.ArraySpec((4, 5), np.dtype("float32")), "n": xla_ckpt.ArraySpec((3,), np.dtype("int64"))}
    with pytest.raises(IncompatibleCheckpointError, match="cast=True") as caught:
        xla_ckpt.restore(tmp_path, "a", like=like)
    assert "strict" not in str(caught.value)  # restore has no such argument
    found = xla_ckpt.restore(tmp_path, "a", like=like, cast=True).tree
    assert found["w"].dtype == np.float32
    assert np.array_equal(found["w"], values.astype(np.float32))


def test_integers_are_not_cast(tmp_path: Path) -> None:
    xla_ckpt.save(tmp_path, "a", {"n": torch.arange(3), "w": torch.ones(2)})
    like = {"n": torch.zeros(3), "w": torch.zeros(2)}
    with pytest.raises(IncompatibleCheckpointError, match="n: int64 is stored, float32 wanted") as caught:
        xla_ckpt.restore(tmp_path, "a", like=like, cast=True)
    assert "cast=True" not in str(caught.value)


def test_a_load_that_fits_nowhere_is_an_error_though_it_is_not_strict(tmp_path: Path) -> None:
    model, _ = trained(8, 4)
    xla_ckpt.save_checkpoint(tmp_path, "a", model)
    for target in (torch.nn.Linear(8, 4).bfloat16(), torch.nn.Sequential(torch.nn.Linear(8, 4))):
        before = {name: value.clone() for name, value in target.state_dict().items()}
        with pytest.raises(IncompatibleCheckpointError, match="nothing was changed") as caught:
            xla_ckpt.load_checkpoint(tmp_path, "a", target, strict=False)
        assert "strict=False" not in str(caught.value)  # it was said already, and helps nobody
        assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


def test_prefixes_of_names_are_told(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    wrapped = torch.nn.ModuleDict({"net": model})
    xla_ckpt.save_checkpoint(tmp_path, "bare", model)
    xla_ckpt.save_checkpoint(tmp_path, "wrapped", wrapped)
    with pytest.raises(IncompatibleCheckpointError, match="names of the target begin with 'net.'"):
        xla_ckpt.load_checkpoint(tmp_path, "bare", torch.nn.ModuleDict({"net": torch.nn.Linear(3, 2)}))
    with pytest.raises(IncompatibleCheckpointError, match="names that are stored begin with 'net.'"):
        xla_ckpt.load_checkpoint(tmp_path, "wrapped", torch.nn.Linear(3, 2))


def a_stage_without_anything(rank: int, root: str) -> Any:
    """The model of rank 1 has nothing of what is stored; that of rank 0 has, unless `root` says so."""
    names = ["w"] if rank == 0 and not root.endswith("none") else ["other"]
    target = {name: torch.zeros(3) for name in names}
    try:
        loaded = xla_ckpt.load_checkpoint(root.removesuffix("none"), "a", target, strict=False, mesh="pp=2")
    except IncompatibleCheckpointError as error:
        return str(error.problem)
    return [len(loaded.report.skipped), target.get("w", torch.zeros(1)).sum().item()]


def test_a_stage_may_have_nothing_if_another_has_something(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", {"w": torch.ones(3)})
    first, second = run_on_ranks(a_stage_without_anything, 2, str(tmp_path))
    assert first == [0, 3.0]
    assert second == [1, 0.0]
    told = run_on_ranks(a_stage_without_anything, 2, f"{tmp_path}none")
    assert told[0] == told[1]
    assert "does not fit" in told[0]
