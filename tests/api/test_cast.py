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
    xla_ckpt.save_checkpoint(
        tmp_path, "with a head", torch.nn.ModuleDict({"net": model, "head": torch.nn.Linear(2, 2)})
    )
    with pytest.raises(IncompatibleCheckpointError, match="the module that has the target as its head or net"):
        xla_ckpt.load_checkpoint(tmp_path, "with a head", torch.nn.Linear(3, 2))


def of_half_precision() -> tuple[dict[str, Any], dict[str, Any]]:
    """A model of bfloat16 with two names of one weight, and an optimizer that has master weights, as ZeRO-1's has."""
    masters = {"w": torch.full((4,), 1.001), "b": torch.full((2,), 2.001)}
    model = {name: value.bfloat16() for name, value in masters.items()}
    groups = [{"params": ["w", "b"], "lr": 0.1}]
    return {**model, "tied": model["w"]}, {"state": {}, "param_groups": groups, "master": masters}


def wanting(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    weight = torch.zeros(4, dtype=dtype)
    return {"w": weight, "b": torch.zeros(2, dtype=dtype), "tied": weight}


def test_a_model_of_the_type_of_master_weights_takes_those(tmp_path: Path) -> None:
    saved, optimizer = of_half_precision()
    xla_ckpt.save_checkpoint(tmp_path, "a", saved, optimizer)
    for cast in (False, True):
        model = wanting(torch.float32)
        xla_ckpt.load_checkpoint(tmp_path, "a", model, {}, cast=cast)
        assert model["w"].eq(1.001).all()
        assert model["b"].eq(2.001).all()
        assert model["tied"] is model["w"]
    for dtype, cast in ((torch.bfloat16, False), (torch.float64, True)):
        model = wanting(dtype)
        xla_ckpt.load_checkpoint(tmp_path, "a", model, {}, cast=cast)
        assert torch.equal(model["b"], saved["b"].to(dtype))
    like = {"model": {"w": torch.zeros(4)}, "optimizer": {"param_groups": None}}
    assert xla_ckpt.restore(tmp_path, "a", like=like).tree["model"]["w"].eq(1.001).all()
    xla_ckpt.convert(tmp_path, tmp_path, "a", as_tag="float32", model=wanting(torch.float32), optimizer=optimizer)
    assert xla_ckpt.restore(tmp_path, "float32").tree["model"]["b"].eq(2.001).all()


def test_a_model_without_its_optimizer_takes_no_master_weights(tmp_path: Path) -> None:
    saved, optimizer = of_half_precision()
    xla_ckpt.save_checkpoint(tmp_path, "a", saved, optimizer)
    model = wanting(torch.float32)
    with pytest.raises(IncompatibleCheckpointError, match="bfloat16 is stored, float32 wanted"):
        xla_ckpt.load_checkpoint(tmp_path, "a", model)
    xla_ckpt.load_checkpoint(tmp_path, "a", model, cast=True)
    assert torch.equal(model["b"], saved["b"].float())


def a_rank_of_its_own_type(rank: int, root: str) -> list[float]:
    """Rank 0 has the type of the master weights, rank 1 that of the weights."""
    model = wanting(torch.bfloat16 if rank else torch.float32)
    xla_ckpt.load_checkpoint(root, None, model, {})
    return [float(value[0]) for value in model.values()]


def test_each_rank_takes_what_is_of_its_type(tmp_path: Path) -> None:
    xla_ckpt.save_checkpoint(tmp_path, "a", *of_half_precision())
    first, second = run_on_ranks(a_rank_of_its_own_type, 2, str(tmp_path))
    assert first == pytest.approx([1.001, 2.001, 1.001], abs=1e-6)
    assert second == [1.0, 2.0, 1.0]


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


def test_master_weights_are_named_where_a_model_of_their_type_is_loaded_alone(tmp_path: Path) -> None:
    """The error named ``cast=True`` alone, which gives the rounded weights."""
    master = torch.arange(8.0).reshape(2, 4) / 3
    group = {"params": ["weight"], "lr": 0.1}
    optimizer = {"state": {}, "param_groups": [group], "master": {"weight": master}}
    xla_ckpt.save(tmp_path, "a", {"model": {"weight": master.bfloat16()}, "optimizer": optimizer})
    model = torch.nn.Linear(4, 2, bias=False)
    with pytest.raises(IncompatibleCheckpointError, match=r"cast=True.*has master weights.*its optimizer is loaded"):
        xla_ckpt.load_checkpoint(tmp_path, "a", model)
    xla_ckpt.load_checkpoint(tmp_path, "a", model, torch.optim.SGD(model.parameters(), lr=0.1))  # as it says
    assert torch.equal(model.weight, master)
    xla_ckpt.save_checkpoint(tmp_path, "b", {"weight": master.bfloat16()})
    with pytest.raises(IncompatibleCheckpointError) as caught:
        xla_ckpt.load_checkpoint(tmp_path, "b", model)
    assert "master weights" not in str(caught.value)
