"""Checkpoints of a Hugging Face `Trainer`: a callback that saves tags and resumes `train` from one.

The Trainer computes the number of batches to skip from the files of a folder, before it calls any callback.
`CheckpointCallback.resume` therefore creates a folder with the Trainer's state and no weights, and prevents the Trainer
from loading weights. The callback loads the tag as soon as the optimizer exists. (Files and order of events:
`Trainer.train` and `Trainer._inner_training_loop` of transformers 4.57 and 5.24.)
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from xla_ckpt.errors import IncompatibleCheckpointError, UsageError
from xla_ckpt.features.preemption import PreemptionGuard
from xla_ckpt.inspection.tags import has_checkpoint
from xla_ckpt.integrations.call_keywords import CallKeywords, check_call_keywords
from xla_ckpt.integrations.random_state import CapturedRNGState
from xla_ckpt.loading.load import load_checkpoint
from xla_ckpt.logs import get_logger
from xla_ckpt.options import LoadOptions
from xla_ckpt.saving.background import SaveHandle
from xla_ckpt.saving.save import finalize_checkpoint, save_checkpoint
from xla_ckpt.storage.resolve import PathLike

logger = get_logger(__name__)

_STATE = "trainer_state"
"""Key of the Trainer's state in the `user_content` of a tag."""


class CheckpointCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not type-checked
    """Callback that saves a `Trainer` run to tags whenever the Trainer would save, and resumes from the newest tag.

    ::

        callback = CheckpointCallback("runs/lm", async_save=True, num_kept_ckpts=3)
        trainer = Trainer(model, TrainingArguments(..., save_strategy="steps", save_steps=100), callbacks=[callback])
        trainer.train(resume_from_checkpoint=callback.resume(trainer))

    ``save_strategy`` and ``save_steps`` of `TrainingArguments` determine when to save. The Trainer itself writes no
    checkpoints. A tag is called ``checkpoint-N``, where N is the number of steps, and contains the model, the
    optimizer, the scheduler, the Trainer's state, the random generators of each rank, and the gradient scaler if there
    is one.

    The tag is written when the next step begins, after the logs and the evaluation of the step that requested it, with
    the random state of that moment; a resumed run sets it at the same place. It also sets the generators at the
    beginning of the epoch to their values there, so that samplers that draw from them give the same order.

    Args:
        root: Root directory of the tags.
        guard: Checked after each step. When the job should end, the run is saved and stops.
        extras: Further objects with ``state_dict`` and ``load_state_dict``, as for `save_checkpoint`.
        load_options: The `options` of `load_checkpoint`; `default_options` by default. Unless they set ``local``, loads
            also read the ``local`` directory of the saves.
        keywords: Keywords of `save_checkpoint`, such as ``async_save``, ``num_kept_ckpts`` or ``options``, and of
            `load_checkpoint`, such as ``trust_pickle``, ``strict`` or ``cast``; ``num_workers``, ``mesh`` and
            ``shardings`` go to both.
    """

    @check_call_keywords(save_checkpoint, load_checkpoint)
    def __init__(
        self,
        root: PathLike,
        *,
        guard: PreemptionGuard | None = None,
        extras: Mapping[str, Any] | None = None,
        load_options: LoadOptions | None = None,
        **keywords: Any,
    ) -> None:
        self.handle: SaveHandle | None = None
        """Handle of the newest save."""

        self._root, self._guard, self._extras = root, guard, dict(extras or {})
        self._keywords = CallKeywords.create(keywords, load_options, save=save_checkpoint)
        self._trainer: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._tag: str | None = None
        self._due = False
        self._now, self._epoch = CapturedRNGState(), CapturedRNGState()
        self._resumed_in_epoch = self._resumed = False
        self._held: Any = None

    def resume(self, trainer: Any, tag: str | None = None) -> str | None:
        """Return the ``resume_from_checkpoint`` argument for `trainer.train`. Call it on all ranks, before `train`.

        Args:
            trainer: The Trainer that has this callback.
            tag: Tag to resume from; None selects the newest.

        Returns:
            A folder for the Trainer, which reads it once; None if there is no tag, which starts a new run.

        Raises:
            UsageError: The Trainer does not have this callback, or uses an unsupported feature.
            IncompatibleCheckpointError: The tag was not saved by this callback.
        """
        self._check(trainer)
        self._trainer = trainer
        if tag is None and not has_checkpoint(self._root, local=self._keywords.load_options.local):
            return None
        loaded = load_checkpoint(self._root, tag, **self._keywords.select_for_load(load_checkpoint))
        content = loaded.user_content
        if not isinstance(content, Mapping) or _STATE not in content:
            raise IncompatibleCheckpointError(
                "the tag holds no state of a Trainer",
                path=str(self._root),
                tag=loaded.report.tag,
                hint="Name a tag that this callback has saved, or load the weights with load_checkpoint(model=...).",
            )
        self._tag = loaded.report.tag
        self._folder = tempfile.TemporaryDirectory(prefix="xla_ckpt-trainer-")
        TrainerState(**content[_STATE]).save_to_json(os.path.join(self._folder.name, TRAINER_STATE_NAME))
        self._hold_back_weights(trainer, self._folder.name)
        return self._folder.name

    def _hold_back_weights(self, trainer: Any, folder: str) -> None:
        """Prevent the Trainer from loading weights from a folder, until `on_train_begin`.

        The file names that it looks for depend on the class of the model and of the Trainer.
        """

        def load_nothing(checkpoint: str, *_: Any) -> None:
            if checkpoint != folder:
                raise UsageError(
                    "the Trainer goes on from another folder than the one that was made for it",
                    expected=folder,
                    found=checkpoint,
                    hint="trainer.train(resume_from_checkpoint=callback.resume(trainer))",
                )

        trainer._load_from_checkpoint = load_nothing

    def _check(self, trainer: Any) -> None:
        if self not in trainer.callback_handler.callbacks:
            raise UsageError("the Trainer has not got this callback", hint="Trainer(..., callbacks=[callback])")
        args = trainer.args
        if args.load_best_model_at_end or args.save_strategy == "best":
            raise UsageError(
                "load_best_model_at_end=True and save_strategy='best' are about the Trainer's own checkpoints",
                hint="Save with 'steps' or 'epoch', and load the best tag by load_checkpoint(root, tag, model=model).",
            )
        if getattr(args, "enable_jit_checkpoint", False):  # since transformers 5
            raise UsageError(
                "enable_jit_checkpoint=True has the Trainer write a checkpoint of its own when the job is told to end",
                hint="CheckpointCallback(root, guard=xla_ckpt.PreemptionGuard()) saves a tag then.",
            )
        if trainer.is_deepspeed_enabled:
            raise UsageError("DeepSpeed keeps the state of the optimizer itself, and saves it itself")

    # Hooks, in the order in which a Trainer calls them.

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Load the tag that `resume` selected."""
        if self._trainer is None:
            raise UsageError(
                "the Trainer does not look for its checkpoint",
                hint="trainer.train(resume_from_checkpoint=callback.resume(trainer))",
            )
        if self._folder is None:
            return
        self._folder.cleanup()
        self._folder = None
        del self._trainer._load_from_checkpoint  # restores the method of the class
        load_checkpoint(
            self._root,
            self._tag,
            objects["model"],
            objects["optimizer"],
            objects["lr_scheduler"],
            extras=self._members(),
            **self._keywords.select_for_load(load_checkpoint),
        )
        self._resumed = True
        self._resumed_in_epoch = not float(state.epoch or 0).is_integer()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Save if the previous epoch requested it, before samplers draw from the generators."""
        self._save_if_due(state, objects)
        if self._resumed:
            (self._epoch if self._resumed_in_epoch else self._now).restore()
            self._resumed = False
            if self._resumed_in_epoch:
                self._held = _sampler_of_epochs(objects["train_dataloader"])
        if self._held is not None:
            # The loader with which transformers 4 and accelerate 1.14 skip batches counts epochs from 0. Without this
            # call, the rest of a later epoch would have the order of the first one. transformers 5 sets the sampler's
            # epoch after this event; held without the number, the sampler would give the order of the first epoch, too.
            self._held.set_epoch(int(state.epoch))
            self._held.set_epoch = lambda epoch: None
        self._epoch.capture()

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Save if the previous step requested it, after its logs and evaluations."""
        if self._resumed_in_epoch:
            self._now.restore()
            self._resumed_in_epoch = False
        if self._held is not None:
            del self._held.set_epoch  # restores the method of the class
            self._held = None
        self._save_if_due(state, objects)

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Take over a save requested by the Trainer, and check the guard."""
        if self._guard is not None and self._guard.should_save():
            control.should_save = control.should_training_stop = True
        self._take_over(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Take over a save requested by the Trainer."""
        self._take_over(control)

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Save if the last step requested it, and wait for saves in flight."""
        self._save_if_due(state, objects)
        finalize_checkpoint()

    def _take_over(self, control: TrainerControl) -> None:
        self._due = self._due or control.should_save
        control.should_save = False

    def _save_if_due(self, state: TrainerState, objects: Mapping[str, Any]) -> None:
        if not self._due:
            return
        self._due = False
        self._now.capture()
        self.handle = save_checkpoint(
            self._root,
            f"checkpoint-{state.global_step}",
            objects["model"],
            objects["optimizer"],
            objects["lr_scheduler"],
            {_STATE: {**dataclasses.asdict(state), "stateful_callbacks": self._callback_states()}},
            extras=self._members(),
            **self._keywords.save,
        )

    def _members(self) -> dict[str, Any]:
        """Return the stored objects other than the model, the optimizer and the scheduler."""
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        members = {"rng": self._now, "epoch_rng": self._epoch} | ({} if scaler is None else {"scaler": scaler})
        return {**members, **self._extras}

    def _callback_states(self) -> dict[str, Any]:
        """Return the states of other callbacks, such as early stopping, in the form that a Trainer reads."""
        states: dict[str, list[Any]] = {}
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, ExportableState):
                states.setdefault(type(callback).__name__, []).append(callback.state())
        return dict(states)


def _sampler_of_epochs(loader: Any) -> Any:
    """Return the sampler of an accelerate loader whose order depends on the epoch number; None if it has none."""
    loader = getattr(loader, "dataloader", loader)  # accelerate's wrapper for XLA
    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
    return sampler if hasattr(sampler, "set_epoch") else None
