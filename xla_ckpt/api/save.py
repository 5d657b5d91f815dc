"""Saving: from a program's objects to a save in flight."""

from __future__ import annotations

import functools
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from xla_ckpt.adapters import module, pickles, stateful
from xla_ckpt.adapters import optimizer as optimizers
from xla_ckpt.adapters.plain import CODEC
from xla_ckpt.adapters.registry import Described, array_kind, describe, host_shards
from xla_ckpt.api.job import current_job
from xla_ckpt.api.progress import Progress
from xla_ckpt.coord.verdict import agree
from xla_ckpt.engine.background import SAVES, SaveHandle, install_exit_hook
from xla_ckpt.engine.save import SaveJob, SaveReport, check_writable, run_save
from xla_ckpt.errors import StorageError, UsageError
from xla_ckpt.layout.mesh import Mesh
from xla_ckpt.plan.save_plan import plan_save
from xla_ckpt.snapshot.take import take
from xla_ckpt.tags.cleaning import clean
from xla_ckpt.tags.lazy import save_tag
from xla_ckpt.tags.names import check_tag
from xla_ckpt.tags.retention import check_keep
from xla_ckpt.tree.flatten import Flat, flatten

PathLike = str | os.PathLike[str]


def save_checkpoint(
    path: PathLike,
    tag: str,
    model: Any = None,
    optimizer: Any = None,
    scheduler: Any = None,
    user_content: Any = None,
    num_workers: int = 8,
    use_xser: bool = False,
    num_kept_ckpts: int | None = None,
    async_save: bool = False,
    zero1_optimizer: bool = False,  # noqa: ARG001  # neuronx-distributed's signature; it is found out here
    *,
    extras: Mapping[str, Any] | None = None,
    mesh: Mesh | None = None,
    shardings: Sequence[tuple[str, Any]] | None = None,
    pinned: bool = False,
    progress: bool | None = None,
) -> SaveHandle:
    """Save a training state as one tag, completely or not at all.

    All ranks of a job call it with the same arguments. An existing tag of the same name is replaced; the old one stays
    until the new one is committed.

    Args:
        path: Root directory; made if absent.
        tag: Name of the checkpoint: any string that is a safe file name, such as ``step_10``.
        model: A module, or a dict of arrays.
        optimizer: An optimizer, or a dict. Its state is stored by parameter *name*, taken from `model`.
        scheduler: A learning rate scheduler, or a dict.
        user_content: Any Python value. Plain values are stored as typed JSON, arrays as arrays; other objects are
            pickled, with a warning, and need ``trust_pickle=True`` to load.
        num_workers: Threads that write, at most.
        use_xser: Write neuronx-distributed's xser layout instead of the native format.
        num_kept_ckpts: Keep this many of the newest tags that are not pinned, and delete older ones after the commit;
            None keeps all.
        async_save: Return as soon as the state is frozen, and write in the background.
        zero1_optimizer: Accepted for compatibility with neuronx-distributed; a ZeRO-1 optimizer is recognised.
        extras: Named objects with ``state_dict`` and ``load_state_dict`` (data loaders, `RNGState`), or dicts.
        mesh: How the ranks are arranged; by default found out.
        shardings: Rules ``(regular expression, spec)`` for arrays that do not say themselves how they are split.
        pinned: Exempt this tag from retention, now and later.
        progress: Show a progress bar: True, False, or None for only if it takes long, on a terminal.

    Returns:
        The save; finished already unless `async_save`.

    Raises:
        CheckpointError: The save failed (the same error on all ranks), or an asynchronous save before it on the same
            path did. The tag is as it was before.
    """
    names = module.parameter_names(model) if optimizer is not None else {}
    tree: dict[str, Any] = {}
    if model is not None:
        tree["model"] = module.tree_of(model)
    if optimizer is not None:
        tree["optimizer"] = optimizers.tree_of(optimizer, names)
    if scheduler is not None:
        tree["scheduler"] = stateful.tree_of(scheduler, "scheduler")
    if extras:
        tree["extras"] = {name: stateful.tree_of(member, f"extras/{name}") for name, member in extras.items()}
    if user_content is not None:
        tree["user_content"] = user_content
    return save(
        path, tag, tree, num_workers=num_workers, use_xser=use_xser, num_kept_ckpts=num_kept_ckpts,
        async_save=async_save, mesh=mesh, shardings=shardings, pinned=pinned, progress=progress,
    )  # fmt: skip


