"""Saving: from a program's objects to a save in flight."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from xla_ckpt.api.paths import PathLike, directory_at
from xla_ckpt.api.progress import Progress
from xla_ckpt.arrays.base import Placement
from xla_ckpt.engine.background import SAVES, SaveHandle
from xla_ckpt.engine.save import SaveJob, SaveReport, check_writable, run_save
from xla_ckpt.errors import CheckpointError, StorageError
from xla_ckpt.job.current import TIMEOUT, Job, current_job
from xla_ckpt.job.verdict import as_checkpoint_error
from xla_ckpt.layouts.writing import choices, writing
from xla_ckpt.plan.save_plan import SavePlan
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.rules import Rules
from xla_ckpt.snapshot.take import HostShard, Snapshot, take
from xla_ckpt.state.collect import State, prepare, samples, training_state
from xla_ckpt.state.describe import host_shards
from xla_ckpt.tags.cleaning import clean
from xla_ckpt.tags.lazy import save_tag
from xla_ckpt.tags.names import check_tag
from xla_ckpt.tags.retention import check_keep


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
    mesh: Mesh | str | None = None,
    shardings: Rules | None = None,
    pinned: bool = False,
    layout: str | Sequence[str] | None = None,
    progress: bool | None = None,
    timeout: float = TIMEOUT,
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
        user_content: Any Python value; rank 0's is stored. Plain values are stored as typed JSON, arrays as arrays;
            other objects are pickled, with a warning, and need ``trust_pickle=True`` to load.
        num_workers: Threads that write, at most.
        use_xser: Write neuronx-distributed's xser layout, with a manifest beside it: short for ``layout="xser"``.
        num_kept_ckpts: Keep this many of the newest tags that are not pinned, and delete older ones after the commit;
            None keeps all.
        async_save: Return as soon as the state is frozen, and write in the background.
        zero1_optimizer: Accepted for compatibility with neuronx-distributed; a ZeRO-1 optimizer is recognised.
        extras: Named objects with ``state_dict`` and ``load_state_dict`` (data loaders, `RNGState`), or dicts. One
            that differs from rank to rank is wrapped in `PerRank`.
        mesh: How the ranks are arranged; by default taken from an initialised ``parallel_state``, else pure data
            parallelism.
        shardings: Rules ``(regular expression, spec)`` for arrays that do not say themselves how they are split:
            ``(r"up_proj", ("tp", None))`` splits dim 0 over the mesh axis ``tp``. The first expression that is found
            in a leaf path or parameter name counts; optimizer state follows its parameter.
        pinned: Exempt this tag from retention, now and later.
        layout: ``"native"``; ``"xser"`` or ``"pt"``, which neuronx-distributed reads, too; or several of them, of which
            the first that can hold the state is written.
        progress: Show a progress bar: True, False, or None for only if it takes long, on a terminal.
        timeout: Seconds that a rank which is done waits for the others before all that are left give up.

    Returns:
        The save; finished already unless `async_save`.

    Raises:
        CheckpointError: The save failed (the same error on all ranks), or an asynchronous save before it on the same
            path did. The tag is as it was before.
    """
    options = _Options(
        num_workers, choices(layout, use_xser), num_kept_ckpts, async_save, mesh, shardings, pinned, progress, timeout
    )  # fmt: skip
    return _save(
        path, tag, lambda where: training_state(where, model, optimizer, scheduler, user_content, extras), options
    )


def save(
    path: PathLike,
    tag: str,
    tree: Any,
    *,
    num_workers: int = 8,
    use_xser: bool = False,
    num_kept_ckpts: int | None = None,
    async_save: bool = False,
    mesh: Mesh | str | None = None,
    shardings: Rules | None = None,
    pinned: bool = False,
    layout: str | Sequence[str] | None = None,
    progress: bool | None = None,
    timeout: float = TIMEOUT,
) -> SaveHandle:
    """Save any tree of containers, arrays (torch, XLA, numpy, jax) and plain values as one tag.

    The arguments, the result and the errors are those of `save_checkpoint`, which makes such a tree of its arguments.
    In a job of several ranks the plain values are the same on all of them.

    Raises:
        UnsupportedStateError: Something in the tree cannot be stored; nothing was written.
    """
    options = _Options(
        num_workers, choices(layout, use_xser), num_kept_ckpts, async_save, mesh, shardings, pinned, progress, timeout
    )  # fmt: skip
    return _save(path, tag, lambda _: State(tree), options)


