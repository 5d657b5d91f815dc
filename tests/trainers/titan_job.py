"""A small sharded model with torchtitan's containers and our checkpoint manager. No test of pytest's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.trainers import environment  # noqa: F401  # makes the trainers importable


class Position:
    """What torchtitan's trainer and loader are to a checkpoint manager: something that has a state."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def run(
    rank: int, folder: str, steps: int, *, first: int = -1, **settings: Any
) -> tuple[bool, int, list[float], dict[str, torch.Tensor]]:
    """Train up to a step, from the newest tag or that of `first`.

    Returns:
        Whether it resumed, the loader's position, the losses, the weights.
    """
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    from xla_ckpt.integrations.torchtitan import CheckpointManager

    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2))
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizers = default_adamw(lr=0.05).build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=10)
    trained, loader = Position(0), Position(100 * rank)
    config = CheckpointManager.Config(enable=True, **{"interval": 2, "last_save_model_only": False, **settings})
    manager = config.build(
        dataloader=loader, model_parts=[model], optimizers=optimizers, lr_schedulers=schedulers,
        states={"train_state": trained}, sd_adapter=None, base_folder=folder,
    )  # fmt: skip
    resumed = manager.load(first)
    torch.manual_seed(100 * rank + trained.at)
    losses = []
    while trained.at < steps:
        trained.at += 1
        loader.at += 1
        loss = model(torch.full((4, 8), float(trained.at))).square().mean()
        loss.backward()
        manager.maybe_wait_for_staging()
        optimizers.step()
        schedulers.step()
        optimizers.zero_grad()
        losses.append(loss.item())
        manager.save(trained.at, last_step=trained.at == steps)
        torch.manual_seed(100 * rank + trained.at)
    manager.close()
    weights = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return resumed, loader.at, losses, weights


def alone(rank: int, folder: str) -> tuple[bool, int, list[float], dict[str, torch.Tensor]]:
    """Load what two ranks saved, but for the loader, whose state is theirs."""
    return run(rank, folder, 0, exclude_from_loading=["dataloader"], load_only=True)
