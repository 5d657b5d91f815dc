"""Checkpoints of a Hugging Face `Trainer`: a callback, and how its `train` goes on from a tag.

The Trainer decides from the files of a folder how many batches it skips, before it calls any callback. So
`CheckpointCallback.resume` makes a folder that holds the Trainer's own state and no weights, keeps the Trainer from
loading weights, and the callback loads the tag as soon as the optimizer is there. (Files and order of events:
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
from xla_ckpt.integrations.call_keywords import CallKeywords, keeping_keywords
from xla_ckpt.integrations.random_state import CapturedRNGState
from xla_ckpt.loading.load import load_checkpoint
from xla_ckpt.logs import get_logger
from xla_ckpt.options import LoadOptions
from xla_ckpt.saving.registry import SaveHandle
from xla_ckpt.saving.save import finalize_checkpoint, save_checkpoint
from xla_ckpt.storage.resolve import PathLike

logger = get_logger(__name__)

_STATE = "trainer_state"
"""Where the Trainer's own state is in the `user_content` of a tag."""


class CheckpointCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not looked into
    """Saves what a `Trainer` would save, when it would, as a tag; and has a Trainer go on from the newest one.

    ::

        callback = CheckpointCallback("runs/lm", async_save=True, num_kept_ckpts=3)
        trainer = Trainer(model, TrainingArguments(..., save_strategy="steps", save_steps=100), callbacks=[callback])
        trainer.train(resume_from_checkpoint=callback.resume(trainer))

    `TrainingArguments` say when: ``save_strategy`` and ``save_steps``. The Trainer writes no checkpoint of its own.
    A tag is called ``checkpoint-N``, N being the number of steps, and holds the model, the optimizer, the scheduler,
    the Trainer's state, the random generators of each rank, and the gradient scaler if there is one.

    The tag is written when the next step begins, after the logs and the evaluation of the step that asked for it, with
    the random state of that moment; a run that is resumed sets it at the same place. It also sets the generators at the
    begin of the epoch to what they were there, so that samplers that draw from them give the same order.

    Args:
        root: Root directory of the tags.
        guard: Asked after each step; if the job is to end, the run is saved and stops.
        extras: Further objects with ``state_dict`` and ``load_state_dict``, as for `save_checkpoint`.
        load_options: The `options` of `load_checkpoint`; by default those of `default_options`. Unless they name a
            directory, loads look into the ``local`` one of the saves.
        keywords: Keywords of `save_checkpoint`, such as ``async_save``, ``num_kept_ckpts`` or ``options``, and of
            `load_checkpoint`, such as ``trust_pickle``, ``strict`` or ``cast``; ``num_workers``, ``mesh`` and
            ``shardings`` go to both.
    """

    @keeping_keywords(save_checkpoint, load_checkpoint)
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
        """The newest save."""

        self._root, self._guard, self._extras = root, guard, dict(extras or {})
        self._keywords = CallKeywords.of(keywords, load_options, save=save_checkpoint, load=load_checkpoint)
        self._trainer: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._tag: str | None = None
        self._due = False
        self._now, self._epoch = CapturedRNGState(), CapturedRNGState()
        self._resumed_in_epoch = self._resumed = False
        self._held: Any = None

    def resume(self, trainer: Any, tag: str | None = None) -> str | None:
        """What `trainer.train` gets as ``resume_from_checkpoint``. All ranks call it, before `train`.

        Args:
            trainer: The Trainer that has this callback.
            tag: Which tag; None takes the newest.

        Returns:
            A folder for the Trainer, which it reads once; None if there is no tag: the run begins anew.

        Raises:
            UsageError: The Trainer has not got this callback, or does what cannot be taken over.
            IncompatibleCheckpointError: The tag was not saved by this callback.
        """
        self._check(trainer)
        self._trainer = trainer
        if tag is None and not has_checkpoint(self._root, local=self._keywords.load_options.local):
            return None
        loaded = load_checkpoint(self._root, tag, **self._keywords.load)
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
        """Keep the Trainer from loading weights from a folder, until `on_train_begin`.

        Each kind of models looks for other files there, and so does each kind of Trainers.
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

    # The events of a Trainer, in their order.

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Load the tag that `resume` found."""
        if self._trainer is None:
            raise UsageError(
                "the Trainer does not look for its checkpoint",
                hint="trainer.train(resume_from_checkpoint=callback.resume(trainer))",
            )
        if self._folder is None:
            return
        self._folder.cleanup()
        self._folder = None
        del self._trainer._load_from_checkpoint  # its class's own is in force again
        load_checkpoint(
            self._root,
            self._tag,
            objects["model"],
            objects["optimizer"],
            objects["lr_scheduler"],
            extras=self._members(),
            **self._keywords.load,
        )
        self._resumed = True
        self._resumed_in_epoch = not float(state.epoch or 0).is_integer()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Save, if the last epoch asked for it; samplers draw from the generators after this."""
        self._save_if_due(state, objects)
        if self._resumed:
            (self._epoch if self._resumed_in_epoch else self._now).restore()
            self._resumed = False
            if self._resumed_in_epoch:
                self._held = _sampler_of_epochs(objects["train_dataloader"])
        if self._held is not None:
            # The loader with which transformers 4 and accelerate 1.14 skip batches counts epochs from 0: without this,
            # the rest of a later epoch would come in the order of the first one. transformers 5 tells the sampler its
            # epoch after this event: held without the number, it would give the order of the first one, too.
            self._held.set_epoch(int(state.epoch))
            self._held.set_epoch = lambda epoch: None
        self._epoch.capture()

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Save, if the step before asked for it; its logs and evaluations are done."""
        if self._resumed_in_epoch:
            self._now.restore()
            self._resumed_in_epoch = False
        if self._held is not None:
            del self._held.set_epoch  # its class's own is in force again
            self._held = None
        self._save_if_due(state, objects)

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Take a save over from the Trainer, and ask the guard."""
        if self._guard is not None and self._guard.should_save():
            control.should_save = control.should_training_stop = True
        self._take_over(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Take a save over from the Trainer."""
        self._take_over(control)

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Save, if the last step asked for it, and wait for what is in flight."""
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
        """What a tag holds beside the model, the optimizer and the scheduler."""
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        members = {"rng": self._now, "epoch_rng": self._epoch} | ({} if scaler is None else {"scaler": scaler})
        return {**members, **self._extras}

    def _callback_states(self) -> dict[str, Any]:
        """The states of other callbacks, such as early stopping, in the form in which a Trainer reads them."""
        states: dict[str, list[Any]] = {}
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, ExportableState):
                states.setdefault(type(callback).__name__, []).append(callback.state())
        return dict(states)


def _sampler_of_epochs(loader: Any) -> Any:
    """The sampler of a loader of accelerate's whose order is that of an epoch's number; None if it has no such one."""
    loader = getattr(loader, "dataloader", loader)  # accelerate's wrapper for XLA
    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
    return sampler if hasattr(sampler, "set_epoch") else None
