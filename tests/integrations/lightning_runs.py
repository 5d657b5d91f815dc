"""Runs under Lightning's Trainer, as programs have them, to compare with each other. No test of pytest's.

Importing it imports Lightning.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks as ready
from lightning.pytorch.loggers import Logger
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
QUIET: dict[str, Any] = {
    "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
}  # fmt: skip


def samples() -> torch.Tensor:
    return torch.randn(16, 8, generator=torch.Generator(device="cpu").manual_seed(0))


class Log(Logger):  # type: ignore[misc]
    """Keeps what is logged: (step, name) -> value."""

    name = version = "log"

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[tuple[int | None, str], float] = {}

    def log_hyperparams(self, *args: Any, **options: Any) -> None:
        """Nothing."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.values |= {(step, name): value for name, value in metrics.items()}


class Module(pl.LightningModule):  # type: ignore[misc]
    """A model with what a resume may lose: dropout, a counter, a buffer that its hooks write, a key of its own."""

    def __init__(self, kind: str = "", dropout: float = 0.2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.kind, self.seen = kind, 0
        self.backbone, self.head = torch.nn.Linear(8, 4), torch.nn.Linear(4, 1)
        self.dropout = torch.nn.BatchNorm1d(4) if kind == "batch norm" else torch.nn.Dropout(dropout)
        self.register_buffer("epochs", torch.zeros(1, device="cpu"))
        self.automatic_optimization = kind not in ("manual", "two")

    def training_step(self, batch: Any, index: int) -> Any:
        self.seen += 1
        loss = self.head(self.dropout(self.backbone(batch))).square().mean()
        self.log("loss", loss)
        self.log("mean", loss, on_step=False, on_epoch=True)
        if not self.automatic_optimization:
            optimizers, schedulers = self.optimizers(), self.lr_schedulers()
            optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in optimizers:
                optimizer.step()
            for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
                scheduler.step()
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.head(self.backbone(batch)).square().mean() + 1)

    def on_train_epoch_end(self) -> None:
        self.epochs += 1
        self.log("seen", float(self.seen))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]

    def configure_optimizers(self) -> Any:
        if self.kind == "two":
            one = torch.optim.AdamW(self.backbone.parameters(), 0.01)
            other = torch.optim.SGD(self.head.parameters(), 0.1, momentum=0.9)
            return [one, other], [lr_scheduler.StepLR(one, 5, 0.5), lr_scheduler.ExponentialLR(other, 0.9)]
        optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, self.parameters()), 0.05)
        if self.kind == "plateau":
            plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}
        return [optimizer], [lr_scheduler.ExponentialLR(optimizer, 0.8)]


class Data(pl.LightningDataModule):  # type: ignore[misc]
    """Counts the batches that it has prepared for training."""

    def __init__(self, shuffle: bool = True) -> None:
        super().__init__()
        self.shuffle, self.prepared = shuffle, 0

    def train_dataloader(self) -> Any:
        return StatefulDataLoader(samples(), batch_size=4, shuffle=self.shuffle)

    def val_dataloader(self) -> Any:
        return DataLoader(samples(), batch_size=8)

    def on_after_batch_transfer(self, batch: Any, index: int) -> Any:
        self.prepared += bool(self.trainer.training)
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"prepared": self.prepared}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.prepared = state["prepared"]


class Counter(pl.Callback):  # type: ignore[misc]
    """Counts batches under a key of its own, beside the states of callbacks."""

    count = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.count += 1

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["count"] = self.count

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.count = checkpoint["count"]


Callbacks = Callable[[], list[Any]]

CASES: dict[str, dict[str, Any]] = {
    "schedulers by epoch": {},
    "validation in epochs": {"val_check_interval": 2},
    "accumulated": {"accumulate_grad_batches": 2},
    "accumulated, validation in epochs": {"accumulate_grad_batches": 2, "val_check_interval": 3},
    "manual": {"kind": "manual"},
    "several optimizers": {"kind": "two"},
    "plateau": {"kind": "plateau"},
    "early stopping": {"callbacks": lambda: [ready.EarlyStopping("val", patience=2, min_delta=10)]},
    "early stopping in epochs": {
        "callbacks": lambda: [ready.EarlyStopping("val", patience=4, min_delta=10)], "val_check_interval": 2,
    },
    "moving average": {"callbacks": lambda: [ready.EMAWeightAveraging(decay=0.9)]},
    "weight averaging": {
        "callbacks": lambda: [ready.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1)]
    },
    "weight averaging, batch norm": {
        "callbacks": lambda: [ready.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1)],
        "kind": "batch norm",
    },
    "finetuning": {
        "callbacks": lambda: [
            ready.BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=_half_more, backbone_initial_lr=0.001)
        ],
    },
    "scheduled accumulation": {"callbacks": lambda: [ready.GradientAccumulationScheduler({0: 1, 2: 2})]},
    "steps": {"max_steps": 9},
}  # fmt: skip


def _half_more(epoch: int) -> float:
    return 1.5


def run(
    case: str, saver: Any, *, seed: int = 1, random: bool = True, path: Path | None = None, more: Callbacks = list
) -> dict[str, Any]:
    """Train three epochs, or what is left of them: everything that a broken run could have otherwise.

    A run that is resumed has another seed, so that what is not restored shows.
    """
    options = dict(CASES[case])
    kind, others = options.pop("kind", ""), options.pop("callbacks", list)
    torch.manual_seed(seed)
    module, data, counter, log = Module(kind, 0.2 if random else 0.0), Data(random), Counter(), Log()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            **{"max_epochs": 3, **QUIET, **options}, logger=log, callbacks=[saver, counter, *others(), *more()]
        )
        trainer.fit(module, datamodule=data, ckpt_path=path)
    return {
        "weights": {name: value.tolist() for name, value in module.state_dict().items()},
        "counted": (module.seen, data.prepared, counter.count, trainer.current_epoch, trainer.global_step),
        "rates": [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
        "logged": log.values,
    }
