"""Checkpoints of a Lightning `Trainer`: a callback for any number of ranks, and a `CheckpointIO` for one process.

The callback stores the contents of a Lightning checkpoint: the module, its optimizers and schedulers as arrays and
plain values that a job of another size can load, and the rest as user content. To resume, it passes that checkpoint
to Lightning before `fit` restores anything, so all hooks run in Lightning's order.

A `CheckpointIO` receives one dict that Lightning has assembled on rank 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins import CheckpointIO

from xla_ckpt.distributed.current_job import get_current_job, get_world_size
from xla_ckpt.distributed.handshake import CallSignature
from xla_ckpt.errors import NoCheckpointError, UsageError
from xla_ckpt.features.preemption import PreemptionGuard
from xla_ckpt.inspection.checkpoints import Checkpoints
from xla_ckpt.inspection.tags import has_checkpoint
from xla_ckpt.integrations.call_keywords import CallKeywords, check_call_keywords
from xla_ckpt.integrations.lightning_run import (
    LOADERS,
    MONITORED,
    RUN,
    Resumed,
    contents_of,
    numbered,
    rename_weights,
    shards_itself,
)
from xla_ckpt.integrations.random_state import CapturedRNGState
from xla_ckpt.loading.load import Loaded, load_checkpoint, restore
from xla_ckpt.options import LoadOptions, SaveOptions, resolve_options
from xla_ckpt.saving.background import SaveHandle
from xla_ckpt.saving.save import finalize_checkpoint, save, save_checkpoint
from xla_ckpt.state.per_rank import PerRank
from xla_ckpt.storage.resolve import PathLike, normalize_path

_FINISHED = "_iterator_finished"
"""Key in the state of torchdata's `StatefulDataLoader` that records the end of its epoch."""