@dataclass(frozen=True, slots=True)
class _Options:
    """The arguments of a save that are not its state."""

    num_workers: int
    layouts: tuple[str, ...]
    num_kept: int | None
    async_save: bool
    mesh: Mesh | str | None
    shardings: Rules | None
    pinned: bool
    progress: bool | None
    timeout: float


def _save(path: PathLike, tag: str, state: Callable[[Placement], State], options: _Options) -> SaveHandle:
    began = time.monotonic()
    root = directory_at(path)
    with SAVES.turn(root) as untold:
        job = current_job(root, options.mesh, doing="save", timeout=options.timeout)
        ready: _Ready | CheckpointError
        try:
            if untold is not None:
                raise untold
            ready = _ready(root, tag, state, options, job)
        except Exception as error:
            # The other ranks wait for this one: they hear of it through the save's verdict, and so does the caller.
            if job.exchange.size == 1:
                raise
            ready = as_checkpoint_error(error, "preparing", job.exchange.rank, path=root, tag=tag)
        stall = time.monotonic() - began

        def run() -> SaveReport:
            with job.taking_part():
                job.tidy()
                return carry_out()

        def carry_out() -> SaveReport:
            if isinstance(ready, CheckpointError):
                return run_save(ready, job.exchange, save_tag, path=root, tag=tag)
            try:
                plan = ready.plan()
                shown = False if options.async_save and options.progress is None else job.shows(options.progress)
                with Progress(f"save {tag}", plan.nbytes, shown) as bar:
                    save_job = ready.job(plan=plan, progress=bar)
                    return replace(run_save(save_job, job.exchange, save_tag, path=root, tag=tag), stall=stall)
            finally:
                ready.snapshot.release()

        after = functools.partial(clean, root) if job.exchange.rank == 0 else lambda: None
        handle = SAVES.start(root, tag, run, after)
    if not options.async_save:
        handle.result()
    return handle


@dataclass(frozen=True, slots=True)
class _Ready:
    """A save that needs nothing more of its caller."""

    plan: Callable[[], SavePlan]
    """Decides what this rank writes, once: in the background, unless the snapshot depends on it."""

    job: Callable[..., SaveJob]
    """Takes plan and progress."""

    snapshot: Snapshot


def _ready(root: str, tag: str, state: Callable[[Placement], State], options: _Options, job: Job) -> _Ready:
    """Everything that happens before the caller goes on: the checks, the description, and the frozen bytes."""
    check_tag(tag, root)
    check_keep(options.num_kept)
    if job.exchange.rank == 0:
        _check_root(root)
    world = job.exchange.size
    held = state(job.placement)
    prepared = prepare(held, job.placement, options.shardings, wholly=options.layouts != ("native",))
    how = writing(options.layouts, prepared, held, job.placement)
    leaves = prepared.described.leaves
    plan = functools.cache(how.plan)
    shards = host_shards(how.placed)
    freeze = options.async_save

    def lasts(shard: HostShard) -> bool:
        return shard.immutable or not freeze

    # Memory that its owner changes soon is looked at now, the rest in the background.
    now = samples(prepared, shards, lambda s: not lasts(s)) if world > 1 else {}
    written = shards
    if world > 1 and not all(map(lasts, shards.values())):  # what another rank writes is not copied here
        mine = {(source.leaf, source.shard) for file in plan().files for source in file.sources}
        written = {key: s for key, s in shards.items() if key in mine}
    snapshot = take(written, freeze=freeze)
    save_job = functools.partial(
        SaveJob, root=root, tag=tag, leaves=leaves, last=how.last, memory=snapshot.memory,
        skeleton=prepared.skeleton, aliases=prepared.described.aliases, objects=prepared.objects,
        named=prepared.named, parts=prepared.parts,
        samples=lambda: samples(prepared, shards, lasts) | now, mesh=job.placement.mesh, pinned=options.pinned,
        num_kept=options.num_kept, workers=max(1, options.num_workers),
    )  # fmt: skip
    return _Ready(plan, save_job, snapshot)


def _check_root(root: str) -> None:
    try:
        check_writable(root)
    except OSError as error:
        raise StorageError.of(error, "preparing the checkpoint directory", path=root) from error


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
