"""neuronx-distributed's AdamW against the formula in float64, and against torch's AdamW where they agree."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from neuron_compat.nxd.utils.adamw_fp32_optim_params import AdamW_FP32OptimParams
from tests import xla
from xla_ckpt import UsageError

xla.begin()


def gradients(steps: int) -> Iterator[torch.Tensor]:
    numbers = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(6, generator=numbers, dtype=torch.float64)


def by_the_formula(weight: torch.Tensor, options: dict[str, Any], steps: int) -> torch.Tensor:
    weight, mean, square = weight.double(), torch.zeros(6).double(), torch.zeros(6).double()
    beta1, beta2 = options["betas"]
    for step, gradient in enumerate(gradients(steps), 1):
        mean, square = beta1 * mean + (1 - beta1) * gradient, beta2 * square + (1 - beta2) * gradient**2
        one, two = (1 - beta1**step, (1 - beta2**step) ** 0.5) if options["correct_bias"] else (1.0, 1.0)
        weight = weight - options["lr"] * two / one * mean / (square.sqrt() + options["eps"])
        weight = weight - options["lr"] * options["weight_decay"] * weight
    return weight


OPTIONS: dict[str, Any] = {
    "lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1, "correct_bias": True,
}  # fmt: skip


@pytest.mark.parametrize("device", xla.DEVICES)
@pytest.mark.parametrize("changed", [{}, {"correct_bias": False}, {"weight_decay": 0.0}])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_is_the_formula(dtype: torch.dtype, changed: dict[str, Any], device: str) -> None:
    options = OPTIONS | changed
    first = torch.linspace(-1, 1, 6, dtype=torch.float64)
    weight = torch.nn.Parameter(first.clone().to(dtype).to(device))
    optimizer = AdamW_FP32OptimParams([weight], **options)
    for gradient in gradients(5):
        weight.grad = gradient.to(dtype).to(device)
        optimizer.step()
    want = by_the_formula(first, options, 5)
    close = 1e-12 if dtype == torch.float64 else 1e-5
    assert torch.allclose(weight.detach().cpu().double(), want, rtol=close, atol=close)
    state = optimizer.state[weight]
    assert type(state["step"]) is int
    assert state["step"] == 5
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == dtype


def test_without_decay_and_eps_it_is_torchs() -> None:
    mine, torchs = (torch.nn.Parameter(torch.linspace(-1, 1, 6)) for _ in range(2))
    pairs = (
        (mine, AdamW_FP32OptimParams([mine], lr=0.1, eps=0.0)),
        (torchs, torch.optim.AdamW([torchs], lr=0.1, eps=0.0, weight_decay=0.0)),
    )
    for gradient in gradients(5):
        for weight, optimizer in pairs:
            weight.grad = gradient.float()
            optimizer.step()
    assert torch.allclose(mine, torchs, atol=1e-6)


def test_moments_are_float64_where_neurons_compiler_takes_that_for_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_DOWNCAST_BF16", "1")
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 6))
    optimizer = AdamW_FP32OptimParams([weight], **OPTIONS)
    monkeypatch.delenv("XLA_DOWNCAST_BF16")
    for gradient in gradients(5):
        weight.grad = gradient.float()
        optimizer.step()
    assert optimizer.state[weight]["exp_avg"].dtype == torch.float64
    assert weight.dtype == torch.float32
    assert torch.allclose(weight.double(), by_the_formula(torch.linspace(-1, 1, 6), OPTIONS, 5), atol=1e-6)


def test_its_state_goes_to_another_one_and_on() -> None:
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 6))
    optimizer = AdamW_FP32OptimParams([weight], **OPTIONS)
    held: Any = None
    for number, gradient in enumerate(gradients(5)):
        if number == 3:
            held = copy.deepcopy((weight.data, optimizer.state_dict()))
        weight.grad = gradient.float()
        optimizer.step()
    again = torch.nn.Parameter(held[0])
    resumed = AdamW_FP32OptimParams([again], lr=9.0)
    resumed.load_state_dict(held[1])
    for gradient in list(gradients(5))[3:]:
        again.grad = gradient.float()
        resumed.step()
    assert torch.equal(again, weight)


def test_a_closure_computes_the_gradients() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = AdamW_FP32OptimParams([weight], lr=0.5)

    def closure() -> torch.Tensor:
        loss = weight.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert torch.allclose(weight, torch.full((2,), 0.5), atol=1e-4)


def test_what_it_refuses() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    for wrong in ({"lr": -1.0}, {"eps": -1.0}, {"betas": (1.0, 0.9)}):
        with pytest.raises(ValueError, match="at least 0"):
            AdamW_FP32OptimParams([weight], **wrong)
    with pytest.raises(UsageError, match="differentiated"):
        AdamW_FP32OptimParams([weight], differentiable=True)
    with pytest.warns(FutureWarning, match="deprecated"):
        AdamW_FP32OptimParams([weight], no_deprecation_warning=False)
    weight.grad = torch.ones(2).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        AdamW_FP32OptimParams([weight]).step()
