"""A root directory that has something to show: two ranks, a model of some layers, tags that differ."""

from __future__ import annotations

from pathlib import Path

import torch

import xla_ckpt
from tests.jobs import run_on_ranks

RANKS = 2
LAYERS = 3
DIM = 128

RULES = [("up.weight", ("tp", None)), ("down.weight", (None, "tp")), ("embed", ("tp", None))]


class Block(torch.nn.Module):
    """A layer whose parameters are split over two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(DIM, 4 * DIM // RANKS, bias=False)
        self.down = torch.nn.Linear(4 * DIM // RANKS, DIM, bias=False)
        self.norm = torch.nn.LayerNorm(DIM)


def _model() -> torch.nn.ModuleDict:
    torch.manual_seed(7)
    return torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(1000 // RANKS, DIM),
            "layers": torch.nn.ModuleList(Block() for _ in range(LAYERS)),
            "norm": torch.nn.LayerNorm(DIM),
        }
    )


def _job(rank: int, root: Path) -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(1, 5):
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.randn_like(parameter) * 0.1 if number % 4 or step < 3 else None
        optimizer.step()
        xla_ckpt.save_checkpoint(
            root, f"step_{step}00", model, optimizer, user_content={"step": 100 * step, "loss": 2.0 / step},
            mesh=xla_ckpt.Mesh(tp=RANKS), shardings=RULES, pinned=step == 2, num_kept_ckpts=9,
        )  # fmt: skip


def make(root: Path) -> None:
    """Save four tags."""
    run_on_ranks(_job, RANKS, root)


PAGES: dict[str, dict[str, str]] = {
    "root": {},
    "tag": {"page": "tag", "tag": "step_400"},
    "array": {"page": "array", "tag": "step_400", "leaf": "model/layers.0.up.weight"},
    "save": {"page": "save", "tag": "step_400"},
    "plan": {"page": "plan", "tag": "step_400", "mesh": "dp=2,tp=4"},
    "compare": {"page": "compare", "a": "step_300", "b": "step_400", "leaf": "model"},
}
"""What its pages are asked for with."""
