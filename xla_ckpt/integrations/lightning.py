"""Checkpoints of a Lightning `Trainer`: a callback for any number of ranks, and a `CheckpointIO` for one process.

The callback saves the objects of a run (the module, its optimizers, the loops, the random state) on all ranks, so that
a job of another size can load them. A `CheckpointIO` gets one dict that Lightning has put together on rank 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.plugins import CheckpointIO

from xla_ckpt.api.checkpoints import Checkpoints
from xla_ckpt.api.load import load_checkpoint, restore
from xla_ckpt.api.preemption import PreemptionGuard
from xla_ckpt.api.save import finalize_checkpoint, save, save_checkpoint
from xla_ckpt.api.tags import has_checkpoint
from xla_ckpt.engine.background import SaveHandle
from xla_ckpt.errors import NoCheckpointError, UsageError
from xla_ckpt.integrations.call_keywords import CallKeywords, keeping_keywords
from xla_ckpt.integrations.random_state import RandomMoment
from xla_ckpt.job.current import world_size
from xla_ckpt.keywords import keeping_for
from xla_ckpt.options import LoadOptions, SaveOptions
from xla_ckpt.state.per_rank import PerRank
from xla_ckpt.storage.door import PathLike, full_path

_LOADERS = "combined_loader"
"""Where the state of a fit loop has those of its data loaders (lightning 2.6, `_FitLoop.on_save_checkpoint`)."""


class CheckpointCallback(Callback):  # type: ignore[misc]  # lightning is not looked into
    """Saves a run at the ends of epochs, or every so many steps, and goes on from the newest tag.

    ::

        callback = CheckpointCallback("runs/lm", async_save=True, num_kept_ckpts=3)
        Trainer(max_epochs=3, callbacks=[callback], enable_checkpointing=False).fit(module, loader)

    `fit` begins by loading the newest tag of `root`, if there is one. A tag is called ``step_N``, N being the number of
    optimizer steps. It holds the module, the optimizers and schedulers, the loops, the states of the other callbacks
    and of the precision plugin, and the random generators of each rank.

    A run that is resumed inside of an epoch gets the batches that are left only from a data loader that has a
    ``state_dict`` (torchdata's ``StatefulDataLoader``); Lightning begins the epoch's data anew with any other one, and
    says so. A tag of the end of an epoch is exact with any data loader.

    Args:
        root: Root directory of the tags.
        every_n_steps: Save when the number of optimizer steps is divisible by this; None: at the end of each epoch.
        guard: Asked after each batch; if the job is to end, the run is saved and stops.
        extras: Further objects with ``state_dict`` and ``load_state_dict``, as for `save_checkpoint`.
        save_options: Keywords of `save_checkpoint`, such as ``async_save``, ``num_kept_ckpts`` or ``options``.
    """

    @keeping_for(save_checkpoint, options=SaveOptions)
    def __init__(
        self,
        root: PathLike,
        *,
        every_n_steps: int | None = None,
        guard: PreemptionGuard | None = None,
        extras: Mapping[str, Any] | None = None,
        **save_options: Any,
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise UsageError("every_n_steps is a number of steps", expected="1 or more", found=every_n_steps)
        self.handle: SaveHandle | None = None
        """The newest save."""

        self._root, self._every, self._guard = root, every_n_steps, guard
        self._extras, self._options = dict(extras or {}), save_options
        self._saved_at = -1
        self._random = RandomMoment()
        self._resumed = False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Load the newest tag. The optimizers are there by now, and no batch has been fetched."""
        if not has_checkpoint(self._root):
            return
        model, optimizer, scheduler, members = self._contents(trainer, pl_module)
        places = {name: self._options[name] for name in ("mesh", "shardings") if name in self._options}
        load_checkpoint(self._root, None, model, optimizer, scheduler, extras=members, **places)
        self._saved_at = trainer.global_step
        self._random.restore()  # the samplers' seeds are drawn after this
        self._resumed = True

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Inside of an epoch, set the random state once more: the samplers drew from it at the epoch's begin."""
        if self._resumed and batch_idx > 0:
            self._random.restore()
        self._resumed = False

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save, if it is the step for it, or the job is to end."""
        ending = self._guard is not None and self._guard.should_save()
        if ending:
            trainer.should_stop = True
        if ending or (self._every is not None and trainer.global_step % self._every == 0):
            self._save(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save, if the ends of epochs are meant."""
        if self._every is None:
            self._save(trainer, pl_module)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the save in flight."""
        finalize_checkpoint()

    def _save(self, trainer: Any, pl_module: Any) -> None:
        step = trainer.global_step
        if step == self._saved_at:  # gradients are accumulated, or the guard has said it again
            return
        self._saved_at = step
        self._random.take()
        model, optimizer, scheduler, members = self._contents(trainer, pl_module)
        content = {"step": step, "epoch": trainer.current_epoch}
        self.handle = save_checkpoint(
            self._root, f"step_{step}", model, optimizer, scheduler, content, extras=members, **self._options
        )

    def _contents(self, trainer: Any, module: Any) -> tuple[Any, Any, Any, dict[str, Any]]:
        """The module, the first optimizer and scheduler, and everything else by name."""
        members: dict[str, Any] = {"rng": self._random, "lightning": _Run(trainer, self)}
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        firsts: list[Any] = []
        for kind, objects in (("optimizer", trainer.optimizers), ("scheduler", schedulers)):
            first, *others = objects or [None]
            firsts.append(first)
            members |= {f"{kind}_{number}": other for number, other in enumerate(others, 1)}
        members["loaders"] = PerRank(_Loaders(trainer.fit_loop), reshard=_resharded)
        return module, firsts[0], firsts[1], {**members, **self._extras}


class _Run:
    """What Lightning keeps of a run itself, alike on all ranks: loops, other callbacks, precision."""

    def __init__(self, trainer: Any, callback: Callback) -> None:
        self._trainer = trainer
        self._callbacks = {other.state_key: other for other in trainer.callbacks if other is not callback}

    def state_dict(self) -> dict[str, Any]:
        loop = self._trainer.fit_loop.state_dict()
        return {
            "fit_loop": loop | {"state_dict": {k: v for k, v in loop["state_dict"].items() if k != _LOADERS}},
            "callbacks": {key: state for key, other in self._callbacks.items() if (state := other.state_dict())},
            "precision": self._trainer.precision_plugin.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._trainer.fit_loop.load_state_dict(state["fit_loop"])
        for key, callback_state in state["callbacks"].items():
            if key in self._callbacks:
                self._callbacks[key].load_state_dict(callback_state)
        self._trainer.precision_plugin.load_state_dict(state["precision"])


class _Loaders:
    """The states of the data loaders, of which each rank has its own."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop

    def state_dict(self) -> dict[str, Any]:
        return {_LOADERS: self._loop.state_dict()["state_dict"].get(_LOADERS, [])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state[_LOADERS]:
            self._loop.on_load_checkpoint(dict(state))


def _resharded(states: Sequence[Mapping[str, Any]], _rank: int, world: int) -> Mapping[str, Any]:
    """The state of the data loaders in a job of another size: there is one only if no loader has a state."""
    if any(state[_LOADERS] for state in states):
        raise UsageError(
            "the data loaders have states of their own, each of a part of the data",
            expected=f"{len(states)} ranks",
            found=f"{world} ranks",
            hint="Load on as many ranks, or resume from the end of an epoch with loaders that have no state.",
        )
    return states[0]


class TagIO(CheckpointIO):  # type: ignore[misc]  # lightning is not looked into
    """Writes the checkpoints of `ModelCheckpoint` and `Trainer.save_checkpoint` as tags. For one process.

    ::

        Trainer(plugins=[TagIO(async_save=True)], callbacks=[ModelCheckpoint("runs/lm")])

    ``runs/lm/epoch=0-step=10.ckpt`` is the tag ``epoch=0-step=10.ckpt`` of the root ``runs/lm`` then. What Lightning
    puts into a checkpoint comes back; the random state is no part of that. In a job of several ranks Lightning calls a
    `CheckpointIO` on rank 0 alone, where nothing says how arrays are split: `CheckpointCallback` is for those.

    Args:
        load_options: The `options` of `xla_ckpt.restore`; by default those of `default_options`. Unless they name a
            directory, loads look into the ``local`` one of the saves.
        keywords: Keywords of `xla_ckpt.save`, such as ``async_save`` or ``options``, and of `xla_ckpt.restore`, such as
            ``trust_pickle``; ``num_workers``, ``mesh`` and ``shardings`` go to both. Lightning decides itself which
            checkpoints are deleted, and how the weights have to fit (the module's ``strict_loading``).
    """

    @keeping_keywords(save, restore, without=("cast",))
    def __init__(self, *, load_options: LoadOptions | None = None, **keywords: Any) -> None:
        self._keywords = CallKeywords.of(keywords, load_options, save=save, load=restore)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any = None) -> None:
        """Save a checkpoint under a path.

        Raises:
            UsageError: The job has several ranks, or there are `storage_options`.
        """
        root, tag = _place(path)
        if storage_options is not None:
            raise UsageError("there are no storage_options", path=root, tag=tag, found=repr(storage_options))
        if (world := world_size(root)) > 1:
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
        """Load what was saved under a path, as CPU tensors.

        Pickled objects are loaded with ``weights_only=False``, and with ``TagIO(trust_pickle=True)`` unless
        `weights_only` is True.

        Raises:
            CheckpointError: As `xla_ckpt.restore`.
        """
        root, tag = _place(path)
        keywords = self._keywords.load
        if weights_only is not None:
            keywords["trust_pickle"] = not weights_only
        tree: dict[str, Any] = restore(root, tag, **keywords).tree
        return tree

    def remove_checkpoint(self, path: PathLike) -> None:
        """Delete a tag, once what is in flight is saved. If it is gone already, do nothing.

        Raises:
            CheckpointError: As `xla_ckpt.Checkpoints.delete`.
        """
        finalize_checkpoint()
        root, tag = _place(path)
        # A run that resumes from an older checkpoint deletes once more what was deleted after it.
        with contextlib.suppress(NoCheckpointError):
            Checkpoints(root).delete(tag, force=True)

    def teardown(self) -> None:
        """Wait for the save in flight."""
        finalize_checkpoint()


def _place(path: PathLike) -> tuple[str, str]:
    """The root directory and the tag of a path."""
    root, _, tag = full_path(path).rstrip("/").rpartition("/")
    return root, tag
