"""Save and load the state of an accelerate `Accelerator`, in place of `save_state` and `load_state`.

accelerate's hooks (`register_save_state_pre_hook`) can take over the weights, but not the optimizers or the random
state: accelerate pickles these itself after the hooks, into a directory that it has created before (accelerate 1.15,
`Accelerator.save_state`). This module therefore provides functions that replace `save_state` and `load_state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from xla_ckpt.errors import UsageError
from xla_ckpt.loading.load import Loaded, load_checkpoint
from xla_ckpt.saving.background import SaveHandle
from xla_ckpt.saving.save import save_checkpoint
from xla_ckpt.state.per_rank import PerRank
from xla_ckpt.state.rng import RNGState
from xla_ckpt.storage.resolve import PathLike

if TYPE_CHECKING:
    from accelerate import Accelerator


def save_state(
    accelerator: Accelerator,
    root: PathLike,
    tag: str,
    *,
    user_content: Any = None,
    extras: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> SaveHandle:
    """Save all objects given to `accelerator.prepare` and `register_for_checkpointing`. Call it on all ranks.

    Args:
        accelerator: The Accelerator.
        root: Root directory of the tags.
        tag: Name of the checkpoint.
        user_content: Any plain value, such as the step number.
        extras: Further objects with ``state_dict`` and ``load_state_dict``, as for `save_checkpoint`.
        keywords: Keywords of `save_checkpoint`, such as ``async_save``, ``num_kept_ckpts`` or ``options``.

    Raises:
        UsageError: The job uses DeepSpeed or Megatron-LM, which manage the state themselves.
    """
    model, optimizer, scheduler, members = _contents(accelerator, extras)
    return save_checkpoint(root, tag, model, optimizer, scheduler, user_content, extras=members, **keywords)


def load_state(
    accelerator: Accelerator,
    root: PathLike,
    tag: str | None = None,
    *,
    extras: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> Loaded:
    """Load a checkpoint of `save_state` into the objects of an Accelerator. Call it on all ranks.

    Args:
        accelerator: The Accelerator, with the same objects prepared and registered in the same order.
        root: Root directory of the tags.
        tag: Name of the checkpoint; None loads the newest valid one.
        extras: Further objects, under the names that they were saved under.
        keywords: Keywords of `load_checkpoint`, such as ``trust_pickle``, ``strict`` or ``options``.

    Returns:
        The `user_content` of the save, and a report.

    Raises:
        NoCheckpointError: The tag does not exist, or the root contains no tags.
        UsageError: The job uses DeepSpeed or Megatron-LM, which manage the state themselves.
    """
    model, optimizer, scheduler, members = _contents(accelerator, extras)
    return load_checkpoint(root, tag, model, optimizer, scheduler, extras=members, **keywords)


class _Steps:
    """Number of batches that the Accelerator has processed, which gradient accumulation depends on."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._accelerator.step = state["step"]


def _contents(accelerator: Any, extras: Mapping[str, Any] | None) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Return the first model, optimizer and scheduler, and all other objects by name."""
    if accelerator.distributed_type in ("DEEPSPEED", "MEGATRON_LM"):
        raise UsageError(
            f"{accelerator.distributed_type} keeps the state of the optimizer itself, and saves it itself",
            hint="Call accelerator.save_state.",
        )
    members: dict[str, Any] = {"rng": RNGState(), "accelerator": _Steps(accelerator)}
    firsts: list[Any] = []
    for kind in ("models", "optimizers", "schedulers"):
        first, *others = getattr(accelerator, f"_{kind}") or [None]
        firsts.append(first)
        members |= {f"{kind}_{number}": other for number, other in enumerate(others, 1)}
    members |= {f"registered_{number}": registered for number, registered in enumerate(accelerator._custom_objects)}
    members |= {
        f"dataloader_{number}": PerRank(loader)
        for number, loader in enumerate(accelerator._dataloaders)
        if getattr(loader, "use_stateful_dataloader", False)
    }
    if accelerator.scaler is not None:
        members["scaler"] = accelerator.scaler
    model, optimizer, scheduler = firsts
    return model, optimizer, scheduler, {**members, **(extras or {})}