class CheckpointCallback(Checkpoint):  # type: ignore[misc]  # lightning is not type-checked
    """Callback that saves a run at the end of each epoch or every N steps, and resumes from the newest tag.

    ::

        callback = CheckpointCallback("runs/lm", async_save=True, num_kept_ckpts=3)
        Trainer(max_epochs=3, callbacks=[callback]).fit(module, loader)

    `fit` begins by restoring the newest tag of `root`, if there is one. A tag is called ``step_N``, where N is the
    number of optimizer steps. It contains everything in a Lightning checkpoint, such as the state of callbacks and of
    the data module, hyperparameters, and the keys that ``on_save_checkpoint`` of modules and callbacks adds; and the
    random generators and data loaders of each rank. Lightning restores it like its own checkpoints: it calls
    ``on_load_checkpoint`` and ``load_state_dict`` in the same order. With ``fit(ckpt_path=...)`` it restores that file
    instead.

    Lightning calls this callback after all others, like its own `ModelCheckpoint`. A save that is due at the last step
    of an epoch is made at the end of the epoch, after the hooks of the module and of other callbacks.

    A run that is resumed within an epoch skips the batches already used only if the data loader has a ``state_dict``
    (torchdata's ``StatefulDataLoader``). With other data loaders, Lightning restarts the data of the epoch and logs a
    warning. A tag of the end of an epoch is exact with any data loader.

    Args:
        root: Root directory of the tags.
        every_n_steps: Save when the number of optimizer steps is divisible by this; None: at the end of each epoch.
        guard: Checked after each batch. When the job should end, the run is saved and stops.
        extras: Further objects with ``state_dict`` and ``load_state_dict``, as for `save_checkpoint`.
        strict: False resumes with the weights that fit, and logs the others. True uses the module's
            ``strict_loading``, as Lightning does.
        trust_pickle: Load pickled objects, which can run any code. Plain values and arrays never need it; a callback, a
            data module or a hook that stores other objects does, and the save logs a warning that names them.
        load_options: The `options` of `load_checkpoint`; `default_options` by default. Unless they set ``local``, loads
            also read the ``local`` directory of the saves.
        keywords: Keywords of `save_checkpoint`, such as ``async_save``, ``num_kept_ckpts`` or ``options``, of which
            ``num_workers``, ``mesh`` and ``shardings`` also go to the loads.
    """

    best_model_path = ""
    """Attribute that Lightning reads for ``ckpt_path="best"``. Empty, because no tag is marked as the best one."""

    @check_call_keywords(save_checkpoint, load_checkpoint, without=("cast",))
    def __init__(
        self,
        root: PathLike,
        *,
        every_n_steps: int | None = None,
        guard: PreemptionGuard | None = None,
        extras: Mapping[str, Any] | None = None,
        strict: bool = True,
        trust_pickle: bool = False,
        load_options: LoadOptions | None = None,
        **keywords: Any,
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise UsageError("every_n_steps is a number of steps", expected="1 or more", found=every_n_steps)
        self.handle: SaveHandle | None = None
        """Handle of the newest save."""

        self._root, self._every, self._guard = root, every_n_steps, guard
        self._extras, self._strict = dict(extras or {}), strict
        keywords |= {"strict": strict, "trust_pickle": trust_pickle}
        self._keywords = CallKeywords.create(keywords, load_options, save=save_checkpoint)
        self._saved_at = 0  # no training step yet
        self._due = False
        self._random = CapturedRNGState()
        self._resumed: Resumed | None = None
        self._hook: Any = None

    # Hooks for resuming, in the order in which a Trainer calls them.

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Read the newest tag, and pass it to Lightning, which restores it after this hook."""
        if stage == "fit" and not shards_itself(trainer):
            self._resume(trainer, pl_module)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Adapt the optimizer states to the optimizers, which exist now. Lightning loads them after this hook."""
        if shards_itself(trainer):
            self._resume(trainer, pl_module)
        if self._resumed is None:
            return
        if self._hook is not None:
            self._hook.remove()
            if not self._resumed.has_weights:  # the program has given another checkpoint
                self._resumed = None
                return
        # A batch size or learning rate search has dropped it.
        trainer._checkpoint_connector._loaded_checkpoint = self._resumed.checkpoint
        self._resumed.fit_optimizers(trainer, pl_module)
        self._saved_at = self._resumed.checkpoint["global_step"]
        self._random.restore()  # the seeds of samplers are drawn after this

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore the state in a tag of the end of an epoch that Lightning does not restore."""
        if self._resumed is None:
            return
        _step_schedulers(trainer, pl_module, self._resumed.monitored)
        loop = trainer.fit_loop
        states = loop._combined_loader_states_to_load
        # torchdata's loaders have their own generators, which continue in the next epoch. Lightning does not load them
        # between epochs: a loader of another kind would then apply its position at the end of the last epoch to
        # this one.
        if states and all(isinstance(state, Mapping) and state.get(_FINISHED) for state in states):
            loop._combined_loader._load_state_dicts(states)
            loop._combined_loader._state_dicts()  # which creates the iterators that have reached their ends
            self._random.restore()
            iter(loop._data_fetcher)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Set the random state again within an epoch, because samplers drew from it at the epoch's beginning."""
        if self._resumed is not None and not self._resumed.has_begun:
            self._resumed.has_begun = True
            if batch_idx > 0:
                self._random.restore()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save if a save is due at this step, or if the job should end."""
        ending = self._guard is not None and self._guard.should_save()
        if pl_module.automatic_optimization and trainer.fit_loop._should_accumulate():
            return  # no checkpoint contains the gradients of the batches since the last step
        step = trainer.global_step
        is_step = self._every is not None and step % self._every == 0
        due = self._due or (step != self._saved_at and (is_step or ending))
        # The hooks of a validation, or of the end of the epoch, follow such a batch and may change any state.
        waits = trainer.is_last_batch or _validation_follows(trainer)
        self._due = due and waits
        if ending:
            trainer.should_stop = True
        if due and (ending or not waits):  # a job that should end may not have the time to wait
            self._save(trainer, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Save if the last step requested it and the epoch continues."""
        if self._due and not trainer.is_last_batch:
            self._save(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save if saves are made at the end of epochs, or if the last step requested it."""
        if self._resumed is not None and trainer.fit_loop.restarting:
            # Lightning does not step these in an epoch that it has not started.
            _step_schedulers(trainer, pl_module, _collect_plateau_metrics(trainer))
        self._resumed = None
        if self._due or (self._every is None and trainer.global_step != self._saved_at):
            self._save(trainer, pl_module, at_end=True)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the save in flight."""
        finalize_checkpoint()

    def _save(self, trainer: Any, module: Any, *, at_end: bool = False) -> None:
        self._saved_at = step = trainer.global_step
        self._due = False
        contents = contents_of(self._dump(trainer), trainer, module)
        self._random.capture()
        optimizer, optimizers = numbered("optimizer", contents.optimizers)
        scheduler, schedulers = numbered("scheduler", contents.schedulers)
        loaders = PerRank(_Loaders(_ended(contents.loaders) if at_end else contents.loaders), reshard=_resharded)
        monitored = _collect_plateau_metrics(trainer) if at_end and not trainer.fit_loop.restarting else {}
        self.handle = save_checkpoint(
            self._root,
            f"step_{step}",
            contents.model,
            optimizer,
            scheduler,
            {"step": step, "epoch": trainer.current_epoch, RUN: contents.rest, MONITORED: monitored},
            extras={"rng": self._random, "loaders": loaders, **optimizers, **schedulers, **self._extras},
            **self._keywords.save,
        )

    def _dump(self, trainer: Any) -> dict[str, Any]:
        """Return Lightning's checkpoint of the run. A hook that raises on one rank fails the save on all of them."""
        checkpoint: dict[str, Any] = {}

        def dump() -> None:
            checkpoint.update(trainer._checkpoint_connector.dump_checkpoint(weights_only=False))

        timeout = resolve_options(SaveOptions, self._keywords.save.get("options")).timeout
        job = get_current_job("", self._keywords.save.get("mesh"), operation="lightning", timeout=timeout)
        call = CallSignature.create("dump_checkpoint")
        job.skip_if_behind(call)
        with job.participate():
            job.begin_call(call, dump)
        return checkpoint

    def _resume(self, trainer: Any, module: Any) -> None:
        """Read the newest tag, and pass its checkpoint to Lightning."""
        if not has_checkpoint(self._root, local=self._keywords.load_options.local):
            return
        connector, loaders = trainer._checkpoint_connector, _Loaders([])
        extras = {"rng": self._random, "loaders": PerRank(loaders, reshard=_resharded), **self._extras}
        if shards_itself(trainer):
            resumed = self._load_shards(trainer, module, extras)
        else:
            stored = restore(self._root, None, **self._keywords.select_for_load(restore))
            resumed = Resumed(stored.tree, path=stored.report.path, tag=stored.tag, strict=self._strict)
            self._load(stored.tag, extras=extras)
            rename_weights(resumed.checkpoint["state_dict"], module)  # for hooks; layers may be missing until `setup`

            def fit(module: Any, weights: dict[str, Any], *_: Any) -> None:
                if connector._loaded_checkpoint is resumed.checkpoint:  # and the program has given no other one
                    resumed.fit_weights(module, weights, partial(self._load, stored.tag))

            self._hook = module.register_load_state_dict_pre_hook(fit)
        resumed.put_loaders(loaders.states)
        connector._loaded_checkpoint = resumed.checkpoint
        self._resumed = resumed

    def _load_shards(self, trainer: Any, module: Any, extras: Mapping[str, Any]) -> Resumed:
        """Load weights, optimizers and schedulers into the objects of a run whose strategy shards the module."""
        loaded = self._load(None)
        older: dict[str, dict[str, Any]] = {} if RUN in (loaded.user_content or {}) else {RUN: {}}
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        optimizer, others = numbered("optimizer", trainer.optimizers)
        scheduler, more = numbered("scheduler", schedulers)
        self._load(loaded.tag, module, optimizer, scheduler, extras={**extras, **others, **more, **older})
        tree = {"user_content": loaded.user_content, "extras": older}
        resumed = Resumed(tree, path=loaded.report.path, tag=loaded.tag, strict=self._strict)
        resumed.checkpoint["lr_schedulers"] = [each.state_dict() for each in schedulers]
        return resumed

    def _load(
        self,
        tag: str | None,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        extras: Mapping[str, Any] | None = None,
    ) -> Loaded:
        return load_checkpoint(
            self._root,
            tag,
            model,
            optimizer,
            scheduler,
            extras=extras,
            **self._keywords.select_for_load(load_checkpoint),
        )


def _ended(states: Sequence[Any]) -> list[Any]:
    """Return the states of data loaders at the end of an epoch.

    Lightning requests no batch after the last one, so torchdata's loaders have not yet recorded the end.
    """
    return [
        {**state, _FINISHED: True} if isinstance(state, Mapping) and _FINISHED in state else state for state in states
    ]


def _validation_follows(trainer: Any) -> bool:
    """Return True if Lightning runs a validation after the batch that has just ended, within the epoch."""
    loop = trainer.fit_loop
    return bool(loop.epoch_loop._should_check_val_fx(loop._data_fetcher))


def _collect_plateau_metrics(trainer: Any) -> dict[int, Any]:
    """Return {scheduler index: the value to step it with} for the end of this epoch, after all hooks.

    (lightning 2.6, `_FitLoop.on_advance_end`; Lightning's own checkpoints lack that step.)
    """
    if (
        not trainer.lightning_module.automatic_optimization
        or not trainer.fit_loop.epoch_loop._num_ready_batches_reached()
    ):
        return {}
    return {
        number: trainer.callback_metrics[config.monitor]
        for number, config in enumerate(trainer.lr_scheduler_configs)
        if config.reduce_on_plateau
        and config.interval == "epoch"
        and (trainer.current_epoch + 1) % config.frequency == 0
        and config.monitor in trainer.callback_metrics
    }


def _step_schedulers(trainer: Any, module: Any, monitored: Mapping[int, Any]) -> None:
    for number, value in monitored.items():
        module.lr_scheduler_step(trainer.lr_scheduler_configs[number].scheduler, value)


class _Loaders:
    """States of this rank's data loaders."""

    def __init__(self, states: list[Any]) -> None:
        self.states = states

    def state_dict(self) -> dict[str, Any]:
        return {LOADERS: self.states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.states = state[LOADERS]


def _resharded(states: Sequence[Mapping[str, Any]], _rank: int, world: int) -> Mapping[str, Any]:
    """Return the data loader state for a job of another size, which exists only if no loader has a state."""
    if any(state[LOADERS] for state in states):
        raise UsageError(
            "the data loaders have states of their own, each of a part of the data",
            expected=f"{len(states)} ranks",
            found=f"{world} ranks",
            hint="Load on as many ranks, or resume from the end of an epoch with loaders that have no state.",
        )
    return states[0]


class TagIO(CheckpointIO):  # type: ignore[misc]  # lightning is not type-checked
    """`CheckpointIO` that saves tags for `ModelCheckpoint` and `Trainer.save_checkpoint`, for a single process.

    ::

        Trainer(plugins=[TagIO(async_save=True)], callbacks=[ModelCheckpoint("runs/lm")])

    Here, ``runs/lm/epoch=0-step=10.ckpt`` is the tag ``epoch=0-step=10.ckpt`` in the root ``runs/lm``. All entries of a
    Lightning checkpoint are restored; they do not include the random state. In a job of several ranks, Lightning calls
    a `CheckpointIO` only on rank 0, without information about how arrays are sharded. Use `CheckpointCallback` there.

    Args:
        load_options: The `options` of `xla_ckpt.restore`; `default_options` by default. Unless they set ``local``,
            loads also read the ``local`` directory of the saves.
        keywords: Keywords of `xla_ckpt.save`, such as ``async_save`` or ``options``, and of `xla_ckpt.restore`, such as
            ``trust_pickle``; ``num_workers``, ``mesh`` and ``shardings`` go to both. Lightning itself decides which
            checkpoints to delete, and how strictly to match the weights (the module's ``strict_loading``).
    """

    @check_call_keywords(save, restore, without=("cast",))
    def __init__(self, *, load_options: LoadOptions | None = None, **keywords: Any) -> None:
        self._keywords = CallKeywords.create(keywords, load_options, save=save)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any = None) -> None:
        """Save a checkpoint under a path.

        Raises:
            UsageError: The job has several ranks, or `storage_options` are given.
        """
        root, tag = _place(path)
        if storage_options is not None:
            raise UsageError("there are no storage_options", path=root, tag=tag, found=repr(storage_options))
        if (world := get_world_size(root)) > 1:
            raise UsageError(
                "a CheckpointIO saves on rank 0 alone",
                path=root,
                tag=tag,
                expected="one process",
                found=f"{world} ranks",
                hint="Use xla_ckpt.integrations.lightning.CheckpointCallback in the place of ModelCheckpoint.",
            )
        save(root, tag, checkpoint, **self._keywords.save)

    def load_checkpoint(
        self, path: PathLike, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the checkpoint at a path, as CPU tensors.

        Pickled objects are loaded with ``weights_only=False``, and with ``TagIO(trust_pickle=True)`` unless
        `weights_only` is True.

        Raises:
            CheckpointError: As in `xla_ckpt.restore`.
        """
        root, tag = _place(path)
        keywords = self._keywords.select_for_load(restore)
        if weights_only is not None:
            keywords["trust_pickle"] = not weights_only
        tree: dict[str, Any] = restore(root, tag, **keywords).tree
        return tree

    def remove_checkpoint(self, path: PathLike) -> None:
        """Delete a tag after the saves in flight. Do nothing if it does not exist.

        Raises:
            CheckpointError: As in `xla_ckpt.Checkpoints.delete`.
        """
        finalize_checkpoint()
        root, tag = _place(path)
        # A run that resumes from an older checkpoint deletes again the checkpoints deleted after it.
        with contextlib.suppress(NoCheckpointError):
            Checkpoints(root).delete(tag, force=True)

    def teardown(self) -> None:
        """Wait for the save in flight."""
        finalize_checkpoint()


def _place(path: PathLike) -> tuple[str, str]:
    """Return the root directory and the tag of a path."""
    root, _, tag = normalize_path(path).rstrip("/").rpartition("/")
    return root, tag
