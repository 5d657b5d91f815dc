"""A small training of adapters over a base that is not trained."""

from __future__ import annotations

from typing import Any

import torch

from tests import xla


class Adapted(torch.nn.Module):
    """A layer that is not trained, with an adapter, under the names that PEFT gives them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base_layer = torch.nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_A = torch.nn.Linear(inputs, 2, bias=False)
        self.lora_B = torch.nn.Linear(2, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base_layer(x) + self.lora_B(self.lora_A(x))
        return result


class Training:
    """A model with adapters, a layer that is trained whole, and what trains them."""

    def __init__(self, device: Any, seed: int) -> None:
        torch.manual_seed(seed)
        self.device = device
        self.model = torch.nn.Sequential(Adapted(16, 64), torch.nn.BatchNorm1d(64), Adapted(64, 4)).to(device)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.rng = {"state": torch.get_rng_state()}

    @property
    def base(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if not p.requires_grad}

    @property
    def members(self) -> dict[str, Any]:
        """What a save and a load are given."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "extras": {"rng": self.rng},
        }

    def steps(self, count: int) -> list[float]:
        """Train on data that are drawn; the losses."""
        losses = []
        for _ in range(count):
            torch.set_rng_state(self.rng["state"])
            batch = torch.randn(8, 16).to(self.device)
            self.rng["state"] = torch.get_rng_state()
            loss = self.model(batch).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            xla.sync()
            losses.append(loss.item())
        return losses
