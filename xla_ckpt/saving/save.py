"""Save a checkpoint: the public functions `save_checkpoint`, `save` and `finalize_checkpoint`.

`_save` is the whole save on the caller's thread: it waits for the previous save on the same path, finds the job,
prepares the state and its snapshot, and starts the thread that runs a `SaveTask`.
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
from xla_ckpt.saving.capture import prepare_save
from xla_ckpt.saving.context import Cancellation, PreparedSave, SaveContext, SaveTiming
from xla_ckpt.saving.registry import BACKGROUND_TASKS, SAVES, SaveHandle, install_exit_hook
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
"""What ``only=`` takes, for messages."""


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
    """Save a training state as one tag, completely or not at all.

    All ranks of a job call it with the same arguments. An existing tag of the same name is replaced; the old one stays
    until the new one is committed.

    Args:
        path: Root directory; made if absent.
        tag: Name of the checkpoint: any string that is a safe file name, such as ``step_10``.
        model: A module, or a dict of arrays.
        optimizer: An optimizer, a dict of optimizers of this model, or a dict of arrays and plain values. Its state is
            stored by parameter *name*, taken from `model`; the names of several optimizers are not stored.
        scheduler: A learning rate scheduler, or a dict.
        user_content: Any Python value; rank 0's is stored. Plain values are stored as typed JSON, arrays as arrays;
            other objects are pickled, with a warning, and need ``trust_pickle=True`` to load.
        num_workers: Threads that write, at most.
        use_xser: Write neuronx-distributed's xser layout, with a manifest beside it: short for ``layout="xser"``.
        num_kept_ckpts: Keep this many of the newest tags that are not pinned, and delete older ones after the commit;
            None and -1 keep all. `SaveOptions.retention` has other policies.
        async_save: Return as soon as the state is frozen, and write in the background.
        zero1_optimizer: Accepted for compatibility with neuronx-distributed; a ZeRO-1 optimizer is recognised.
        extras: Named objects with ``state_dict`` and ``load_state_dict`` (data loaders, `RNGState`), or dicts. One
            that differs from rank to rank is wrapped in `PerRank`.
        mesh: How the ranks are arranged; by default taken from an initialised ``parallel_state``, else pure data
            parallelism.
        shardings: Rules ``(regular expression, spec)`` for arrays that do not say themselves how they are split:
            ``(r"up_proj", ("tp", None))`` splits dim 0 over the mesh axis ``tp``. The first expression that is found
            in a leaf path or parameter name counts; optimizer state follows its parameter.
        pinned: Whether this tag is exempt from retention, now and later. None leaves it as it is: a tag that is saved
            anew stays pinned, and a new one is not.
        layout: ``"native"``; ``"xser"`` or ``"pt"``, which neuronx-distributed reads, too; ``"smp"``, which SageMaker
            model parallel reads; ``"dcp"``, which torch.distributed.checkpoint reads, or ``"torchtitan"``, the same
            under torchtitan's keys; ``"orbax"``, which orbax reads; ``"orbax-manager"`` and ``"orbax-v1"``, steps of
            orbax's own managers of checkpoints; ``"torch_checkpointing"``, which torch_checkpointing reads; or several
            of them, of which the first that can hold the state is written.
        only: ``"adapters"`` leaves out the parameters of the model that have ``requires_grad=False`` and no ``lora_``
            in their names. Patterns of a shell leave out those whose leaf paths are like none of them:
            ``["model/*.lora_*", "model/head"]``. The tag names what is left out, with digests, and a load is refused if
            the model has others (docs/objects.md). None saves all.
        options: How the save goes about its work; by default those of `default_options`.

    Returns:
        The save; finished already unless `async_save`.

    Raises:
        UsageError: There is nothing to save, or an argument is not what its place is for. Nothing was written.
        DivergentReplicasError: Replicas differ, and `replicas` is ``"equal"``. The tag is as it was before.
        ChangedStateError: The program wrote to a tensor that ``"overlap"`` had not copied yet, and nothing had it wait.
            The tag is as it was before.
        NotDurableError: The tag is committed, and a loss of power may undo that: the storage refused to make its name
            durable, and to take it back.
        CheckpointError: The save failed (the same error on all ranks), or an asynchronous save before it on the same
            path did, and this call has saved nothing for that: make it again. The tag is as it was before.
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

    The arguments, the result and the errors are those of `save_checkpoint`, which makes such a tree of its arguments.
    In a job of several ranks the plain values are the same on all of them.

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
    """A save, from the call to the thread that writes.

    It has its turn among those on the same path, learns which ranks make it together, says what is asked of them,
    freezes the state, and starts the thread that does the rest.

    If this rank cannot freeze its state: one alone starts no thread, and the caller is told at once; one of several
    starts it all the same, because the others wait for what it says, and its caller hears of it as theirs do. What a
    signal handler raises is raised at once in both cases.

    Whatever is raised from here, by this library or by a signal handler, the save has ended or is given up, and reads
    none of the program's memory.
    """
    options, file = request.options, resolve_trace_file(request.options.trace)
    phases, cancellation = PhaseRecorder(keep_intervals=file is not None), Cancellation()
    root, uploader = _resolve_root(path, options)
    check_tag_is_string(tag, root.path)
    install_exit_hook()
    handle = SaveHandle(root.path, tag, cancellation, in_background=not request.blocking, uploader=uploader)
    frozen: PreparedSave | CheckpointError | None = None
    save: SaveTask | None = None
    refused: BaseException | None = None
    try:
        with SAVES.lock_for(root.path):
            failed = SAVES.wait_for_previous(root.path)
            if failed is not None:
                SAVES.wait_until_begun()
            phases.record_interval(WAIT, phases.origin, time.perf_counter(), about="for the save before")
            job = get_current_job(root.path, request.mesh, operation="save", timeout=options.timeout)
            order = request.build_context(path, tag, content, job, root=root, uploader=uploader)
            earlier = None if failed is None else failed.take_error(tag)
            job.skip_if_behind(order.call, earlier)
            frozen, refused = _try_prepare(order, content, job.placement, phases, request, earlier)
            timing = SaveTiming(
                phases=phases, stall=_record_stall(phases), trace=create_trace(file, "save", job.exchange)
            )
            save = SaveTask(
                context=order, job=job, prepared=frozen, timing=timing, cancellation=cancellation, on_begin=handle.began
            )
            if refused is not None:
                handle.mark_told()
            if refused is None or job.exchange.size > 1:
                SAVES.start(handle, save, options.on_error)
                frozen = save = None  # the state is in memory as long as its thread needs it
        if save is not None and refused is not None:
            save.report_refusal(
                refused
            )  # only now: a function of the program that hears of it may save on the same path
        if refused is not None:
            raise refused
        if request.blocking or is_interpreter_ending():
            handle.finish()
        elif failed is not None and job.exchange.size > 1:
            handle.finish_beginning()  # another rank may have the error to tell that was told to this one
        return handle
    except BaseException as error:
        handle.give_up(error)
        raise
    finally:
        del frozen, save, refused  # or this frame and the error's traceback would keep each other, and the state


