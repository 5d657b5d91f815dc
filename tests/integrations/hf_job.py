"""A small language model under a Hugging Face Trainer; run in a process of its own. No test of pytest's."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

from tests.integrations.environment import has_accelerator  # which makes the trainers importable, too


def losses(
    root: str, out: str, *, kill_after: int = 0, stop_after: int = 0, lora: dict[str, Any] | None = None,
    **arguments: Any,
) -> list[tuple[float, float]]:  # fmt: skip
    """Train, or go on; losses and norms of gradients of all steps.

    With `lora`, keywords of the callback, adapters of PEFT are trained, on a base model that is the same in all runs
    if the tags hold adapters alone.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

    import xla_ckpt
    from xla_ckpt.integrations.transformers import CheckpointCallback

    text = torch.randint(0, 61, (22, 8), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in text]

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            if kill_after and state.global_step == kill_after:
                if callback.handle is not None:
                    callback.handle.wait()
                os.kill(os.getpid(), signal.SIGKILL)
            if state.global_step == stop_after:
                Path(out, "stop").touch()

    with xla_ckpt.PreemptionGuard(file=Path(out, "stop")) as guard:
        seed = os.getpid() if xla_ckpt.has_checkpoint(root) else 3  # what is not restored shows
        set_seed(3 if lora == {"only": "adapters"} else seed)
        model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_positions=8, n_embd=16, n_layer=1, n_head=2))
        if lora is not None:
            from peft import LoraConfig, get_peft_model

            set_seed(seed)
            model = get_peft_model(model, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1))
        args = TrainingArguments(
            out, per_device_train_batch_size=4, num_train_epochs=3, logging_steps=1, report_to=[], disable_tqdm=True,
            use_cpu=not has_accelerator(), learning_rate=1e-2,
            **{"save_strategy": "steps", "save_steps": 4, **arguments},
        )  # fmt: skip
        callback = CheckpointCallback(root, async_save=True, num_kept_ckpts=2, guard=guard, **lora or {})
        trainer = Trainer(model, args, train_dataset=data, eval_dataset=data[:4], callbacks=[Stop(), callback])
        resumed = callback.resume(trainer)
        trainer.train(resume_from_checkpoint=resumed)
    assert not [name for name in os.listdir(out) if name.startswith("checkpoint")], "the Trainer wrote its own"
    return [(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "loss" in line]


def transformers(root: str, out: str, options: dict[str, Any]) -> list[tuple[float, float]]:
    """Losses and norms of gradients, as the Trainer logs them."""
    Path(out).mkdir(exist_ok=True)
    Path(out, "stop").unlink(missing_ok=True)
    return losses(root, out, **options)
