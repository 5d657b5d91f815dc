"""What the adapters for trainers refuse, before anything is written or trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import xla_ckpt
from tests.integrations import lightning_job, titan_job
from tests.integrations.environment import needs
from tests.jobs import run_alone, run_on_ranks


def trainer(folder: Path, callbacks: list[Any], **arguments: Any) -> Any:
    """A Trainer of transformers', with a model of one layer."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    data = [{"input_ids": torch.ones(8, dtype=torch.int64), "labels": torch.ones(8, dtype=torch.int64)}] * 4
    model = GPT2LMHeadModel(GPT2Config(vocab_size=5, n_positions=8, n_embd=16, n_layer=1, n_head=2))
    args = TrainingArguments(str(folder / "out"), max_steps=1, report_to=[], use_cpu=True, **arguments)
    return Trainer(model, args, train_dataset=data, eval_dataset=data, callbacks=callbacks)


@needs("accelerate")
def test_a_trainer_that_would_not_go_on_from_its_tags(tmp_path: Path) -> None:
    from xla_ckpt.integrations.transformers import CheckpointCallback

    with pytest.raises(TypeError, match=r"no argument 'asinc_save': did you mean 'async_save'\?"):
        CheckpointCallback(tmp_path / "tags", asinc_save=True)  # the first save would be hours away
    callback = CheckpointCallback(tmp_path / "tags")
    with pytest.raises(xla_ckpt.UsageError, match="has not got this callback"):
        callback.resume(trainer(tmp_path, []))
    best: dict[str, Any] = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}
    for options in (best, {"save_strategy": "best", "metric_for_best_model": "loss", "eval_strategy": "steps"}):
        with pytest.raises(xla_ckpt.UsageError, match="load_best_model_at_end"):
            callback.resume(trainer(tmp_path, [callback], **options))
    with pytest.raises(xla_ckpt.UsageError, match="does not look for its checkpoint") as caught:
        trainer(tmp_path, [callback]).train()
    assert "resume_from_checkpoint=callback.resume(trainer)" in str(caught.value)
    early = trainer(tmp_path, [callback])
    early.args.enable_jit_checkpoint = True  # given to TrainingArguments, it takes SIGTERM of this process over
    with pytest.raises(xla_ckpt.UsageError, match="enable_jit_checkpoint"):
        callback.resume(early)
    deep = trainer(tmp_path, [callback])
    deep.is_deepspeed_enabled = True  # as with TrainingArguments(deepspeed=...), which asks for the package
    with pytest.raises(xla_ckpt.UsageError, match="DeepSpeed"):
        callback.resume(deep)
    assert not xla_ckpt.has_checkpoint(tmp_path / "tags")


@needs("accelerate")
def test_a_tag_that_has_no_state_of_a_trainer(tmp_path: Path) -> None:
    from xla_ckpt.integrations.transformers import CheckpointCallback

    xla_ckpt.save_checkpoint(tmp_path / "tags", "weights", {"w": torch.ones(1)})
    callback = CheckpointCallback(tmp_path / "tags")
    with pytest.raises(xla_ckpt.IncompatibleCheckpointError, match="no state of a Trainer") as caught:
        callback.resume(trainer(tmp_path, [callback]))
    assert caught.value.tag == "weights"


@needs("accelerate")
def test_a_trainer_that_goes_on_from_another_folder(tmp_path: Path) -> None:
    from xla_ckpt.integrations.transformers import CheckpointCallback

    callback = CheckpointCallback(tmp_path / "tags")
    first = trainer(tmp_path, [callback], save_strategy="epoch")
    first.train(resume_from_checkpoint=callback.resume(first))
    callback = CheckpointCallback(tmp_path / "tags")
    second = trainer(tmp_path, [callback])
    folder = callback.resume(second)
    with pytest.raises(xla_ckpt.UsageError, match="another folder") as caught:
        second.train(resume_from_checkpoint=str(tmp_path / "out"))
    assert caught.value.found == str(tmp_path / "out")
    second.train(resume_from_checkpoint=folder)
    assert second._load_from_checkpoint.__func__ is type(second)._load_from_checkpoint, "its own is in force again"