def _try_prepare(
    context: SaveContext,
    content: TrainingObjects | PyTree,
    placement: RankInfo,
    phases: PhaseRecorder,
    request: SaveRequest,
    earlier: CheckpointError | None,
) -> tuple[PreparedSave | CheckpointError, BaseException | None]:
    """What this rank saves; or why it cannot (see `_as_rank_error`). `base` is the error of the save before."""
    if earlier is not None:
        return earlier, earlier
    try:
        return _prepare_state(context, content, placement, phases, request), None
    except BaseException as error:
        return _as_rank_error(error, context, placement)


def _as_rank_error(
    error: BaseException, context: SaveContext, placement: RankInfo
) -> tuple[CheckpointError, BaseException | None]:
    """What all ranks hear of an error of this one; and the error itself, if the caller is told at once.

    The other ranks wait for this one: they hear of it through the save's verdict, and so does the caller in most cases.
    """
    problem = as_checkpoint_error(error, "preparing", placement.rank, path=context.root.path, tag=context.tag)
    is_told = context.options.on_error == "raise" or isinstance(problem, PROGRAM_ERRORS)
    at_once = not isinstance(error, Exception) or (placement.world_size == 1 and is_told)
    return problem, error if at_once else None


def _resolve_root(path: PathLike, options: SaveOptions) -> tuple[Root, Uploader | None]:
    """Where a save commits, and what brings its tag to where the caller wants it, if that is another place."""
    if options.local is None:
        return open_root(open_store(path)), None
    uploader = UPLOADS.get_uploader(*resolve_local_and_remote(path, options.local))
    return uploader.root, uploader


def _record_stall(phases: PhaseRecorder) -> float:
    """Seconds that the caller has waited by now."""
    now = time.perf_counter()
    phases.record_interval(STALL, phases.origin, now)
    return now - phases.origin


def _check_root(context: SaveContext) -> None:
    """Fail early where a save could not even begin."""
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
    """What this rank saves. Mistakes of the program are found before the root directory is made."""
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
    """Wait for all saves in flight, those of `xla_ckpt.dcp` too, and free the memory that was kept for snapshots.

    It waits for uploads of this process, too (`SaveOptions.local`), and repeats those that failed; and on rank 0 for
    products (`SaveOptions.products`).

    Raises:
        CheckpointError: A save failed, and nobody has been told yet; or a tag was not uploaded, or a product
            not made. (Futures tell of the saves of `xla_ckpt.dcp`.)
    """
    try:
        SAVES.wait()
        UPLOADS.wait()
        BACKGROUND_TASKS.wait()
    finally:
        HOST_MEMORY_POOL.free()
        clear_saved_buffers()
        WRITE_BARRIER.close()
