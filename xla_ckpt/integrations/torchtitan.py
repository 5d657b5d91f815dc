"""torchtitan's checkpoint manager: its `BaseCheckpointManager`, with tags of this library.

In a configuration of torchtitan's, ``checkpoint=CheckpointManager.Config(enable=True, ...)`` with this class takes the
place of torchtitan's own manager. (Interface and names of the parts: torchtitan 0.3,
`torchtitan/components/checkpointer/base.py`.)
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.components.checkpointer import (
    DATALOADER,
    LR_SCHEDULER,
    OPTIMIZER,
    BaseCheckpointManager,
    ModelWrapper,
)
from torchtitan.config import TORCH_DTYPE_MAP

from xla_ckpt.api.load import load_checkpoint
from xla_ckpt.api.save import finalize_checkpoint, save_checkpoint
from xla_ckpt.api.tags import list_tags
from xla_ckpt.engine.background import SaveHandle
from xla_ckpt.errors import NoCheckpointError, UsageError
from xla_ckpt.state.per_rank import PerRank
from xla_ckpt.state.rng import RNGState

logger = logging.getLogger(__name__)

_TAG = re.compile(r"step-(\d+)")


class CheckpointManager(BaseCheckpointManager):  # type: ignore[misc]  # torchtitan is not looked into
    """Saves and loads what torchtitan's trainer gives to a checkpoint manager, and the random generators of each rank.

    Tags are called ``step-N``, in the folder that the configuration names. The last one is of the model alone, in
    ``export_dtype``, if the configuration says so, which is torchtitan's default; a run does not go on from that one.

    Args:
        config: See `Config`.
        dataloader: The data loader; every rank has a state of its own.
        model_parts: The parts of the model that this rank has.
        optimizers: torchtitan's container.
        lr_schedulers: torchtitan's container.
        states: Further members, such as torchtitan's ``train_state``.
        sd_adapter: What maps names to Hugging Face's; not used.
        base_folder: What ``config.folder`` is relative to.

    Raises:
        UsageError: The configuration wants Hugging Face's files, which ``xla-ckpt export`` and
            torchtitan's own manager write.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]  # likewise
        """torchtitan's own settings, and this library's."""

        async_save: bool = True
        """Return from a save as soon as the state is frozen."""

    def __init__(
        self,
        config: Any,
        *,
        dataloader: Any,
        model_parts: Any,
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future = None  # what is in flight is known to this library; torchtitan need not wait for it
        if not self.enable:
            return
        if config.initial_load_in_hf or config.last_save_in_hf:
            raise UsageError(
                "this checkpoint manager neither reads nor writes Hugging Face's files",
                hint="xla_ckpt.export_hf writes them from a tag.",
            )
        self.config = config
        self.folder = "/".join(part for part in (base_folder.rstrip("/"), config.folder) if part)
        self.handle: SaveHandle | None = None
        self._model, self._optimizers = ModelWrapper(model_parts), optimizers
        self._members: dict[str, Any] = {**states, LR_SCHEDULER: lr_schedulers, "rng": RNGState()}
        if dataloader is not None:
            self._members[DATALOADER] = PerRank(dataloader)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        config = self.config
        wanted = last_step or curr_step % config.interval == 0
        if config.load_only or not (wanted or (curr_step == 1 and config.enable_first_step_checkpoint)):
            return False
        model = self._model.state_dict()
        kept = config.keep_latest_k or None
        if last_step and config.last_save_model_only:
            dtype = TORCH_DTYPE_MAP[config.export_dtype]
            model = {name: value.to(dtype) if value.is_floating_point() else value for name, value in model.items()}
            self.handle = save_checkpoint(self.folder, f"step-{curr_step}", model, num_kept_ckpts=kept)
            return True
        self.handle = save_checkpoint(
            self.folder,
            f"step-{curr_step}",
            model,
            self._optimizers.state_dict(),
            user_content={"step": curr_step},
            extras=self._members,
            async_save=config.async_save and not last_step,
            num_kept_ckpts=kept,
        )
        return True

    def _load(self, step: int = -1) -> bool:
        found = [int(match[1]) for tag in list_tags(self.folder) if (match := _TAG.fullmatch(tag))]
        if step != -1 and step not in found:
            raise NoCheckpointError(f"there is no tag step-{step}", path=self.folder)
        if found:
            self._load_tag(self.folder, f"step-{step if step != -1 else max(found)}", model_only=step == 0)
        elif self.config.initial_load_path:
            self._load_tag(self.config.initial_load_path, None, model_only=self.config.initial_load_model_only)
        else:
            return False
        return True

    def _load_tag(self, path: str, tag: str | None, *, model_only: bool) -> None:
        left_out = set(self.config.exclude_from_loading)
        model = self._model.state_dict()
        optimizer = None if model_only or OPTIMIZER in left_out else self._optimizers.state_dict()
        members: Mapping[str, Any] = {}
        if not model_only:
            members = {name: member for name, member in self._members.items() if name not in left_out}
        load_checkpoint(path, tag, model, optimizer, extras=members)
        self._model.load_state_dict(model)
        if optimizer is not None:
            self._optimizers.load_state_dict(optimizer)

    def _wait_for_saving(self) -> None:
        finalize_checkpoint()

    def _maybe_wait_for_staging(self) -> None:
        """A snapshot is complete when a save returns."""

    def _close(self) -> None:
        finalize_checkpoint()
