"""Checkpoint functions with neuronx-distributed's names, argument order and defaults.

They call `xla_ckpt`: a tag is committed atomically, `load_checkpoint` changes nothing unless the whole checkpoint
fits, and a checkpoint can be resharded to another topology on load. Files have neuronx-distributed's layout, which it
can read, with an additional manifest.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import xla_ckpt
from neuron_compat.nxd.exports import attach_exports
from xla_ckpt.keywords import check_argument_names

__getattr__, __dir__ = attach_exports(__name__)

PathLike = str | os.PathLike[str]


@check_argument_names(xla_ckpt.save_checkpoint)
def save_checkpoint(
    checkpoint_dir_str: PathLike,
    tag: str = "",
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    user_content: Any = None,
    num_workers: int = 8,
    use_xser: bool = False,
    num_kept_ckpts: int | None = None,
    async_save: bool = False,
    zero1_optimizer: bool = False,
    use_zero1_dcp: bool = False,  # noqa: ARG001  # see the docstring
    avoid_saving_lower_precision_weights: bool = False,  # noqa: ARG001
    *,
    layout: str | Sequence[str] | None = None,
    **more: Any,
) -> None:
    """Save a training state under ``<checkpoint_dir_str>/<tag>``. Call it on all ranks.

    Args:
        checkpoint_dir_str: Root directory; created if it does not exist.
        tag: Name of the checkpoint: any string that is a safe file name. Required; an empty one is an error.
        model: A module, or a dict of arrays.
        optimizer: An optimizer, or a dict.
        scheduler: A learning rate scheduler, or a dict.
        user_content: Any Python value; the value of rank 0 is stored.
        num_workers: Maximum number of writer threads.
        use_xser: Write each tensor to a separate file, distributed over the data-parallel ranks.
        num_kept_ckpts: Keep this many of the newest tags, in commit order. None and -1 keep all; 0 is an error.
        async_save: Return as soon as the snapshot is complete. Later changes of `model`, `optimizer`, `scheduler` and
            `user_content` do not affect the checkpoint, which is committed once it is on disk.
        zero1_optimizer: Accepted; a ZeRO-1 optimizer is detected.
        use_zero1_dcp: Accepted; the states of any ZeRO-1 optimizer load on any topology.
        avoid_saving_lower_precision_weights: Accepted, without effect: the weights are always saved.
        layout: ``"native"`` writes the xla_ckpt format instead: fewer files, and work distributed evenly. By default,
            it is written, with a warning in the log, only if neuronx-distributed's layout cannot store the state:
            ZeRO-1 shards over context-parallel ranks, DTensors, SPMD arrays.
        **more: Further arguments of `xla_ckpt.save_checkpoint`. For example,
            ``options=xla_ckpt.SaveOptions(replicas="first")`` saves a job whose replicas have diverged.

    Raises:
        TypeError: `xla_ckpt.save_checkpoint` has no such argument.
        xla_ckpt.UsageError: An argument is invalid.
        xla_ckpt.CheckpointError: This save, or an earlier asynchronous one, failed; the same error on all ranks.
    """
    theirs = "xser" if use_xser else "pt"
    xla_ckpt.save_checkpoint(
        checkpoint_dir_str,
        str(tag),
        model,
        optimizer,
        scheduler,
        user_content,
        num_workers=num_workers,
        num_kept_ckpts=num_kept_ckpts,
        async_save=async_save,
        zero1_optimizer=zero1_optimizer,
        layout=(theirs, "native") if layout is None else layout,
        **more,
    )


@check_argument_names(xla_ckpt.load_checkpoint)
def load_checkpoint(
    path: PathLike,
    tag: str | None = None,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    num_workers: int = 8,
    strict: bool = True,
    use_zero1_dcp: bool = False,  # noqa: ARG001  # neuronx-distributed's signature
    **more: Any,
) -> Any:
    """Load a tag, the newest by default, into the given objects.

    Args:
        path: Root directory.
        tag: Name of the checkpoint; None loads the one committed last.
        model: A module, or a dict.
        optimizer: An optimizer, or a dict. Pass `model` in the same call.
        scheduler: A learning rate scheduler, or a dict.
        num_workers: Maximum number of reader threads.
        strict: False loads the entries that fit, and logs the others.
        use_zero1_dcp: Accepted; the format of the checkpoint is detected.
        **more: Further arguments of `xla_ckpt.load_checkpoint`, such as ``cast=True`` for a model of another precision,
            and ``trust_pickle=True`` for pickled objects in the user content, which can run any code.

    Returns:
        The user content of the save; None if there was none.

    Raises:
        xla_ckpt.NoCheckpointError: The tag does not exist, or there are no tags (also a RuntimeError, as in
            neuronx-distributed).
        xla_ckpt.CheckpointError: It does not fit, or is damaged. Nothing was changed.
        TypeError: `xla_ckpt.load_checkpoint` has no such argument.
    """
    return xla_ckpt.load_checkpoint(
        path,
        None if tag is None else str(tag),
        model,
        optimizer,
        scheduler,
        num_workers=num_workers,
        strict=strict,
        **more,
    ).user_content


@check_argument_names()
def has_checkpoint(checkpoint_dir_str: PathLike) -> bool:
    """Return True if a directory contains a complete checkpoint.

    Raises:
        xla_ckpt.StorageError: The directory cannot be read. (If it does not exist, the result is False.)
    """
    return xla_ckpt.has_checkpoint(checkpoint_dir_str)


def finalize_checkpoint() -> None:
    """Wait for all saves in flight.

    Raises:
        xla_ckpt.CheckpointError: One of them failed, and its error has not been raised yet.
    """
    xla_ckpt.finalize_checkpoint()