def save(
    path: PathLike,
    tag: str,
    tree: Any,
    *,
    num_workers: int = 8,
    use_xser: bool = False,
    num_kept_ckpts: int | None = None,
    async_save: bool = False,
    mesh: Mesh | None = None,
    shardings: Sequence[tuple[str, Any]] | None = None,
    pinned: bool = False,
    progress: bool | None = None,
) -> SaveHandle:
    """Save any tree of containers, arrays (torch, XLA, numpy, jax) and plain values as one tag.

    The arguments, the result and the errors are those of `save_checkpoint`, which makes such a tree of its arguments
    and calls this.

    Raises:
        UnsupportedStateError: Something in the tree cannot be stored; nothing was written.
    """
    began = time.monotonic()
    root = os.path.abspath(os.fspath(path))
    with SAVES.turn(root):
        job = current_job(root, mesh)

        def prepare() -> tuple[Flat, Described, list[bytes]]:
            check_tag(tag, root)
            check_keep(num_kept_ckpts)
            if use_xser or shardings:
                raise UsageError("use_xser and shardings are not there yet", path=root, tag=tag)
            if job.exchange.rank == 0:
                _check_root(root)
            flat = flatten(tree, array_kind, CODEC)
            return flat, describe(flat.arrays, job.placement), _pickle(flat)

        flat, described, objects = agree(job.exchange, "preparing", prepare)
        snapshot = take(host_shards(described.values), freeze=async_save)
        stall = time.monotonic() - began

        def run() -> SaveReport:
            try:
                plan = plan_save(described.leaves, job.exchange.rank, job.exchange.size)
                shown = False if async_save and progress is None else job.shows(progress)
                with Progress(f"save {tag}", plan.nbytes, shown) as bar:
                    save_job = SaveJob(
                        root, tag, plan, snapshot.memory,
                        {leaf.path: (leaf.dtype.name, leaf.shape) for leaf in described.leaves}, described.aliases,
                        flat.skeleton, objects, mesh=None if job.placement.mesh is None else str(job.placement.mesh),
                        pinned=pinned, num_kept=num_kept_ckpts, workers=max(1, num_workers), progress=bar,
                    )  # fmt: skip
                    return replace(run_save(save_job, job.exchange, save_tag), stall=stall)
            finally:
                snapshot.release()

        install_exit_hook()
        after = functools.partial(clean, root) if job.exchange.rank == 0 else lambda: None
        handle = SAVES.start(root, tag, run, after)
    if not async_save:
        handle.result()
    return handle


def _check_root(root: str) -> None:
    try:
        check_writable(root)
    except OSError as error:
        raise StorageError.of(error, "preparing the checkpoint directory", path=root) from error


def _pickle(flat: Flat) -> list[bytes]:
    for leaf, value in flat.objects:
        warnings.warn(
            f"{leaf}: a {type(value).__module__}.{type(value).__qualname__} is no plain value and will be pickled; "
            "loading it needs trust_pickle=True",
            stacklevel=4,
        )
    return [pickles.dump(value, leaf) for leaf, value in flat.objects]


def finalize_checkpoint() -> None:
    """Wait for all saves in flight, and free the memory that was kept for snapshots.

    Raises:
        CheckpointError: One of them failed, and nobody has been told yet.
    """
    from xla_ckpt.snapshot.memory import STAGING

    try:
        SAVES.wait()
    finally:
        STAGING.free()
