"""What a parallel layer knows of its parameters, where these have lost their attributes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.jobs import run_on_ranks
from tests.neuron.standins import (
    ColumnParallelLinear,
    LoraConfig,
    LoraModel,
    NxDModel,
    NxDOptimizer,
    Partitioned,
    Ranks,
    RowParallelLinear,
)
from tests.same import differences
from xla_ckpt import Mesh
from xla_ckpt.state.shardings import get_layer_shardings

WHOLE = torch.arange(48.0).reshape(8, 6)


def layer(dim: int, mesh: Mesh, rank: int = 0, **numbers: Any) -> Any:
    made: Any = Partitioned(WHOLE, dim, mesh, rank, numbers.get("stride", 1))
    for name, value in numbers.items():
        setattr(made, name, value)
    return made


def said(model: torch.nn.Module, parameter: torch.Tensor, mesh: Mesh) -> Any:
    known = get_layer_shardings(model, mesh).get(id(parameter))
    return None if known is None else known.spec


@pytest.mark.parametrize(
    ("dim", "numbers", "spec"),
    [
        (0, {}, ("tp", None)),
        (1, {}, (None, "tp")),
        (0, {"stride": 2}, (("tp", 2), None)),
        (0, {"expert_model_parallel_group": Ranks(1)}, ("tp", None)),
        (1, {"expert_model_parallel_group": Ranks(2)}, ("ep", "tp")),
        (0, {"tensor_parallel_group": Ranks(1)}, None),
    ],
)
def test_a_layer_says_how_its_weight_is_split(dim: int, numbers: dict[str, Any], spec: Any) -> None:
    mesh = Mesh(tp=2, dp=2, ep=2)
    model = layer(dim, mesh, **numbers)
    assert said(model, model.weight, mesh) == spec


@pytest.mark.parametrize(("gathered", "spec"), [(False, ("tp",)), (True, None)])
def test_the_bias_of_gathered_outputs_is_whole(gathered: bool, spec: Any) -> None:
    model = layer(0, Mesh(tp=2), gather_output=gathered, bias_partition_dim=0)
    model.bias = torch.nn.Parameter(torch.zeros(8 if gathered else 4))
    assert said(model, model.bias, Mesh(tp=2)) == spec
    rows = layer(1, Mesh(tp=2))
    rows.bias = torch.nn.Parameter(torch.zeros(8))
    assert said(rows, rows.bias, Mesh(tp=2)) is None


def test_a_parameter_that_says_it_itself_is_not_asked_for() -> None:
    model = layer(0, Mesh(tp=2))
    model.weight.tensor_model_parallel = False  # as after NxD has given defaults to a parameter without attributes
    assert said(model, model.weight, Mesh(tp=2)) == ("tp", None)
    model.weight.tensor_model_parallel, model.weight.partition_dim = True, 1
    assert said(model, model.weight, Mesh(tp=2)) is None


def test_a_layer_of_another_number_of_ranks_is_named() -> None:
    model = torch.nn.Sequential(layer(0, Mesh(tp=4)))
    with pytest.raises(xla_ckpt.UnsupportedStateError, match="num_partitions 4") as caught:
        get_layer_shardings(model, Mesh(tp=2))
    assert caught.value.leaf == "model/0.weight"


def adapted(seed: int, mesh: Mesh, rank: int, **options: Any) -> tuple[LoraModel, Any]:
    """Adapters for a layer that is split by rows, for one split by columns, and for one that is whole."""
    torch.manual_seed(seed)
    base = torch.nn.Sequential(
        ColumnParallelLinear(torch.randn(8, 6), mesh, rank),
        RowParallelLinear(torch.randn(6, 8), mesh, rank),
        torch.nn.Linear(6, 6),
    )
    model = LoraModel(base, LoraConfig(**options))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    for p in trained:
        p.grad = p.detach() * 3
    optimizer.step()
    return model, optimizer


def state(model: LoraModel, optimizer: Any) -> dict[str, Any]:
    states = {f"{i}.{k}": v for i, s in optimizer.state_dict()["state"].items() for k, v in s.items()}
    return {**model.module.state_dict(), **states}


def saves_adapters(rank: int, root: Path, layout: str) -> list[str]:
    """TP 2: adapters with their optimizer, and with their base model."""
    mesh = Mesh(tp=2)
    model, optimizer = adapted(0, mesh, rank, base=True)
    xla_ckpt.save_checkpoint(root, "a", NxDModel(model), NxDOptimizer(optimizer), mesh=mesh, layout=layout)
    fresh, mine = adapted(1, mesh, rank, base=True)
    xla_ckpt.load_checkpoint(root, "a", NxDModel(fresh), NxDOptimizer(mine), mesh=mesh)
    return differences(state(fresh, mine), state(model, optimizer), order=False)


@pytest.mark.parametrize("layout", ["native", "xser", "pt"])
def test_adapters_that_are_split_are_saved_with_their_optimizer(tmp_path: Path, layout: str) -> None:
    assert run_on_ranks(saves_adapters, 2, tmp_path, layout) == [[], []]
    whole = adapted(1, Mesh(), 0)
    xla_ckpt.load_checkpoint(tmp_path, "a", *whole, mesh=Mesh())
    assert not differences(state(*whole), state(*adapted(0, Mesh(), 0)), order=False)
