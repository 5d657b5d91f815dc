"""A small model under Lightning's Trainer, or under accelerate; run in processes of their own. No test of pytest's."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.integrations.environment import has_accelerator  # which makes the trainers importable, too


def rows() -> TensorDataset:
    return TensorDataset(torch.randn(24, 8, generator=torch.Generator().manual_seed(0)))


def network(dropout: float = 0.2) -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(dropout), torch.nn.Linear(16, 1))


def seeded(root: str) -> None:
    """The first start of a run has a seed, later ones have others: what is not restored shows."""
    import xla_ckpt

    torch.manual_seed(os.getpid() if xla_ckpt.has_checkpoint(root) else 3)


def lightning_losses(
    root: str, log: str, *, kill_after: int = 0, stop_after: int = 0, stateful: bool = False, io: bool = False,
    **arguments: Any,
) -> list[str]:  # fmt: skip
    """Train, or go on; the losses of all steps that were logged so far."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    import xla_ckpt
    from xla_ckpt.integrations.lightning import CheckpointCallback, TagIO

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(0.0 if io else 0.2)  # a CheckpointIO gets no random state

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch[0]).square().mean()
            with Path(log).open("a") as file:
                file.write(f"{self.global_step} {loss.item().hex()}\n")
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    class Stop(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if kill_after and trainer.global_step == kill_after:
                if not io and callback.handle is not None:
                    callback.handle.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            if stop_after and trainer.global_step == stop_after - 1:
                Path(log + ".stop").touch()

    seeded(root)
    kind: Any = DataLoader
    if stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader as kind  # noqa: N813
    with xla_ckpt.PreemptionGuard(file=log + ".stop") as guard:
        if io:
            plugins, callbacks = [TagIO()], [ModelCheckpoint(root, save_top_k=1), Stop()]
        else:
            callback = CheckpointCallback(root, async_save=True, num_kept_ckpts=2, guard=guard, **arguments)
            plugins, callbacks = [], [Stop(), callback]
        trainer = pl.Trainer(
            max_epochs=3, accelerator="auto" if has_accelerator() else "cpu", devices=1, logger=False, plugins=plugins,
            enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
        )  # fmt: skip
        tags = xla_ckpt.list_tags(root)
        at = os.path.join(root, tags[-1]) if io and tags else None
        trainer.fit(Module(), kind(rows(), batch_size=4, shuffle=not io), ckpt_path=at)
    return Path(log).read_text().splitlines()


def accelerate_losses(root: str, log: str, *, kill_after: int = 0) -> list[str]:
    """Train, or go on; the losses of all steps that were logged so far."""
    from accelerate import Accelerator

    import xla_ckpt
    from xla_ckpt.integrations.accelerate import load_state, save_state

    class Meter:
        total = 0.0

        def state_dict(self) -> dict[str, Any]:
            return {"total": self.total}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.total = state["total"]

    seeded(root)
    accelerator = Accelerator(cpu=not has_accelerator(), gradient_accumulation_steps=2)
    net, meter, first = network(), Meter(), 0
    inner = torch.optim.AdamW(net.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.9)
    model, optimizer, scheduler = accelerator.prepare(net, inner, schedule)
    accelerator.register_for_checkpointing(meter)
    if xla_ckpt.has_checkpoint(root):
        first = load_state(accelerator, root).user_content["step"] + 1
    for step in range(first, 12):
        if kill_after and step == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        batch = rows()[step * 2 : step * 2 + 2][0].to(accelerator.device)
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        meter.total += loss.item()
        with Path(log).open("a") as file:
            file.write(f"{step} {loss.item().hex()} {meter.total.hex()} {scheduler.get_last_lr()}\n")
        if step % 4 == 3:
            handle = save_state(accelerator, root, f"step_{step}", user_content={"step": step}, async_save=True)
            handle.wait()
    return Path(log).read_text().splitlines()


def lightning(root: str, log: str, options: dict[str, Any]) -> dict[str, str]:
    """The last loss of each step."""
    return {line.split()[0]: line for line in lightning_losses(root, log, **options)}


def accelerate(root: str, log: str, options: dict[str, Any]) -> dict[str, str]:
    """The last loss of each step."""
    return {line.split()[0]: line for line in accelerate_losses(root, log, **options)}
