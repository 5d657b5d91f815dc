"""A model of TP 2 with neuronx-distributed's layers and its ZeRO-1 optimizer, trained on XLA's CPU by four ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch_xla

import neuron_compat
from neuron_compat.nxd.optimizer import NeuronZero1Optimizer
from neuron_compat.nxd.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from neuron_compat.nxd.parallel_layers import parallel_state as ps


def begin() -> None:
    """What a rank does first."""
    neuron_compat.emulate()
    ps.initialize_model_parallel(tensor_model_parallel_size=2)


class Split(torch.nn.Module):
    """A part of a model."""

    def __init__(self, seed: int, hidden: int = 8, inner: int = 16) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed: torch.nn.Module = ParallelEmbedding(13, hidden, pad=True)
        self.up: torch.nn.Module = ColumnParallelLinear(hidden, inner, gather_output=False)
        self.down: torch.nn.Module = RowParallelLinear(inner, hidden, input_is_parallel=True)
        self.norm = torch.nn.LayerNorm(hidden)
        self.register_buffer("inv_freq", torch.full((3,), float(seed)))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        return self.norm(x + self.down(torch.tanh(self.up(x))))


class Whole(Split):
    """All of it."""

    def __init__(self, seed: int) -> None:
        torch.nn.Module.__init__(self)
        torch.manual_seed(seed)
        self.embed, self.up, self.down = torch.nn.Embedding(13, 8), torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.norm = torch.nn.LayerNorm(8)


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
    ]


def falling(optimizer: Any) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))


def build(seed: int, **options: Any) -> tuple[Split, Any, Any]:
    """Model, optimizer and scheduler."""
    sizes = {k: options.pop(k) for k in ("hidden", "inner") if k in options}
    model = Split(seed, **sizes).to("xla")
    options = {"max_norm": 0.5, "pin_layout": False, "lr": 1e-2, **options}
    optimizer = NeuronZero1Optimizer(groups(model), torch.optim.AdamW, **options)
    return model, optimizer, falling(optimizer)


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 13, (4, 5), generator=torch.Generator().manual_seed(step))


def loss_of(model: torch.nn.Module, words: torch.Tensor) -> torch.Tensor:
    return (model(words) - torch.linspace(0, 1, 8, device=words.device)).pow(2).mean()


def train(model: torch.nn.Module, optimizer: Any, scheduler: Any, step: int) -> float:
    """A step on this rank's part of a batch; the norm of the gradients."""
    words = batch(step).chunk(2)[ps.get_data_parallel_rank()]
    optimizer.zero_grad()
    loss_of(model, words.to("xla")).backward()
    optimizer.step()
    torch_xla.sync()
    norm = optimizer.grad_norm
    scheduler.step()
    return float(norm)


def train_whole(model: torch.nn.Module, optimizer: Any, scheduler: Any, step: int) -> float:
    """The same step of the whole model on the whole batch, without any parallelism."""
    optimizer.zero_grad()
    loss_of(model, batch(step)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    scheduler.step()
    return float(norm)


def frozen(model: torch.nn.Module, optimizer: Any = None, scheduler: Any = None) -> dict[str, Any]:
    """All of a state as of now, in host memory of its own."""
    found: dict[str, Any] = {f"model.{n}": v.detach().cpu().clone() for n, v in model.state_dict().items()}
    if optimizer is not None:
        for i, state in optimizer.state_dict()["base_state"].items():
            found |= {f"state.{i}.{k}": v.detach().cpu() if torch.is_tensor(v) else v for k, v in state.items()}
        found |= {
            f"group.{i}": {k: v for k, v in g.items() if k != "params"} for i, g in enumerate(optimizer.param_groups)
        }
    if scheduler is not None:
        found |= {f"scheduler.{k}": v for k, v in scheduler.state_dict().items()}
    return copy.deepcopy(found)


def true(weights: dict[str, Any], name: str = "model.embed.weight") -> dict[str, Any]:
    """A state without the padding of the embedding, which nobody promises to restore."""
    rows = 7 if ps.get_tensor_model_parallel_rank() == 0 else 6
    cut = {k: v[:rows] if k == name else v for k, v in weights.items()}
    assert cut[name].shape[0] == rows
    return cut
