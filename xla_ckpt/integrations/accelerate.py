"""Checkpoints of programs that use `accelerate`: what `Accelerator.save_state` stores, as a tag.

accelerate's hooks (`register_save_state_pre_hook`) can take the weights over, but neither the optimizers nor the random
state: accelerate pickles those itself after the hooks, into a directory that it has made before (accelerate 1.15,
`Accelerator.save_state`). So these are functions in the place of `save_state` and `load_state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from xla_ckpt.errors import UsageError
from xla_ckpt.loading.load import Loaded, load_checkpoint
from xla_ckpt.saving.registry import SaveHandle
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
    """Save all that was given to `accelerator.prepare` and `register_for_checkpointing`. All ranks call it.

    Args:
        accelerator: The Accelerator.
        root: Root directory of the tags.
        tag: Name of the checkpoint.
        user_content: Any plain value, such as the number of the step.
        extras: Further objects with ``state_dict`` and ``load_state_dict``, as for `save_checkpoint`.
        keywords: Those of `save_checkpoint`, such as ``async_save``, ``num_kept_ckpts`` or ``options``.

    Raises:
        UsageError: DeepSpeed or Megatron-LM keep the state themselves.
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
    """Load what `save_state` has saved, into what was given to the Accelerator. All ranks call it.

    Args:
        accelerator: The Accelerator, with the same objects prepared and registered in the same order.
        root: Root directory of the tags.
        tag: Which checkpoint; None takes the newest good one.
        extras: Further objects, under the names that they were saved under.
        keywords: Those of `load_checkpoint`, such as ``trust_pickle``, ``strict`` or ``options``.

    Returns:
        The `user_content` of the save, and a report.

    Raises:
        NoCheckpointError: There is no such tag, or none at all.
        UsageError: DeepSpeed or Megatron-LM keep the state themselves.
    """
    model, optimizer, scheduler, members = _contents(accelerator, extras)
    return load_checkpoint(root, tag, model, optimizer, scheduler, extras=members, **keywords)


class _Steps:
    """How many batches the Accelerator has seen: gradient accumulation counts them."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._accelerator.step = state["step"]


def _contents(accelerator: Any, extras: Mapping[str, Any] | None) -> tuple[Any, Any, Any, dict[str, Any]]:
    """The first model, optimizer and scheduler, and everything else by name."""
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
