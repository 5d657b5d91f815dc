"""A script as neuronx-distributed's examples are written runs with only its imports changed, and trains alike."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

import neuron_compat
import xla_ckpt
from neuron_compat.nxd.parallel_layers import parallel_state as ps
from neuron_compat.nxd.utils.adamw_fp32_optim_params import AdamW_FP32OptimParams
from tests.jobs import run_on_ranks
from tests.neuron.recipe import Config, train_llama

pytestmark = pytest.mark.xla

STEPS = 6


def flags(root: str, **changed: Any) -> argparse.Namespace:
    usual: dict[str, Any] = {
        "seed": 0, "tensor_parallel_size": 2, "use_zero_1": True, "max_grad_norm": 1.0, "meta_device": False,
        "dtype": torch.float32, "weight_decay": 0.01, "lr": 0.05, "checkpoint_dir": root, "num_kept_checkpoint": -1,
        "checkpoint_freq": 2, "grad_accum_usteps": 2, "max_steps": STEPS, "batch_size": 4, "init_zero": False,
    }  # fmt: skip
    return argparse.Namespace(**(usual | changed))


class Whole(torch.nn.Module):
    """The script's model of one process, with torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        hidden, inner, words = Config.hidden_size, Config.intermediate_size, Config.vocab_size
        self.embed_tokens = torch.nn.Embedding(words, hidden)
        self.up_proj, self.down_proj = torch.nn.Linear(hidden, inner), torch.nn.Linear(inner, hidden)
        self.norm = torch.nn.LayerNorm(hidden)
        torch.nn.Linear(hidden, words, bias=False)  # draws what the head draws before it is tied

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(words[:, :-1])
        x = x + self.down_proj(torch.nn.functional.silu(self.up_proj(self.norm(x))))
        logits = torch.nn.functional.linear(x, self.embed_tokens.weight)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def without_ranks(asked: argparse.Namespace) -> tuple[list[float], list[float]]:
    """The same training in one process, clipped by torch: its losses and norms."""
    torch.manual_seed(asked.seed)
    model = Whole()
    decay = [p for n, p in model.named_parameters() if "bias" not in n]
    others = [p for n, p in model.named_parameters() if "bias" in n]
    optimizer = AdamW_FP32OptimParams(
        [{"params": decay, "weight_decay": asked.weight_decay}, {"params": others}], lr=asked.lr, betas=(0.9, 0.95)
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    losses, norms = [], []
    for step in range(asked.max_steps):
        total = 0.0
        for micro in range(asked.grad_accum_usteps):
            numbers = torch.Generator().manual_seed(10 * step + micro)
            loss = model(torch.randint(0, 12, (asked.batch_size, 6), generator=numbers)) / asked.grad_accum_usteps
            loss.backward()
            total += loss.item()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), asked.max_grad_norm).item())
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return losses, norms


def resumes(rank: int, root: str, asked: dict[str, Any], other_tp: int) -> None:
    """The script, stopped and started again, and then on other ranks; its losses are those of one that ran through."""
    neuron_compat.emulate()
    through = train_llama(flags(f"{root}/through", **asked))
    want = without_ranks(flags(root, **asked))  # torch's engine has to see the XLA device in its first backward
    assert through == (pytest.approx(want[0], rel=1e-4), pytest.approx(want[1], rel=1e-3))
    assert xla_ckpt.list_tags(f"{root}/through") == ["step_2", "step_4", "step_6"]
    ps.destroy_model_parallel()
    train_llama(flags(f"{root}/stopped", **asked, max_steps=2))
    ps.destroy_model_parallel()
    again = train_llama(flags(f"{root}/stopped", **asked, max_steps=4, seed=5))
    assert again == (through[0][2:4], through[1][2:4])  # to the last bit
    ps.destroy_model_parallel()
    other = flags(f"{root}/stopped", **asked, tensor_parallel_size=other_tp, max_steps=STEPS, seed=6)
    moved = train_llama(other)
    assert moved == (pytest.approx(want[0][4:], rel=1e-4), pytest.approx(want[1][4:], rel=1e-3))
    assert xla_ckpt.list_tags(f"{root}/stopped") == ["step_2", "step_4", "step_6"]


@pytest.mark.parametrize(("use_zero_1", "ranks", "other_tp"), [(True, 4, 4), (False, 2, 1)])
def test_the_script_trains_resumes_and_moves(tmp_path: Path, use_zero_1: bool, ranks: int, other_tp: int) -> None:
    asked = {"use_zero_1": use_zero_1, "max_grad_norm": 0.3}
    run_on_ranks(resumes, ranks, str(tmp_path), asked, other_tp, xla=True)
