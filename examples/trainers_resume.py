"""Train under a trainer, kill -9, resume, and compare with a run that was never broken.

    python examples/trainers_resume.py transformers     # or lightning, or accelerate

A small model is trained for 12 steps, twice: once undisturbed, and once killed before step 8 and started again. Every
loss must be the same to the last bit; the exit code says whether it was. docs/trainers.md explains the adapters.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import xla_ckpt

STEPS, PER_EPOCH = 12, 4
Told = Callable[[int, Tensor], None]


class Model(nn.Module):
    """A network with dropout that computes its own loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.net(x).square().mean()}


def data() -> list[dict[str, Tensor]]:
    """The rows of four batches of an epoch."""
    return [{"x": row} for row in torch.randn(16, 8, generator=torch.Generator().manual_seed(0))]


def with_transformers(root: Path, told: Told) -> None:
    from transformers import Trainer, TrainingArguments

    from xla_ckpt.integrations.transformers import CheckpointCallback

    class Telling(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            told(self.state.global_step, loss)
            return loss

    args = TrainingArguments(
        str(root / "out"), per_device_train_batch_size=4, max_steps=STEPS, save_strategy="steps", save_steps=3,
        use_cpu=True, report_to=[], disable_tqdm=True, learning_rate=0.05, label_names=[],
    )  # fmt: skip
    callback = CheckpointCallback(root / "tags", async_save=True)
    trainer = Telling(Model(), args, train_dataset=data(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.resume(trainer))


def with_lightning(root: Path, told: Told) -> None:
    import lightning.pytorch as pl

    from xla_ckpt.integrations.lightning import CheckpointCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss: Tensor = self.model(**batch)["loss"]
            told(self.global_step, loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    loader = torch.utils.data.DataLoader(data(), batch_size=4, shuffle=True)  # type: ignore[arg-type]
    callback = CheckpointCallback(root / "tags", async_save=True)
    pl.Trainer(
        max_epochs=STEPS // PER_EPOCH, callbacks=[callback], accelerator="cpu", devices=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(Module(), loader)  # fmt: skip


def with_accelerate(root: Path, told: Told) -> None:
    from accelerate import Accelerator

    from xla_ckpt.integrations.accelerate import load_state, save_state

    accelerator, net, first = Accelerator(cpu=True), Model(), 0
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.05))
    if xla_ckpt.has_checkpoint(root / "tags"):
        first = load_state(accelerator, root / "tags").user_content["steps"]
    rows = torch.stack([row["x"] for row in data()]).split(4)
    for step in range(first, STEPS):
        loss = model(rows[step % PER_EPOCH])["loss"]
        told(step, loss)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 2:
            save_state(accelerator, root / "tags", f"step_{step}", user_content={"steps": step + 1}, async_save=True)


TRAINERS = {"transformers": with_transformers, "lightning": with_lightning, "accelerate": with_accelerate}


def train(trainer: str, root: Path, kill_at: int) -> None:
    """What a process of its own does: train, or go on."""
    root.mkdir(parents=True, exist_ok=True)
    resumed = xla_ckpt.has_checkpoint(root / "tags")
    torch.manual_seed(1 if resumed else 0)  # nothing depends on the seed of a run that goes on

    def told(step: int, loss: Tensor) -> None:
        if step == kill_at:
            xla_ckpt.finalize_checkpoint()  # so that there is a tag, however fast this was
            os.kill(os.getpid(), signal.SIGKILL)
        with (root / "losses").open("a") as log:
            log.write(f"{step} {loss.item().hex()}\n")

    TRAINERS[trainer](root, told)


def losses(root: Path) -> dict[str, str]:
    """Step -> the loss that was told last for it."""
    return dict(line.split() for line in (root / "losses").read_text().splitlines())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trainer", choices=TRAINERS)
    parser.add_argument("--root", type=Path, default=Path("trainer_run"))
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kill-at", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        train(args.trainer, args.run, args.kill_at)
        return 0
    shutil.rmtree(args.root, ignore_errors=True)

    def started(name: str, *options: str) -> int:
        print(f"--- {name} {' '.join(options)}", flush=True)
        command = [sys.executable, __file__, args.trainer, "--run", str(args.root / name), *options]
        return subprocess.run(command, check=False).returncode

    ended = [started("unbroken"), started("broken", "--kill-at", "8"), started("broken")]
    assert ended == [0, -signal.SIGKILL, 0], ended
    unbroken, resumed = losses(args.root / "unbroken"), losses(args.root / "broken")
    for step, loss in unbroken.items():
        print(f"{step:>4}  {float.fromhex(loss):10.6f}  {float.fromhex(resumed[step]):10.6f}")
    equal = unbroken == resumed
    print(f"all {len(unbroken)} losses equal: {'yes' if equal else 'NO'}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