@needs("accelerate")
@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM"])
def test_accelerate_where_others_keep_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    from accelerate import Accelerator, DistributedType

    from xla_ckpt.integrations.accelerate import load_state, save_state

    accelerator = Accelerator(cpu=True)
    # As the plugins do, which ask for their packages.
    monkeypatch.setitem(accelerator.state.__dict__, "distributed_type", DistributedType(kind))
    with pytest.raises(xla_ckpt.UsageError, match=kind) as caught:
        save_state(accelerator, tmp_path, "a")
    assert "accelerator.save_state" in str(caught.value)
    assert not xla_ckpt.has_checkpoint(tmp_path)
    with pytest.raises(xla_ckpt.UsageError, match=kind):
        load_state(accelerator, tmp_path)


def one_file_of_two_ranks(rank: int, root: str) -> str:
    from xla_ckpt.integrations.lightning import TagIO

    with pytest.raises(xla_ckpt.UsageError) as caught:
        TagIO().save_checkpoint({"w": torch.ones(1)}, f"{root}/a.ckpt")
    return str(caught.value)


@needs("lightning")
def test_lightning(tmp_path: Path) -> None:
    from xla_ckpt.integrations.lightning import CheckpointCallback, TagIO

    with pytest.raises(xla_ckpt.UsageError, match="every_n_steps"):
        CheckpointCallback(tmp_path, every_n_steps=0)
    for adapter in (CheckpointCallback, TagIO):
        with pytest.raises(TypeError, match=r"no argument 'asinc_save': did you mean 'async_save'\?"):
            adapter(*([tmp_path] * (adapter is CheckpointCallback)), asinc_save=True)
    with pytest.raises(TypeError, match=r"CheckpointCallback\(\) has no argument.*did you mean 'every_n_steps'\?"):
        CheckpointCallback(tmp_path, every_n_step=2)
    with pytest.raises(xla_ckpt.UsageError, match="storage_options"):
        TagIO().save_checkpoint({"w": torch.ones(1)}, tmp_path / "a.ckpt", storage_options={"fast": True})
    for told in run_on_ranks(one_file_of_two_ranks, 2, str(tmp_path)):
        assert "saves on rank 0 alone" in told
        assert "expected one process, found 2 ranks" in told
    assert not xla_ckpt.has_checkpoint(tmp_path)


def on_two_ranks(rank: int, root: str, log: str) -> None:
    lightning_job.lightning_losses(root, f"{log}{rank}", every_n_steps=2, stateful=True)


@needs("lightning", "torchdata")
def test_data_loaders_of_lightning_on_another_number_of_ranks(tmp_path: Path) -> None:
    root, log = str(tmp_path / "run"), str(tmp_path / "log")
    run_alone(lightning_job.lightning, root, log, {"every_n_steps": 2, "stateful": True})
    tags = xla_ckpt.list_tags(root)
    with pytest.raises(xla_ckpt.UsageError, match="the data loaders have states of their own"):
        run_on_ranks(on_two_ranks, 2, root, log)
    assert xla_ckpt.list_tags(root) == tags


def titan(rank: int, folder: str) -> None:
    with pytest.raises(xla_ckpt.UsageError, match="async_mode='async'"):
        titan_job.run(rank, folder, 1, {"async_mode": "async_with_pinned_mem"})
    titan_job.run(rank, folder, 1, {})
    with pytest.raises(FileNotFoundError, match="load_step=7"):
        titan_job.run(rank, folder, 1, {"first": 7})


@needs("torchtitan", "torch.distributed._local_tensor")
def test_torchtitan(tmp_path: Path) -> None:
    run_on_ranks(titan, 1, str(tmp_path))
