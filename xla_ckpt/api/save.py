"""Saving: from a program's objects to a save in flight."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from xla_ckpt.api.freezing import freeze
from xla_ckpt.api.products import check_products
from xla_ckpt.api.replacing import check_place
from xla_ckpt.api.tags import near_and_far
from xla_ckpt.api.wish import Wish, chosen_layouts
from xla_ckpt.engine.background import SAVES, SaveHandle, install_exit_hook
from xla_ckpt.engine.cancellation import Cancellation
from xla_ckpt.engine.ending import MISTAKES
from xla_ckpt.engine.errands import ERRANDS
from xla_ckpt.engine.frozen import Frozen
from xla_ckpt.engine.garbage_collection import collector_paused
from xla_ckpt.engine.order import Order, Timing
from xla_ckpt.engine.phases import STALL, WAIT, Phases
from xla_ckpt.engine.save import Save
from xla_ckpt.engine.trace import traced
from xla_ckpt.engine.unchanged import forget_saved
from xla_ckpt.engine.upload import UPLOADS, Uploader
from xla_ckpt.errors import CheckpointError, storage_errors
from xla_ckpt.job.current import current_job
from xla_ckpt.job.verdict import as_checkpoint_error
from xla_ckpt.keywords import as_texts, taking_values
from xla_ckpt.logs import get_logger
from xla_ckpt.options import SaveOptions, chosen
from xla_ckpt.sharding.mesh import Mesh
from xla_ckpt.sharding.placement import Placement
from xla_ckpt.sharding.rules import Rules
from xla_ckpt.snapshot.arena import POOL
from xla_ckpt.state.guard import GUARD
from xla_ckpt.state.members import Objects, Tree
from xla_ckpt.storage.door import PathLike, store_at
from xla_ckpt.storage.threads import interpreter_is_ending
from xla_ckpt.storage.trace_file import trace_file
from xla_ckpt.tags.kept import policy_of
from xla_ckpt.tags.names import check_is_text, check_tag
from xla_ckpt.tags.root import Root
from xla_ckpt.tags.roots import root_of

logger = get_logger(__name__)

PATTERNS = '"adapters", or patterns of leaf paths such as ["model/*.lora_*", "model/head"]'
"""What ``only=`` takes, for messages."""


@taking_values(options=SaveOptions)
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
        Objects(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            user_content=user_content,
            extras=extras or {},
            only=() if only is None else as_texts("only", only, PATTERNS),
        ),
        Wish(
            layouts=chosen_layouts(layout, use_xser=use_xser),
            workers=num_workers,
            num_kept=num_kept_ckpts,
            waits=not async_save,
            mesh=mesh,
            shardings=shardings,
            pinned=pinned,
            options=chosen(SaveOptions, options),
        ),
    )


@taking_values(options=SaveOptions)
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
        Tree(tree),
        Wish(
            layouts=chosen_layouts(layout, use_xser=use_xser),
            workers=num_workers,
            num_kept=num_kept_ckpts,
            waits=not async_save,
            mesh=mesh,
            shardings=shardings,
            pinned=pinned,
            options=chosen(SaveOptions, options),
        ),
    )


def _save(path: PathLike, tag: str, content: Objects | Tree, wish: Wish) -> SaveHandle:
    """A save, from the call to the thread that writes.

    It has its turn among those on the same path, learns which ranks make it together, says what is asked of them,
    freezes the state, and starts the thread that does the rest.

    If this rank cannot freeze its state: one alone starts no thread, and the caller is told at once; one of several
    starts it all the same, because the others wait for what it says, and its caller hears of it as theirs do. What a
    signal handler raises is raised at once in both cases.

    Whatever is raised from here, by this library or by a signal handler, the save has ended or is given up, and reads
    none of the program's memory.
    """
    options, file = wish.options, trace_file(wish.options.trace)
    phases, cancellation = Phases(keep=file is not None), Cancellation()
    root, uploader = _root_of(path, options)
    check_is_text(tag, root.path)
    install_exit_hook()
    handle = SaveHandle(root.path, tag, cancellation, in_background=not wish.waits, uploader=uploader)
    frozen: Frozen | CheckpointError | None = None
    save: Save | None = None
    refused: BaseException | None = None
    try:
        with SAVES.turn(root.path):
            failed = SAVES.failed_before(root.path)
            if failed is not None:
                SAVES.wait_until_begun()
            phases.keep(WAIT, phases.origin, time.perf_counter(), about="for the save before")
            job = current_job(root.path, wish.mesh, doing="save", timeout=options.timeout)
            order = wish.order(path, tag, content, job, root=root, uploader=uploader)
            earlier = None if failed is None else failed.take_error(tag)
            job.leave_out_if_behind(order.call, earlier)
            frozen, refused = _frozen(order, content, job.placement, phases, wish, earlier)
            timing = Timing(phases=phases, stall=_stalled(phases), trace=traced(file, "save", job.exchange))
            save = Save(
                order=order, job=job, frozen=frozen, timing=timing, cancellation=cancellation, began=handle.began
            )
            if refused is not None:
                handle.mark_told()
            if refused is None or job.exchange.size > 1:
                SAVES.start(handle, save, options.on_error)
                frozen = save = None  # the state is in memory as long as its thread needs it
        if save is not None and refused is not None:
            save.refuse(refused)  # only now: a function of the program that hears of it may save on the same path
        if refused is not None:
            raise refused
        if wish.waits or interpreter_is_ending():
            handle.finish()
        elif failed is not None and job.exchange.size > 1:
            handle.finish_beginning()  # another rank may have the error to tell that was told to this one
        return handle
    except BaseException as error:
        handle.give_up(error)
        raise
    finally:
        del frozen, save, refused  # or this frame and the error's traceback would keep each other, and the state


def _frozen(
    order: Order,
    content: Objects | Tree,
    placement: Placement,
    phases: Phases,
    wish: Wish,
    earlier: CheckpointError | None,
) -> tuple[Frozen | CheckpointError, BaseException | None]:
    """What this rank saves; or why it cannot (see `_refusal`). `earlier` is the error of the save before."""
    if earlier is not None:
        return earlier, earlier
    try:
        return _prepared(order, content, placement, phases, wish), None
    except BaseException as error:
        return _refusal(error, order, placement)


def _refusal(error: BaseException, order: Order, placement: Placement) -> tuple[CheckpointError, BaseException | None]:
    """What all ranks hear of an error of this one; and the error itself, if the caller is told at once.

    The other ranks wait for this one: they hear of it through the save's verdict, and so does the caller in most cases.
    """
    problem = as_checkpoint_error(error, "preparing", placement.rank, path=order.root.path, tag=order.tag)
    is_told = order.options.on_error == "raise" or isinstance(problem, MISTAKES)
    at_once = not isinstance(error, Exception) or (placement.world == 1 and is_told)
    return problem, error if at_once else None


def _root_of(path: PathLike, options: SaveOptions) -> tuple[Root, Uploader | None]:
    """Where a save commits, and what brings its tag to where the caller wants it, if that is another place."""
    if options.local is None:
        return root_of(store_at(path)), None
    uploader = UPLOADS.of(*near_and_far(path, options.local))
    return uploader.root, uploader


def _stalled(phases: Phases) -> float:
    """Seconds that the caller has waited by now."""
    now = time.perf_counter()
    phases.keep(STALL, phases.origin, now)
    return now - phases.origin


def _prepare(order: Order) -> None:
    """Fail early where a save could not even begin."""
    order.root.check_commits()
    store = order.root.store
    if order.check is None:
        check_place(store, order.tag)
    hint = "Nothing was written. Pass a directory in which this user may make files."
    with storage_errors("making the root directory", path=store.path, hint=hint):
        store.prepare()


def _prepared(order: Order, content: Objects | Tree, placement: Placement, phases: Phases, wish: Wish) -> Frozen:
    """What this rank saves. Mistakes of the program are found before the root directory is made."""
    check_tag(order.tag, order.root.path)
    for layout in wish.layouts:
        layout.check_findable(order.root.store, order.tag)
    policy_of(order.num_kept, order.options.retention)
    roots = [order.root.store, *([] if order.uploader is None else [order.uploader.root.remote.store])]
    check_products(order.options.products, order.tag, roots, content.only)
    with phases.timed("describe"), collector_paused():
        state = content.state(placement)
    if placement.rank == 0 or order.uploader is not None:  # with local=, each host may have a disk of its own
        _prepare(order)
    with collector_paused():
        return freeze(state, placement, phases, wish)


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
        ERRANDS.wait()
    finally:
        POOL.free()
        forget_saved()
        GUARD.close()
