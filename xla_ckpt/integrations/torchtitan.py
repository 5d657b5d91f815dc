"""Checkpoint manager for torchtitan: atomic, verified saves and loads of DCP directories.

In a torchtitan configuration, ``checkpoint=CheckpointManager.Config(enable=True, ...)`` with this class replaces
torchtitan's manager, in the same folder. (Interface and member names: torchtitan 0.3,
`torchtitan/components/checkpointer`.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torchtitan.components import checkpointer
from torchtitan.components.checkpointer import MODEL, AsyncMode
from torchtitan.tools.utils import GarbageCollection

import xla_ckpt.dcp as dcp
from xla_ckpt.core.tree.path import format_leaves
from xla_ckpt.dcp.calls import PARTIAL_LOAD
from xla_ckpt.dcp.reader import TRUST_PICKLE
from xla_ckpt.dcp.state_dicts import ChunkLoadPlanner
from xla_ckpt.errors import CheckpointError, UsageError
from xla_ckpt.inspection.tags import list_tags
from xla_ckpt.logs import get_logger
from xla_ckpt.state.rng import RNGState

logger = get_logger(__name__)

_STEP = re.compile(r"step-(\d+)")
_RNG = "rng"
"""Name of the random generators in a checkpoint."""

_SETTINGS = {
    PARTIAL_LOAD: "CheckpointManager.Config(strict=False)",
    TRUST_PICKLE: "Set CheckpointManager.Config(trust_pickle=True)",
}
"""Arguments named in errors of `xla_ckpt.dcp` -> the manager's settings that set them."""


class CheckpointManager(checkpointer.CheckpointManager):  # type: ignore[misc]  # torchtitan is not type-checked
    """torchtitan checkpoint manager whose directories are committed atomically and verified.

    Each manager can resume from checkpoints of the other. This one also stores the random generators of each rank, and
    sets them when it loads; torchtitan's manager ignores them. Hugging Face files are handled by torchtitan.

    Args:
        config: See `Config`.
        states: Further members, such as torchtitan's ``train_state``.
        members: The other arguments of torchtitan's manager.

    Raises:
        UsageError: The configuration asks for saves in a separate process.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(checkpointer.CheckpointManager.Config):  # type: ignore[misc]  # not type-checked
        """torchtitan's checkpoint settings, with additional ones of this manager."""

        trust_pickle: bool = False
        """True allows stored non-tensor values of any class. Loading them may run arbitrary code."""

        strict: bool = True
        """False keeps the current values of missing entries, and logs them. To exclude whole members, use torchtitan's
        ``exclude_from_loading``.
        """

    def __init__(self, config: Any, *, states: dict[str, Any], **members: Any) -> None:
        if config.enable and AsyncMode(config.async_mode) is AsyncMode.ASYNC_WITH_PINNED_MEM:
            raise UsageError(
                "saves are done by a thread, not by a process",
                found=f"async_mode={config.async_mode!r}",
                hint="Use async_mode='async'.",
            )
        super().__init__(config, states={**states, _RNG: _Generators()}, **members)
        self.trust_pickle, self.strict = config.trust_pickle, config.strict

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        future = None
        if async_mode is AsyncMode.ASYNC:
            future = dcp.async_save(state_dict, checkpoint_id=checkpoint_id, process_group=self.pg)
        else:
            dcp.save(state_dict, checkpoint_id=checkpoint_id)
        if enable_garbage_collection:  # torchtitan has disabled Python's garbage collection
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return future

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        planner = _Planner(allow_partial_load=not self.strict)
        with _naming_settings():
            dcp.load(state_dict, checkpoint_id=checkpoint_id, planner=planner, trust_pickle=self.trust_pickle)
        self.states[MODEL].load_state_dict(state_dict)

    def _steps(self) -> list[int]:
        """Return the steps with a complete checkpoint.

        torchtitan's own method also returns the leftovers of killed saves.
        """
        return sorted(int(match[1]) for tag in list_tags(self.folder) if (match := _STEP.fullmatch(tag)))

    def _find_load_step(self, folder: str = "") -> int:
        return max(self._steps(), default=-1)

    def _purge_stale_checkpoints(self) -> None:
        if self._should_purge():
            for step in self._steps()[: -self.keep_latest_k]:
                self.purge_queue.put(self._create_checkpoint_id(step))


@contextmanager
def _naming_settings() -> Iterator[None]:
    """Replace argument names in errors with the names of this manager's settings."""
    try:
        yield
    except CheckpointError as error:
        for argument, setting in _SETTINGS.items():
            error.hint = error.hint and error.hint.replace(argument, setting)
        raise


class _Generators:
    """Random generators of all ranks, each under its own key."""

    def state_dict(self) -> dict[str, Any]:
        return {_own(): RNGState().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if _own() in state:
            RNGState().load_state_dict(state[_own()])
        else:
            logger.warning("no state of random generators is stored for %s: they stay as they are", _own())


class _Planner(ChunkLoadPlanner):
    """Load planner that requests random generators only if they are stored.

    They are missing in checkpoints of torchtitan's manager; for some ranks in checkpoints of smaller jobs; and for
    accelerators in checkpoints of jobs without any.
    """

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None, *args: Any) -> None:
        stored = () if metadata is None else metadata.state_dict_metadata
        above = f"{_RNG}.{_own()}."
        kinds = {key.removeprefix(above).partition(".")[0] for key in stored if key.startswith(above)}
        if _RNG in state_dict:
            wanted = {kind: state for kind, state in state_dict[_RNG][_own()].items() if kind in kinds}
            state_dict[_RNG] = {_own(): wanted} if wanted else {}
        super().set_up_planner(state_dict, metadata, *args)
        if self.allow_partial_load and (absent := sorted(self.state_dict.keys() - {*stored})):
            logger.warning("not stored, and left as they are (strict=False): %s", format_leaves(absent))


def _own() -> str:
    """Return the key of this rank."""
    return f"rank_{dist.get_rank() if dist.is_initialized() else 0}"
