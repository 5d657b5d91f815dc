"""Save a checkpoint: the public functions `save_checkpoint`, `save` and `finalize_checkpoint`.

`_save` is the part of a save that runs on the caller's thread: it waits for the previous save on the same path, finds
the job, prepares the state and its snapshot, and starts the thread that runs a `SaveTask`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from xla_ckpt.core.sharding.mesh import Mesh, RankInfo
from xla_ckpt.core.sharding.sharding import ShardingRules
from xla_ckpt.distributed.consensus import as_checkpoint_error
from xla_ckpt.distributed.current_job import get_current_job
from xla_ckpt.errors import CheckpointError, wrap_os_errors
from xla_ckpt.features.local_first.upload import UPLOADS, Uploader
from xla_ckpt.features.products.product import check_products
from xla_ckpt.features.reuse.buffer_cache import clear_saved_buffers
from xla_ckpt.garbage_collection import pause_gc
from xla_ckpt.inspection.tags import resolve_local_and_remote
from xla_ckpt.keywords import check_arguments_and_fields, parse_texts
from xla_ckpt.logs import get_logger
from xla_ckpt.options import SaveOptions, resolve_options
from xla_ckpt.reports import PROGRAM_ERRORS, STALL, WAIT, PhaseRecorder, create_trace
from xla_ckpt.saving.background import BACKGROUND_TASKS, SAVES, SaveHandle, install_exit_hook
from xla_ckpt.saving.capture import prepare_save
from xla_ckpt.saving.context import Cancellation, PreparedSave, SaveContext, SaveTiming
from xla_ckpt.saving.request import SaveRequest, check_destination, parse_layouts
from xla_ckpt.saving.run import SaveTask
from xla_ckpt.snapshot.arena import HOST_MEMORY_POOL
from xla_ckpt.state.guard import WRITE_BARRIER
from xla_ckpt.state.objects import PyTree, TrainingObjects
from xla_ckpt.storage.resolve import PathLike, open_store
from xla_ckpt.storage.threads import is_interpreter_ending
from xla_ckpt.storage.trace_file import resolve_trace_file
from xla_ckpt.tags.entry import check_tag, check_tag_is_string
from xla_ckpt.tags.resolve import open_root
from xla_ckpt.tags.retention import resolve_policy
from xla_ckpt.tags.root import Root

logger = get_logger(__name__)

ONLY_PATTERNS = '"adapters", or patterns of leaf paths such as ["model/*.lora_*", "model/head"]'
"""Accepted values of ``only=``, for error messages."""


@check_arguments_and_fields(options=SaveOptions)
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
    shardings: ShardingRules | None = None,
    pinned: bool | None = None,
    layout: str | Sequence[str] | None = None,
    only: str | Sequence[str] | None = None,
    options: SaveOptions | None = None,
) -> SaveHandle:
    """Save a training state as one tag, atomically.

    All ranks of a job call this function with the same arguments. An existing tag of the same name is replaced; it is
    kept until the new one is committed.

    Args:
        path: Root directory; created if it does not exist.
        tag: Name of the checkpoint: any string that is a safe file name, such as ``step_10``.
        model: A module, or a dict of arrays.
        optimizer: An optimizer, a dict of optimizers of this model, or a dict of arrays and plain values. Its state is
            stored by parameter *name*, taken from `model`; the names of several optimizers are not stored.
        scheduler: A learning rate scheduler, or a dict.
        user_content: Any Python value; the value of rank 0 is stored. Plain values are stored as typed JSON, arrays as
            arrays; other objects are pickled, with a warning, and need ``trust_pickle=True`` to load.
        num_workers: Maximum number of writer threads.
        use_xser: Write neuronx-distributed's xser layout and a manifest; short for ``layout="xser"``.
        num_kept_ckpts: Number of the newest unpinned tags to keep; older ones are deleted after the commit. None and -1
            keep all. `SaveOptions.retention` has other policies.
        async_save: Return as soon as the snapshot is taken, and write in the background.
        zero1_optimizer: Accepted for compatibility with neuronx-distributed; a ZeRO-1 optimizer is detected
            automatically.
        extras: Named objects with ``state_dict`` and ``load_state_dict`` (data loaders, `RNGState`), or dicts. Wrap an
            object that differs between ranks in `PerRank`.
        mesh: Arrangement of the ranks; by default taken from an initialised ``parallel_state``, otherwise pure data
            parallelism.
        shardings: Rules ``(regular expression, spec)`` for arrays that do not declare their own sharding:
            ``(r"up_proj", ("tp", None))`` splits dim 0 over the mesh axis ``tp``. The first expression that matches
            anywhere in a leaf path or parameter name is used; optimizer state is sharded like its parameter.
        pinned: True if this tag is exempt from retention, now and later. None keeps the current setting: a tag that is
            saved again stays pinned, and a new tag is not pinned.
        layout: ``"native"``; ``"xser"`` or ``"pt"``, which neuronx-distributed reads, too; ``"smp"``, which SageMaker
            model parallel reads; ``"dcp"``, which torch.distributed.checkpoint reads, or ``"torchtitan"``, the same
            under torchtitan's keys; ``"orbax"``, which orbax reads; ``"orbax-manager"`` and ``"orbax-v1"``, steps of
            orbax's checkpoint managers; ``"torch_checkpointing"``, which torch_checkpointing reads; or a sequence of
            layouts, of which the first that supports the state is written.
        only: ``"adapters"`` leaves out the parameters of the model that have ``requires_grad=False`` and no ``lora_``
            in their names. Glob patterns, such as ``["model/*.lora_*", "model/head"]``, leave out the parameters whose
            leaf paths match none of them. The tag records the parameters that are left out, with digests, and a load
            raises an error if the model has different ones (docs/objects.md). None saves all.
        options: Settings of the save; by default those of `default_options`.

    Returns:
        The handle of the save; already finished unless `async_save`.

    Raises:
        UsageError: There is nothing to save, or an argument is invalid. Nothing was written.
        DivergentReplicasError: Replicas differ, and `replicas` is ``"equal"``. The tag is unchanged.
        ChangedStateError: The program wrote to a tensor that ``"overlap"`` had not copied yet, and nothing made it
            wait. The tag is unchanged.
        NotDurableError: The tag is committed, but a power failure may undo the commit: the storage failed to make its
            name durable, and also to remove it.
        CheckpointError: The save failed (the same error on all ranks), or an earlier asynchronous save on the same path
            failed and this call saved nothing because of that: call again. The tag is unchanged.
    """
    return _save(
        path,
        tag,
        TrainingObjects(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            user_content=user_content,
            extras=extras or {},
            only=() if only is None else parse_texts("only", only, ONLY_PATTERNS),
        ),
        SaveRequest(
            layouts=parse_layouts(layout, use_xser=use_xser),
            workers=num_workers,
            num_kept=num_kept_ckpts,
            blocking=not async_save,
            mesh=mesh,
            sharding_rules=shardings,
            pinned=pinned,
            options=resolve_options(SaveOptions, options),
        ),
    )


@check_arguments_and_fields(options=SaveOptions)
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
    shardings: ShardingRules | None = None,
    pinned: bool | None = None,
    layout: str | Sequence[str] | None = None,
    options: SaveOptions | None = None,
) -> SaveHandle:
    """Save any tree of containers, arrays (torch, XLA, numpy, jax) and plain values as one tag.

    The arguments, the result and the errors are the same as for `save_checkpoint`, which builds such a tree from its
    arguments. In a job of several ranks the plain values must be the same on all of them.

    Raises:
        UnsupportedStateError: Something in the tree cannot be stored; nothing was written.
        UsageError: The tree is None or an empty container; nothing was written.
    """
    return _save(
        path,
        tag,
        PyTree(tree),
        SaveRequest(
            layouts=parse_layouts(layout, use_xser=use_xser),
            workers=num_workers,
            num_kept=num_kept_ckpts,
            blocking=not async_save,
            mesh=mesh,
            sharding_rules=shardings,
            pinned=pinned,
            options=resolve_options(SaveOptions, options),
        ),
    )


def _save(path: PathLike, tag: str, content: TrainingObjects | PyTree, request: SaveRequest) -> SaveHandle:
    """Run a save from the call until its writer thread is started.

    Wait for earlier saves on the same path, find the ranks that take part, build the save context, prepare the state,
    and start the thread that does the rest.

    If this rank cannot prepare its state: a job of one rank starts no thread and raises the error at once. A rank of a
    larger job starts the thread nevertheless, because the other ranks wait for its message; its caller gets the error
    in the same way as theirs. An exception from a signal handler is raised at once in both cases.

    If an exception leaves this function, the save has ended or is cancelled, and does not read the program's memory.
    """
    options, file = request.options, resolve_trace_file(request.options.trace)
    phases, cancellation = PhaseRecorder(keep_intervals=file is not None), Cancellation()
    root, uploader = _resolve_root(path, options)
    check_tag_is_string(tag, root.path)
    install_exit_hook()
    handle = SaveHandle(root.path, tag, cancellation, in_background=not request.blocking, uploader=uploader)
    prepared: PreparedSave | CheckpointError | None = None
    task: SaveTask | None = None
    immediate_error: BaseException | None = None
    try:
        with SAVES.lock_for(root.path):
            failed_save = SAVES.wait_for_previous(root.path)
            if failed_save is not None:
                SAVES.wait_until_begun()
            phases.record_interval(WAIT, phases.origin, time.perf_counter(), about="for the save before")
            job = get_current_job(root.path, request.mesh, operation="save", timeout=options.timeout)
            context = request.build_context(path, tag, content, job, root=root, uploader=uploader)
            previous_error = None if failed_save is None else failed_save.take_error(tag)
            job.skip_if_behind(context.call, previous_error)
            prepared, immediate_error = _try_prepare(context, content, job.placement, phases, request, previous_error)
            timing = SaveTiming(
                phases=phases, stall=_record_stall(phases), trace=create_trace(file, "save", job.exchange)
            )
            task = SaveTask(
                context=context,
                job=job,
                prepared=prepared,
                timing=timing,
                cancellation=cancellation,
                on_begin=handle.began,
            )
            if immediate_error is not None:
                handle.mark_error_reported()
            if immediate_error is None or job.exchange.size > 1:
                SAVES.start(handle, task, options.on_error)
                prepared = task = None  # the state is kept in memory only as long as its thread needs it
        if task is not None and immediate_error is not None:
            # Only now, because a callback that receives the report may save on the same path.
            task.report_refusal(immediate_error)
        if immediate_error is not None:
            raise immediate_error
        if request.blocking or is_interpreter_ending():
            handle.finish()
        elif failed_save is not None and job.exchange.size > 1:
            handle.finish_beginning()  # another rank may still have to raise the error that was raised here
        return handle
    except BaseException as error:
        handle.give_up(error)
        raise
    finally:
        del prepared, task, immediate_error  # otherwise a cycle of this frame and the traceback keeps the state alive


def _try_prepare(
    context: SaveContext,
    content: TrainingObjects | PyTree,
    placement: RankInfo,
    phases: PhaseRecorder,
    request: SaveRequest,
    earlier: CheckpointError | None,
) -> tuple[PreparedSave | CheckpointError, BaseException | None]:
    """Return this rank's prepared save, or the error that prevents it (see `_as_rank_error`).

    `earlier` is the error of the previous save.
    """
    if earlier is not None:
        return earlier, earlier
    try:
        return _prepare_state(context, content, placement, phases, request), None
    except BaseException as error:
        return _as_rank_error(error, context, placement)


def _as_rank_error(
    error: BaseException, context: SaveContext, placement: RankInfo
) -> tuple[CheckpointError, BaseException | None]:
    """Return the error to send to all ranks, and the original error if it is raised to the caller at once.

    The other ranks wait for this one: they receive the error with the outcome of the save, and in most cases so does
    the caller.
    """
    problem = as_checkpoint_error(error, "preparing", placement.rank, path=context.root.path, tag=context.tag)
    raises_error = context.options.on_error == "raise" or isinstance(problem, PROGRAM_ERRORS)
    at_once = not isinstance(error, Exception) or (placement.world_size == 1 and raises_error)
    return problem, error if at_once else None


def _resolve_root(path: PathLike, options: SaveOptions) -> tuple[Root, Uploader | None]:
    """Return the root in which a save commits, and the uploader that copies the tag to the remote root, if any."""
    if options.local is None:
        return open_root(open_store(path)), None
    uploader = UPLOADS.get_uploader(*resolve_local_and_remote(path, options.local))
    return uploader.root, uploader


def _record_stall(phases: PhaseRecorder) -> float:
    """Record the stall and return the seconds that the caller has waited so far."""
    now = time.perf_counter()
    phases.record_interval(STALL, phases.origin, now)
    return now - phases.origin


def _check_root(context: SaveContext) -> None:
    """Raise an error early if the save could not even begin."""
    context.root.check_can_commit()
    store = context.root.store
    if context.check_destination is None:
        check_destination(store, context.tag)
    hint = "Nothing was written. Pass a directory in which this user may make files."
    with wrap_os_errors("making the root directory", path=store.path, hint=hint):
        store.prepare()


def _prepare_state(
    context: SaveContext,
    content: TrainingObjects | PyTree,
    placement: RankInfo,
    phases: PhaseRecorder,
    request: SaveRequest,
) -> PreparedSave:
    """Prepare this rank's save. Invalid arguments raise an error before the root directory is created."""
    check_tag(context.tag, context.root.path)
    for layout in request.layouts:
        layout.check_findable(context.root.store, context.tag)
    resolve_policy(context.num_kept, context.options.retention)
    roots = [context.root.store, *([] if context.uploader is None else [context.uploader.root.remote.store])]
    check_products(context.options.products, context.tag, roots, content.only)
    with phases.measure("describe"), pause_gc():
        state = content.capture(placement)
    if placement.rank == 0 or context.uploader is not None:  # with local=, each host may have a disk of its own
        _check_root(context)
    with pause_gc():
        return prepare_save(state, placement, phases, request)


def finalize_checkpoint() -> None:
    """Wait for all saves in flight, including saves of `xla_ckpt.dcp`, and free the memory kept for snapshots.

    Also wait for uploads of this process (`SaveOptions.local`), and repeat those that failed; on rank 0, also wait for
    products (`SaveOptions.products`).

    Raises:
        CheckpointError: A save failed, and its error has not been reported yet; or a tag was not uploaded, or a product
            was not made. (Saves of `xla_ckpt.dcp` report their errors through their futures.)
    """
    try:
        SAVES.wait()
        UPLOADS.wait()
        BACKGROUND_TASKS.wait()
    finally:
        HOST_MEMORY_POOL.free()
        clear_saved_buffers()
        WRITE_BARRIER.close()
