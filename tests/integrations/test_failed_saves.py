"""Runs under trainers of which one asynchronous save fails: the next save raises, on all ranks, and later ones work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.integrations.environment import needs
from tests.integrations.lightning_job import network, rows
from tests.jobs import run_on_ranks
from xla_ckpt.errors import CheckpointError
from xla_ckpt.storage.local import LocalDirectory

FAILS = 2
"""The step whose save fails on the last rank."""


class Disk:
    """An extra whose state is asked for by each save: the disk of the last rank is full in one of them."""

    def __init__(self, last: bool) -> None:
        self.last, self.saves = last, 0

    def state_dict(self) -> dict[str, int]:
        self.saves += 1
        full = self.last and self.saves == FAILS
        LocalDirectory.get_free_bytes = lambda self: 10 if full else None  # type: ignore[method-assign]
        return {"x": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing."""


def goes_on(callback: Any, raised: list[str]) -> None:
    """Have the program go on when the callback raises."""
    save = callback._save if hasattr(callback, "_save") else callback._save_if_due

    def saves(*args: Any) -> None:
        if callback.handle is not None:
            callback.handle.wait()
        try:
            save(*args)
        except CheckpointError as error:
            raised.append(str(error))

    setattr(callback, save.__name__, saves)


def under_lightning(rank: int, world: int, root: Path) -> tuple[list[str], list[str]]:
    import lightning.pytorch as pl

    from xla_ckpt.integrations.lightning import CheckpointCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = network()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.net(batch[0]).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    raised = list[str]()
    extras = {"disk": Disk(rank == world - 1)}
    callback = CheckpointCallback(root, every_n_steps=1, extras=extras, async_save=True)
    goes_on(callback, raised)
    trainer = pl.Trainer(
        max_steps=5, accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto", logger=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[callback],
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(rows(), batch_size=2))
    return raised, xla_ckpt.list_tags(root)


def under_transformers(rank: int, world: int, root: Path) -> tuple[list[str], list[str]]:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    from xla_ckpt.integrations.transformers import CheckpointCallback

    set_seed(3)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 61, (40, 8))]
    model = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_positions=8, n_embd=16, n_layer=1, n_head=2))
    args = TrainingArguments(
        f"{root}.out", per_device_train_batch_size=2, max_steps=5, report_to=[], disable_tqdm=True, use_cpu=True,
        save_strategy="steps", save_steps=1,
    )  # fmt: skip
    raised = list[str]()
    callback = CheckpointCallback(root, extras={"disk": Disk(rank == world - 1)}, async_save=True)
    goes_on(callback, raised)
    trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.resume(trainer))
    return raised, xla_ckpt.list_tags(root)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("job", "tag"),
    [
        pytest.param(under_lightning, "step_", marks=needs("lightning")),
        pytest.param(under_transformers, "checkpoint-", marks=needs("accelerate")),
    ],
)
def test_later_saves_of_a_trainer_work(tmp_path: Path, world: int, job: Any, tag: str) -> None:
    found = run_on_ranks(job, world, world, tmp_path / "run")
    assert found == [found[0]] * world
    (error,), tags = found[0]
    assert f"save before this call has failed, and this call has not saved tag {tag}{FAILS + 1}: " in error
    assert "expected 10 free" in error or "found 10" in error
    assert f"[tag {tag}{FAILS}, rank {world - 1}, " in error
    assert tags == [f"{tag}{step}" for step in (1, 4, 5)]
