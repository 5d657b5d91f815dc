"""neuronx-distributed's checkpoint functions, with its names, order and defaults of arguments.

They call `xla_ckpt`: a tag is committed atomically, `load_checkpoint` changes nothing unless the whole checkpoint
fits, and a checkpoint loads on another topology than the one that saved it. Files have neuronx-distributed's own
layout, which it can read, with a manifest beside them.
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
    """Save a training state under ``<checkpoint_dir_str>/<tag>``. All ranks make the same call.

    Args:
        checkpoint_dir_str: Root directory; made if absent.
        tag: Name of the checkpoint: any string that is a safe file name. It has to be given; an empty one is an error.
        model: A module, or a dict of arrays.
        optimizer: An optimizer, or a dict.
        scheduler: A learning rate scheduler, or a dict.
        user_content: Any Python value; rank 0's is stored.
        num_workers: Threads that write, at most.
        use_xser: Write each tensor to a file of its own, dealt out among the data-parallel ranks.
        num_kept_ckpts: Keep this many of the newest tags, by order of their commits. None and -1 keep all; 0 is an
            error.
        async_save: Return as soon as the state is frozen. Later changes of `model`, `optimizer`, `scheduler` and
            `user_content` do not reach the checkpoint, and it is committed as soon as it is on disk.
        zero1_optimizer: Accepted; a ZeRO-1 optimizer is recognised.
        use_zero1_dcp: Accepted; the states of any ZeRO-1 optimizer load on any topology.
        avoid_saving_lower_precision_weights: Accepted, and without effect: the weights are always saved.
        layout: ``"native"`` writes xla_ckpt's own format instead: fewer files, and work dealt out evenly. By default it
            is written, with a warning in the log, only where neuronx-distributed's layout has no place for the state:
            ZeRO-1 shards over context-parallel ranks, DTensors, SPMD arrays.
        **more: Further arguments of `xla_ckpt.save_checkpoint`: ``options=xla_ckpt.SaveOptions(replicas="first")``
            saves a job whose replicas have drifted apart, for instance.

    Raises:
        TypeError: `xla_ckpt.save_checkpoint` has no such argument.
        xla_ckpt.UsageError: An argument makes no sense.
        xla_ckpt.CheckpointError: This save failed, or an asynchronous one before it; the same error on all ranks.
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
        tag: Which checkpoint; None takes the one that was committed last.
        model: A module, or a dict.
        optimizer: An optimizer, or a dict. `model` is passed along with it, in the same call.
        scheduler: A learning rate scheduler, or a dict.
        num_workers: Threads that read, at most.
        strict: False loads what fits, and logs what does not.
        use_zero1_dcp: Accepted; how the checkpoint was written does not matter.
        **more: Further arguments of `xla_ckpt.load_checkpoint`: ``cast=True`` for a model of another precision, for
            instance, and ``trust_pickle=True`` for pickled objects in the user content, which can run any code.

    Returns:
        The user content of the save; None if there was none.

    Raises:
        xla_ckpt.NoCheckpointError: There is no such tag, or none at all (also a RuntimeError, as in
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
    """Whether a directory holds a complete checkpoint.

    Raises:
        xla_ckpt.StorageError: The directory cannot be read. (One that does not exist has none.)
    """
    return xla_ckpt.has_checkpoint(checkpoint_dir_str)


def finalize_checkpoint() -> None:
    """Wait for all saves in flight.

    Raises:
        xla_ckpt.CheckpointError: One of them failed, and nobody has been told yet.
    """
    xla_ckpt.finalize_checkpoint()
