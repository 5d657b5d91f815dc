"""A small sharded model with torchtitan's containers and a checkpoint manager. No test of pytest's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.integrations import environment  # noqa: F401  # makes the trainers importable


class Position:
    """What torchtitan's trainer and loader are to a checkpoint manager: something that has a state under a key.

    The key of a loader has its rank in it, as that of torchtitan's own has.
    """

    def __init__(self, key: str, at: int) -> None:
        self.key = key
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {self.key: self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state[self.key]


Result = tuple[bool, int, list[float], dict[str, torch.Tensor]]
"""Whether a run resumed, the loader's position, the losses, the weights."""


def run(rank: int, folder: str, steps: int, options: dict[str, Any]) -> Result:
    """Train up to a step, from the newest checkpoint.

    The options are settings of the manager, and:

    * ``first``: the step from which the run goes on.
    * ``theirs``: torchtitan's own manager saves and loads, which keeps no random generators.
    * ``reseed``: these are seeded in each step.
    * ``member``: a further member.
    * ``grown``: the model has another layer.
    """
    first, theirs, reseed, member, grown = (options.pop(name, default) for name, default in _OPTIONS)
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components import checkpointer
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    from xla_ckpt.integrations.torchtitan import CheckpointManager

    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2))
    if grown:
        model.append(torch.nn.Linear(2, 2))
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizers = default_adamw(lr=0.05).build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=10)
    trained, loader = Position("step", 0), Position(f"dp_rank_{rank}", 100 * rank)
    kind = checkpointer.CheckpointManager if theirs else CheckpointManager
    config = kind.Config(enable=True, **{"interval": 2, "last_save_model_only": False, **options})
    manager = config.build(
        dataloader=loader, model_parts=[model], optimizers=optimizers, lr_schedulers=schedulers,
        states={"train_state": trained} | ({"member": member} if member else {}), sd_adapter=None, base_folder=folder,
    )  # fmt: skip
    resumed = manager.load(first)
    losses = []
    while trained.at < steps:
        if reseed:
            torch.manual_seed(100 * rank + trained.at)
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
    manager.close()
    weights = {name: value.full_tensor() for name, value in model.state_dict().items()}
    return resumed, loader.at, losses, weights


_OPTIONS = (("first", -1), ("theirs", False), ("reseed", False), ("member", None), ("grown", False))


def alone(rank: int, folder: str) -> Result:
    """Load what two ranks saved, but for the loader, whose state is theirs."""
    return run(rank, folder, 0, {"exclude_from_loading": ["dataloader"], "load_only": True})
